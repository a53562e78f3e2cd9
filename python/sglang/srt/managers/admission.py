"""From a message to a ``Req``: what a scheduler takes, in one place."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from sglang.srt.managers.detokenizer_manager import TokenPieces
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.schedule_batch import AskedOutputs, Req
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor, load_processor
from sglang.srt.sampling.logprobs import TokenLogprobs
from sglang.srt.sampling.stop_regex import RegexStops
from sglang.srt.sampling.thought_budget import ThoughtBudget, ThoughtTokens
from sglang.srt.server_args_slices import ScheduleConfig
from sglang.srt.speculative.spec_info import SpecCapabilities

_SEED_BITS = 62


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """What one request may take. ``max_len``: tokens of prompt and output together, so that a request always fits the
    KV pool by itself. ``has_tokenizer``: stop strings can be looked for. ``thought_tokens``: None when the model's
    tokenizer has none. ``custom_logit_processors`` and ``hidden_states``: whether requests may ask for them."""

    max_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    has_tokenizer: bool
    thought_tokens: ThoughtTokens | None = None
    custom_logit_processors: bool = False
    hidden_states: bool = False

    @property
    def max_req_input_len(self) -> int:
        """Longest prompt, in tokens; one is left for the answer."""
        return self.max_len - 1


def make_limits(
    facts: dict[str, Any], capabilities: SpecCapabilities, config: ScheduleConfig, pieces: TokenPieces | None
) -> AdmissionLimits:
    """From what a worker says of itself. ``ValueError`` when its KV pool is too small for any request."""
    total: int = facts["max_total_num_tokens"]
    max_len = min(facts["context_len"], total - capabilities.max_tokens_per_step)
    if max_len < 2:
        raise ValueError(
            f"a KV pool of {total} tokens is too small for a request, a step needs {capabilities.max_tokens_per_step} "
            "beyond its tokens: raise --max-total-tokens or --mem-fraction-static"
        )
    return AdmissionLimits(
        max_len,
        facts["vocab_size"],
        tuple(facts["eos_token_ids"]),
        has_tokenizer=pieces is not None,
        thought_tokens=None if pieces is None else pieces.thought_tokens,
        custom_logit_processors=config.enable_custom_logit_processor,
        hidden_states=config.enable_return_hidden_states,
    )


def make_req(msg: TokenizedGenerateReqInput, limits: AdmissionLimits, seeds: random.Random, arrival_s: float) -> Req:
    """``ValueError`` in one sentence when the request cannot be served.

    A request without a seed draws one from ``seeds``. ``max_new_tokens`` is limited by what fits behind the prompt.
    """
    params = msg.sampling_params
    _check_input_ids(msg.input_ids, limits)
    _check_vocabulary("stop_token_ids", params.stop_token_ids, limits)
    _check_vocabulary("logit_bias", [token for token, _ in params.logit_bias], limits)
    for name, stops in (("stop", params.stop), ("stop_regex", params.stop_regex)):
        if stops and not limits.has_tokenizer:
            raise ValueError(f"sampling_params.{name} needs a tokenizer, and this server has none: use stop_token_ids")
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
        regex_stops=RegexStops(params.stop_regex) if params.stop_regex else None,
        logit_processor=_logit_processor(msg, limits),
        thought_budget=_thought_budget(msg, limits),
        asked=_asked_outputs(msg, limits),
        unsent_accept_lens=[] if msg.return_accept_lens else None,
    )


def _logit_processor(msg: TokenizedGenerateReqInput, limits: AdmissionLimits) -> CustomLogitProcessor | None:
    if msg.custom_logit_processor is None:
        return None
    if not limits.custom_logit_processors:
        raise ValueError(
            "custom_logit_processor is not allowed by this server: start it with --enable-custom-logit-processor"
        )
    return load_processor(msg.custom_logit_processor)


def _thought_budget(msg: TokenizedGenerateReqInput, limits: AdmissionLimits) -> ThoughtBudget | None:
    max_tokens = msg.sampling_params.max_thinking_tokens
    if max_tokens is None:
        return None
    if limits.thought_tokens is None:
        raise ValueError("max_thinking_tokens needs a tokenizer with marks around thoughts: leave it out")
    return ThoughtBudget(limits.thought_tokens, max_tokens, msg.input_ids)


def _asked_outputs(msg: TokenizedGenerateReqInput, limits: AdmissionLimits) -> AskedOutputs | None:
    if msg.return_hidden_states and not limits.hidden_states:
        raise ValueError(
            "return_hidden_states is not allowed by this server: start it with --enable-return-hidden-states"
        )
    if msg.logprobs is None and not msg.return_hidden_states:
        return None
    prompt_len, options = len(msg.input_ids), msg.logprobs
    if options is None:
        return AskedOutputs(prompt_len, None, True, next_row=0)
    if options.start_len > prompt_len:
        raise ValueError(
            f"logprob_start_len is {options.start_len}, but the prompt has {prompt_len} tokens: give at most that"
        )
    _check_vocabulary("token_ids_logprob", options.token_ids, limits)
    start_len = prompt_len if options.start_len == -1 else options.start_len
    asked = AskedOutputs(
        prompt_len,
        replace(options, start_len=start_len),
        msg.return_hidden_states,
        next_row=0 if msg.return_hidden_states else start_len,
    )
    if start_len < prompt_len:  # nothing is known of what comes before the first token that is reported
        asked.prompt_logprobs.append(TokenLogprobs(msg.input_ids[start_len], None))
    return asked


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
