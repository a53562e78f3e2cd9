"""A fixed prompt through the scheduler before the server is ready, to show what speculation gains."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.io_struct import TokenizedGenerateReqInput, TokenOut
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.hf_transformers.tokenizer import has_chat_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

_PROMPT = "Count from 1 to 20."
_NUM_TOKENS = 32


def self_test_ids(tokenizer: PreTrainedTokenizerFast) -> tuple[int, ...]:
    """The prompt as a chat turn, or as plain text where there is no chat template."""
    if has_chat_template(tokenizer):
        turn = [{"role": "user", "content": _PROMPT}]
        return tuple(tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False))
    return tuple(tokenizer.encode(_PROMPT))


def run_self_test(run: Callable[[TokenizedGenerateReqInput], TokenOut], input_ids: tuple[int, ...]) -> dict[str, Any]:
    """Acceptance in a greedy answer of at most 32 tokens. RuntimeError when the request does not end as it should."""
    params = SamplingParams(temperature=0.0, max_new_tokens=_NUM_TOKENS, sampling_seed=0)
    out = run(TokenizedGenerateReqInput("self-test", input_ids, params, stream=False))
    assert out.finish_reason is not None and out.spec is not None, out
    if out.finish_reason.type == "abort":
        raise RuntimeError(f"the self-test of speculation failed: {out.finish_reason.message}")
    rounds = max(out.spec.verify_ct, 1)
    accept_length = (out.spec.accepted_tokens + out.spec.verify_ct) / rounds
    pairs = zip(out.spec.accepted_by_position, out.spec.drafted_by_position, strict=True)
    by_position = [accepted / max(drafted, 1) for accepted, drafted in pairs]
    rates = ", ".join(f"{rate:.2f}" for rate in by_position)
    logger.info("Self-test of speculation. accept len: %.2f, accepted by position: %s", accept_length, rates)
    return {
        "completion_tokens": out.completion_tokens,
        "accept_length": accept_length,
        "accept_rate_by_position": by_position,
    }
