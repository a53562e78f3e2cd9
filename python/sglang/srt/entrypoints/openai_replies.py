"""Parts of replies that OpenAI's routes share: usage, why a choice ended, and the hidden state behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang.srt.managers.generate_output import GenerateOutput
from sglang.srt.managers.io_struct import FinishReason


def usage(
    outputs: Sequence[GenerateOutput],
    num_samples: int,
    reasoning_tokens: int = 0,
    *,
    cached: bool = False,
    spec: bool = False,
) -> dict[str, Any]:
    """Token counts of a request; a prompt counts once, however many samples it has. One output per sequence.

    ``cached``: with how much of the prompts was reused; ``spec``: with what speculation did, where it ran.
    """
    prompts = [out for out in outputs if out.index % num_samples == 0]
    prompt_tokens = sum(out.prompt_tokens for out in prompts)
    completion_tokens = sum(out.completion_tokens for out in outputs)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "reasoning_tokens": reasoning_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(out.cached_tokens for out in prompts)} if cached else None,
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens, **(_spec_details(outputs) if spec else {})},
    }


def _spec_details(outputs: Sequence[GenerateOutput]) -> dict[str, Any]:
    """OpenAI's names for predicted tokens, and what they come from; empty without speculation."""
    stats = [out.spec for out in outputs if out.spec is not None]
    if not stats:
        return {}
    accepted, rounds = sum(s.accepted_tokens for s in stats), sum(s.verify_ct for s in stats)
    taken = [sum(counts) for counts in zip(*(s.accepted_by_position for s in stats), strict=True)]
    drafted = [sum(counts) for counts in zip(*(s.drafted_by_position for s in stats), strict=True)]
    return {
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": sum(s.draft_tokens for s in stats) - accepted,
        "spec_verify_ct": rounds,
        "spec_accept_length": (accepted + rounds) / max(rounds, 1),
        "spec_accept_by_position": [a / max(d, 1) for a, d in zip(taken, drafted, strict=True)],
    }


def end_fields(reason: FinishReason | None) -> dict[str, Any]:
    """``finish_reason`` of a choice, and what it stopped at. Both None while it goes on."""
    if reason is None:
        return {"finish_reason": None, "matched_stop": None}
    return {"finish_reason": reason.type, "matched_stop": reason.matched}


def hidden_fields(out: GenerateOutput) -> dict[str, Any]:
    """The hidden state that chose the last token of a choice that ended, if it was asked for."""
    if out.hidden_states is None or out.finish_reason is None:
        return {}
    return {"hidden_states": list(out.hidden_states[-1][-1]) if out.hidden_states else []}
