"""Who runs next: order of the waiting queue, what one extend step takes, and who gives way when memory is short."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.kv_manager import KVCacheManager
from sglang.srt.server_args_slices import ScheduleConfig

# Part of the output still allowed that admission expects a request to use, before --schedule-conservativeness.
_INITIAL_RATIO, _LOWEST_PART, _DECAY_STEPS, _RETRACTION_RISE = 0.7, 0.2, 600, 0.1
# Longer answers are rare however much is allowed; beyond this, retraction is the cheaper way.
_MAX_EXPECTED_NEW_TOKENS = 4096
# Matching every waiting prompt before every step costs more than it finds in a long queue.
_MAX_MATCHED_QUEUE_LEN = 128


class WaitingOrder:
    """Order of the waiting queue by ``policy``. Requests that ran already and gave way always come first."""

    def __init__(self, policy: str, kv_manager: KVCacheManager, seed: int) -> None:
        assert policy in ("fcfs", "lpm", "lof", "random"), policy
        self._policy = policy
        self._kv_manager = kv_manager
        self._random = random.Random(seed)

    def sort(self, waiting: list[Req]) -> None:
        """In place; requests that are equal to the policy stay in the order of arrival."""
        ranks = self._ranks(waiting)
        order = sorted(range(len(waiting)), key=lambda i: (waiting[i].first_run_s is None, ranks[i]))
        waiting[:] = [waiting[i] for i in order]

    def _ranks(self, waiting: list[Req]) -> list[tuple[float, float]]:
        if self._policy == "random":
            return [(self._random.random(), req.arrival_s) for req in waiting]
        if self._policy == "lof":
            return [(-req.max_new_tokens, req.arrival_s) for req in waiting]
        if self._policy == "lpm" and len(waiting) <= _MAX_MATCHED_QUEUE_LEN:
            return [(-self._kv_manager.match_len(req.token_ids), req.arrival_s) for req in waiting]
        return [(0, req.arrival_s) for req in waiting]


class NewTokenRatio:
    """Part of the allowed output that admission reserves memory for; falls with time, rises at a retraction."""

    def __init__(self, conservativeness: float) -> None:
        self._initial = min(1.0, _INITIAL_RATIO * conservativeness)
        self._lowest = self._initial * _LOWEST_PART
        self.value = self._initial

    def decay(self) -> None:
        self.value = max(self._lowest, self.value - (self._initial - self._lowest) / _DECAY_STEPS)

    def rise(self) -> None:
        self.value = min(1.0, max(self.value, self._initial) + _RETRACTION_RISE)


@dataclass(frozen=True, slots=True)
class ExtendPlan:
    """Requests of one extend step with the tokens that each computes. Only the last one's prompt may be cut."""

    reqs: tuple[Req, ...]
    extend_lens: tuple[int, ...]

    @property
    def chunked(self) -> Req | None:
        """The request whose prompt is not complete after this step."""
        last = self.reqs[-1]
        return last if last.committed_len + self.extend_lens[-1] < len(last.token_ids) else None


