"""What a scheduler counts, for its log lines and for ``/server_info``."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from sglang.srt.managers.histogram import STEP_BOUNDS_S, Histogram

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Load:
    """What a scheduler holds at one moment. ``used_tokens``: slots of the KV pool that requests hold."""

    num_running: int
    num_queued: int
    used_tokens: int
    total_tokens: int

    @property
    def token_usage(self) -> float:
        return self.used_tokens / self.total_tokens


@dataclass(slots=True)  # mutable: counted up by the scheduler and its output processor
class Totals:
    """Counts since the start. ``verify_ct``: verified rows, one per request and speculative step."""

    num_requests: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_retractions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    prefill_steps: int = 0
    decode_steps: int = 0
    verify_ct: int = 0
    accepted_by_position: list[int] = field(default_factory=list)
    drafted_by_position: list[int] = field(default_factory=list)

    @property
    def accept_length(self) -> float:
        """Mean tokens per verified row; 0 before the first."""
        return (sum(self.accepted_by_position) + self.verify_ct) / self.verify_ct if self.verify_ct else 0.0

    @property
    def accept_rate_by_position(self) -> list[float]:
        """Of the rounds that had a draft there."""
        pairs = zip(self.accepted_by_position, self.drafted_by_position, strict=True)
        return [accepted / max(drafted, 1) for accepted, drafted in pairs]


class SchedulerMetrics:
    """Totals, and the interval between two log lines of decode steps."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts
        self._start_s = time.monotonic()
        self.reset()

    def reset(self) -> None:
        """Count from zero, as if just started."""
        none = [0] * self._num_drafts
        self.totals = Totals(accepted_by_position=[*none], drafted_by_position=[*none])
        self.last_gen_throughput = 0.0
        self.last_accept_length = 0.0
        self.prefill_step_s = Histogram(STEP_BOUNDS_S)
        self.decode_step_s = Histogram(STEP_BOUNDS_S)
        self.begin_interval()

    def begin_interval(self) -> None:
        """Time before now is not part of the next throughput."""
        self._interval_start_s = time.monotonic()
        self._interval_tokens = 0
        self._interval_rows = 0

    def count_decode(self, num_rows: int, num_tokens: int) -> None:
        """One decode step that gained ``num_tokens``."""
        self.totals.decode_steps += 1
        self._interval_rows += num_rows
        self._interval_tokens += num_tokens

    def log_prefill(self, load: Load, num_new: int, num_tokens: int, num_cached: int) -> None:
        logger.info(
            "Prefill batch. #new-seq: %d, #new-token: %d, #cached-token: %d, token usage: %.2f, #running-req: %d, "
            "#queue-req: %d",
            num_new,
            num_tokens,
            num_cached,
            load.token_usage,
            load.num_running,
            load.num_queued,
        )

    def log_decode(self, load: Load) -> None:
        """A line about the interval that ends now."""
        elapsed_s = time.monotonic() - self._interval_start_s
        self.last_gen_throughput = self._interval_tokens / max(elapsed_s, 1e-9)
        self.last_accept_length = self._interval_tokens / max(self._interval_rows, 1)
        logger.info(
            "Decode batch. #running-req: %d, #token: %d, token usage: %.2f, %sgen throughput (token/s): %.1f, "
            "#queue-req: %d",
            load.num_running,
            load.used_tokens,
            load.token_usage,
            f"accept len: {self.last_accept_length:.2f}, " if self._num_drafts else "",
            self.last_gen_throughput,
            load.num_queued,
        )
        self.begin_interval()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for ``/server_info``; speculative entries only when there are drafts."""
        info: dict[str, Any] = {
            "uptime_s": time.monotonic() - self._start_s,
            "last_gen_throughput": self.last_gen_throughput,
            "totals": asdict(self.totals),
            "prefill_step_s": self.prefill_step_s.to_dict(),
            "decode_step_s": self.decode_step_s.to_dict(),
        }
        if self._num_drafts:
            info["last_spec_accept_length"] = self.last_accept_length
            info["avg_spec_accept_length"] = self.totals.accept_length
            info["spec_accept_by_position"] = self.totals.accept_rate_by_position
        return info
