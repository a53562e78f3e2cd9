"""What comes back of a sequence: new text and ids, why it ended, and the counters that users see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from sglang.srt.managers.io_struct import FinishReason, SpecStats


class RequestFailedError(RuntimeError):
    """The scheduler refused or failed one request; ``status`` is the HTTP status that says how (503: queue full)."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class GenerateOutput:
    """What is new in one sequence since its previous output. Counters are totals; times are seconds.

    ``index`` counts the sequences of a request: prompt by prompt, and within a prompt sample by sample.
    """

    index: int
    rid: str
    text: str
    output_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    spec: SpecStats | None
    e2e_latency_s: float
    ttft_s: float
    queue_time_s: float

    def after(self, earlier: GenerateOutput) -> GenerateOutput:
        """Both outputs of a sequence as one."""
        return replace(self, text=earlier.text + self.text, output_ids=earlier.output_ids + self.output_ids)

    def raise_if_failed(self) -> None:
        """``ValueError`` when the scheduler found the request at fault, ``RequestFailedError`` when it failed it.

        An abort that a user asked for is no failure.
        """
        reason = self.finish_reason
        if reason is None or reason.type != "abort" or reason.status is None:
            return
        message = reason.message or "the request was aborted"
        if reason.status == 400:
            raise ValueError(message)
        raise RequestFailedError(message, reason.status)

    def meta_info(self) -> dict[str, Any]:
        """The ``meta_info`` object of the native API; ``spec_*`` only when speculation ran."""
        info = {
            "id": self.rid,
            "finish_reason": None if self.finish_reason is None else self.finish_reason.to_dict(),
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens,
            "e2e_latency": self.e2e_latency_s,
            "ttft": self.ttft_s,
            "queue_time": self.queue_time_s,
        }
        return info if self.spec is None else info | _spec_info(self.spec)


def join_outputs(parts: Sequence[GenerateOutput]) -> GenerateOutput:
    """All outputs of a sequence, in order, as one."""
    ids = tuple(token_id for part in parts for token_id in part.output_ids)
    return replace(parts[-1], text="".join(part.text for part in parts), output_ids=ids)


def _spec_info(spec: SpecStats) -> dict[str, Any]:
    # position j is reached only through position j - 1, so differences count the rounds that accepted exactly j drafts
    reached = (spec.verify_ct, *spec.accepted_by_position, 0)
    rounds, drafts = max(spec.verify_ct, 1), max(spec.draft_tokens, 1)
    return {
        "spec_verify_ct": spec.verify_ct,
        "spec_accept_token_num": spec.accepted_tokens,
        "spec_draft_token_num": spec.draft_tokens,
        "spec_accept_length": (spec.accepted_tokens + spec.verify_ct) / rounds,
        "spec_accept_rate": spec.accepted_tokens / drafts,
        "spec_accept_histogram": [more - less for more, less in pairwise(reached)],
        "spec_accept_by_position": [count / rounds for count in spec.accepted_by_position],
    }