class PrefillPlanner:
    """Chooses the requests of an extend step under the budgets of tokens, memory and rows."""

    def __init__(
        self, kv_manager: KVCacheManager, config: ScheduleConfig, max_running_requests: int, max_tokens_per_step: int
    ) -> None:
        self._kv_manager = kv_manager
        self._max_tokens_per_step = max_tokens_per_step
        self.reconfigure(config, max_running_requests)

    def reconfigure(self, config: ScheduleConfig, max_running_requests: int) -> None:
        """Plan under these bounds from now on."""
        self.ratio = NewTokenRatio(config.conservativeness)
        self._config = config
        self._max_running_requests = max_running_requests

    def plan(self, waiting: Sequence[Req], running: Sequence[Req], chunked: Req | None) -> ExtendPlan | None:
        """The next extend step, with KV opened and grown; None when there is nothing to extend or no room for it.

        ``chunked`` goes on before others; ``waiting`` is taken from its beginning and stops at the first that does
        not fit.
        """
        plan: ExtendPlan | None = None
        reserved = sum(self._future_tokens(req) for req in running)
        if chunked is not None:
            extend_len = self._next_chunk(chunked)
            if extend_len == 0:
                return None
            plan = ExtendPlan((chunked,), (extend_len,))
            reserved += self._future_tokens(chunked) - extend_len
        for req in waiting:
            reqs, lens = ((), ()) if plan is None else (plan.reqs, plan.extend_lens)
            is_cut = plan is not None and plan.chunked is not None
            if is_cut or len(running) + len(reqs) >= self._max_running_requests:
                break
            extend_len = self._admit(req, self._room(lens), reserved, alone=not running and not reqs)
            if extend_len == 0:
                break
            plan = ExtendPlan((*reqs, req), (*lens, extend_len))
            reserved += self._future_tokens(req) - extend_len
        return plan

    def has_room(self, running: Sequence[Req], chunked: Req | None) -> bool:
        """Whether one more request may run, as far as their number goes."""
        return len(running) + (chunked is not None) < self._max_running_requests

    def _next_chunk(self, req: Req) -> int:
        """Grow a request for its next chunk and return the chunk's length; 0 when memory is short."""
        assert req.kv is not None
        extend_len = self._cut(len(req.token_ids) - req.committed_len, self._config.chunked_prefill_size)
        return extend_len if self._kv_manager.grow(req.kv, req.committed_len + extend_len) else 0

    def _room(self, lens: Sequence[int]) -> int | None:
        """Tokens that the step can still take; None is no limit. The first prompt is limited by the chunk alone."""
        chunk = self._config.chunked_prefill_size
        if not lens:
            return chunk
        limit = self._config.max_prefill_tokens
        return max(0, (limit if chunk is None else min(limit, chunk)) - sum(lens))

    def _cut(self, num_tokens: int, room: int | None) -> int:
        """What a step computes of ``num_tokens``: all, or as many whole pages as there is room for."""
        if room is None or num_tokens <= room:
            return num_tokens
        return 0 if self._config.chunked_prefill_size is None else room - room % self._kv_manager.page_size

    def _admit(self, req: Req, room: int | None, reserved: float, *, alone: bool) -> int:
        """Open the KV of a waiting request for its first ``extend_len`` tokens; 0, and nothing changed, without room.

        A request that has the pool for itself always fits, whatever it may come to need.
        """
        if room == 0:
            return 0
        kv = self._kv_manager.open(req.token_ids, req.prefix_limit)
        if kv is None:
            return 0
        missing = len(req.token_ids) - kv.cached_len
        extend_len = self._cut(missing, room)
        expected = missing + reserved + self._expected_new_tokens(req)
        fits = alone or expected <= self._kv_manager.available_tokens
        if extend_len > 0 and fits and self._kv_manager.grow(kv, kv.cached_len + extend_len):
            req.kv = kv
            return extend_len
        self._kv_manager.close(kv, req.token_ids)
        return 0

    def _future_tokens(self, req: Req) -> float:
        """Tokens an open request is expected to need beyond those it has slots for."""
        return len(req.token_ids) - req.committed_len + self._expected_new_tokens(req)

    def _expected_new_tokens(self, req: Req) -> float:
        new_tokens = min(req.max_new_tokens - req.output_len, _MAX_EXPECTED_NEW_TOKENS)
        return new_tokens * self.ratio.value + self._max_tokens_per_step + self._kv_manager.page_size


def retract(req: Req, kv_manager: KVCacheManager) -> None:
    """Take the KV of a request that will run again; what is cached by then need not be computed again."""
    assert req.kv is not None, f"request {req.rid} has no KV to give"
    kv_manager.close(req.kv, req.token_ids)
    req.kv = None


def make_room_for_decode(
    kv_manager: KVCacheManager, running: Sequence[Req], chunked: Req | None, max_tokens_per_step: int
) -> list[Req]:
    """Grow every running request for its next step, oldest first; where that fails the newest open request is
    retracted. Returns those retracted, which may be running or ``chunked``, newest first.

    The oldest is never retracted, so there is progress: one request fits the pool by itself.
    """
    by_age = sorted((*running, *(() if chunked is None else (chunked,))), key=lambda req: req.arrival_s)
    retracted: list[Req] = []
    for req in by_age[:]:
        if req is chunked:
            continue
        while req.kv is not None and not kv_manager.grow(req.kv, req.committed_len + max_tokens_per_step):
            assert len(by_age) > 1, f"request {req.rid} does not fit the KV pool alone: {kv_manager.stats()}"
            retracted.append(by_age.pop())
            retract(retracted[-1], kv_manager)
    return retracted
