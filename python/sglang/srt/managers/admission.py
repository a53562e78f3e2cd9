"""From a message to a ``Req``: what a scheduler takes, in one place."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.speculative.spec_info import SpecCapabilities

_SEED_BITS = 62


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """What one request may take. ``max_len``: tokens of prompt and output together, so that a request always fits the
    KV pool by itself. ``has_tokenizer``: stop strings can be looked for."""

    max_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    has_tokenizer: bool

    @property
    def max_req_input_len(self) -> int:
        """Longest prompt, in tokens; one is left for the answer."""
        return self.max_len - 1


def make_limits(facts: dict[str, Any], capabilities: SpecCapabilities, *, has_tokenizer: bool) -> AdmissionLimits:
    """From what a worker says of itself. ``ValueError`` when its KV pool is too small for any request."""
    total: int = facts["max_total_num_tokens"]
    max_len = min(facts["context_len"], total - capabilities.max_tokens_per_step)
    if max_len < 2:
        raise ValueError(
            f"a KV pool of {total} tokens is too small for a request, a step needs {capabilities.max_tokens_per_step} "
            "beyond its tokens: raise --max-total-tokens or --mem-fraction-static"
        )
    return AdmissionLimits(max_len, facts["vocab_size"], tuple(facts["eos_token_ids"]), has_tokenizer)


def make_req(msg: TokenizedGenerateReqInput, limits: AdmissionLimits, seeds: random.Random, arrival_s: float) -> Req:
    """``ValueError`` in one sentence when the request cannot be served.

    A request without a seed draws one from ``seeds``. ``max_new_tokens`` is limited by what fits behind the prompt.
    """
    params = msg.sampling_params
    _check_input_ids(msg.input_ids, limits)
    _check_vocabulary("stop_token_ids", params.stop_token_ids, limits)
    _check_vocabulary("logit_bias", [token for token, _ in params.logit_bias], limits)
    if params.stop and not limits.has_tokenizer:
        raise ValueError("sampling_params.stop needs a tokenizer, and this server has none: use stop_token_ids")
    room = limits.max_len - len(msg.input_ids)
    eos = () if params.ignore_eos else limits.eos_token_ids
    return Req(
        rid=msg.rid,
        token_ids=array("i", msg.input_ids),
        prompt_len=len(msg.input_ids),
        params=params,
        max_new_tokens=room if params.max_new_tokens is None else min(params.max_new_tokens, room),
        stop_ids=frozenset((*eos, *params.stop_token_ids)),
        seed=seeds.getrandbits(_SEED_BITS) if params.sampling_seed is None else params.sampling_seed,
        stream=msg.stream,
        arrival_s=arrival_s,
    )


def _check_input_ids(input_ids: tuple[int, ...], limits: AdmissionLimits) -> None:
    if not input_ids:
        raise ValueError("input_ids is empty: give at least one token")
    if len(input_ids) > limits.max_req_input_len:
        raise ValueError(
            f"input_ids has {len(input_ids)} tokens, but at most {limits.max_req_input_len} fit: shorten the prompt"
        )
    _check_vocabulary("input_ids", (min(input_ids), max(input_ids)), limits)


def _check_vocabulary(name: str, token_ids: Iterable[int], limits: AdmissionLimits) -> None:
    for token in token_ids:
        if not 0 <= token < limits.vocab_size:
            raise ValueError(f"{name} has the token id {token}: ids must be from 0 to {limits.vocab_size - 1}")
