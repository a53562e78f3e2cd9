"""Draft length by expected tokens per second: what a round costs, measured, against what its drafts are worth.

The drafts of a round are accepted from the left, so a round of n drafts gains 1 + a_1 + a_1 a_2 + .. + a_1 .. a_n
tokens of a request on average, where a_j is the share of drafts at position j that are accepted among those reached.
What all requests accept is remembered for long, and what one request accepts better or worse than that, for a few
rounds. So a request that is new, or has not drafted lately, is taken to be like the others, and no length is written
off for ever. Of lengths that promise about the same the shortest is used, and now and then a neighbour of it, which
shows what that takes.
"""

from __future__ import annotations

import bisect
import logging
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from sglang.srt.model_executor.draft_length import least_length

logger = logging.getLogger(__name__)

_START = (4.0, 3.2)  # drafts reached and accepted at every position, before there are any: a hopeful start
_HORIZON_DRAFTS = 2000.0  # first drafts of rounds, all requests together
_ROW_HORIZON_ROUNDS = 10.0
_ROW_DRAFTS = 4.0  # that a request must have had to count as much as all others
_LEAST_MISSED = 0.01  # share of drafts, so that the first rejection ever does not count for everything
_CLOSE = 0.98  # of the best promise is as good, since what drafts promise is an estimate
_PACE_RATE = 1.0 / 8.0  # of what changes from moment to moment
_LEARNING_RATE = 0.1  # of round times, from two rounds that follow each other
_PROBE_EVERY = 64  # rounds: a neighbour of the best length is timed then
_WARM_ROUNDS, _MOST_SWEEPS = 10, 9
_MEASURED_ROWS = (1, 4, 16, 32, 64)
_FIRST_SWEEP = 0.2  # of the budget; numbers of requests beyond it are left out
_EVERY_LENGTH_TO = 8


def draft_lengths(num_steps: int, *, coarse: bool) -> tuple[int, ...]:
    """Lengths to choose from, none and ``num_steps`` among them. ``coarse``: few, since each costs memory or time."""
    if coarse:
        return tuple(sorted({0, num_steps // 2, num_steps}))
    longer = range(_EVERY_LENGTH_TO, num_steps, 4)
    return tuple(sorted({*range(min(num_steps, _EVERY_LENGTH_TO) + 1), *longer, num_steps}))


class RoundTimes:
    """Seconds of a round by number of requests and draft length; only their ratios at one number matter."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = tuple(lengths)
        # before anything is measured: a draft costs a fifth of a round without any
        self._measured: dict[int, dict[int, float]] = {1: {n: 1.0 + 0.2 * n for n in lengths}}
        self._between: dict[int, dict[int, float]] = {}  # the same, interpolated
        self._last: tuple[int, int, float] | None = None
        self._pace = 1.0  # of rounds now, against those measured
        self._host_s = 0.0  # between two rounds, which is the same for every length

    def measure(
        self, run: Callable[[int, int], None], max_rows: int, budget_s: float, clock: Callable[[], float]
    ) -> None:
        """``run(num_rows, num_drafts)`` is a round. Sweeps over all kinds of rounds, so that a moment in which the
        machine is slower or faster is shared by all of them. What the budget does not reach goes on as what it did."""
        lengths = self._lengths
        # one draft more costs about the same wherever a chain has got to, so few lengths say what the others take
        picked = sorted({*lengths[:2], lengths[len(lengths) // 2], lengths[-1]})
        for _ in range(_WARM_ROUNDS):
            run(1, lengths[-1])
        start, found = clock(), dict[int, dict[int, list[float]]]()
        for num_rows in sorted({min(num, max_rows) for num in _MEASURED_ROWS}):
            if found and clock() - start > _FIRST_SWEEP * budget_s:
                break
            run(num_rows, 0)
            found[num_rows] = {n: [_time(run, num_rows, n, clock)] for n in picked}
        for _ in range(_MOST_SWEEPS - 1):
            for num_rows, times in found.items():
                for n in picked:
                    if clock() - start < budget_s:
                        times[n].append(_time(run, num_rows, n, clock))
        self._measured = {num_rows: self._table(times) for num_rows, times in found.items()}
        self._between.clear()
        rows = {num: [round(1e3 * t, 2) for t in times.values()] for num, times in self._measured.items()}
        logger.info("Round times (ms) of %s drafts by number of requests: %s", list(lengths), rows)

    def _table(self, times: Mapping[int, Sequence[float]]) -> dict[int, float]:
        seconds = {n: statistics.median(found) for n, found in times.items()}
        for less, more in pairwise(sorted(seconds)):  # what is measured too high is never a reason to draft more
            seconds[more] = max(seconds[more], seconds[less])
        return {n: _line(seconds, n) for n in self._lengths}

    def of(self, num_rows: int) -> dict[int, float]:
        """Seconds by draft length, from the start of a round to the start of the next."""
        return {n: self._pace * seconds + self._host_s for n, seconds in self._alone(num_rows).items()}

    def _alone(self, num_rows: int) -> dict[int, float]:
        """Seconds as they were measured, without what the host does between two rounds."""
        found = self._between.get(num_rows)
        if found is None:
            found = {
                n: _line({num: times[n] for num, times in self._measured.items()}, num_rows) for n in self._lengths
            }
            self._between[num_rows] = found
        return found

    def observe(self, num_rows: int, num_drafts: int, round_s: float, host_s: float | None) -> None:
        """Two rounds in a row with other lengths correct the ratio of their times; one round never does, since the
        speed of a machine changes from moment to moment."""
        times = self._alone(num_rows)
        expected = times[num_drafts]
        self._pace += _PACE_RATE * (max(0.25, min(4.0, round_s / expected)) - self._pace)
        if host_s is not None:
            self._host_s += _PACE_RATE * (min(host_s, 2.0 * self._pace * expected) - self._host_s)
        last, self._last = self._last, (num_rows, num_drafts, round_s)
        if last is None or last[0] != num_rows or last[1] == num_drafts:
            return
        _, other, other_s = last
        error = math.log(round_s / other_s) - math.log(expected / times[other])
        step = _LEARNING_RATE * max(-0.5, min(0.5, error)) / 2
        low, high, part = _around(sorted(self._measured), num_rows)
        for num, share in ((low, 1.0 - part), (high, part)):
            share = max(0.0, min(1.0, share))
            self._measured[num][num_drafts] *= math.exp(share * step)
            self._measured[num][other] *= math.exp(-share * step)
        self._between.clear()


class Acceptance:
    """What all requests accept by position, and how many times as often one of them rejects."""

    def __init__(self, num_positions: int) -> None:
        self._reached = np.full(num_positions, _START[0])
        self._accepted = np.full(num_positions, _START[1])
        # of each running request: rejections, and how many there would have been if it were like the others
        self._rows: dict[str, tuple[float, float]] = {}

    def observe(self, num_drafts: int, rids: Sequence[str], accept_lens: Sequence[int], caps: Sequence[int]) -> None:
        """A round; what requests accepted is faded by it even if it had no drafts."""
        expected = [0.0, *np.cumsum(1.0 - self.rates()).tolist()]
        reached_by, accepted_by = np.zeros((2, len(self._reached) + 1))
        keep, rows = math.exp(-1.0 / _ROW_HORIZON_ROUNDS), {}
        for rid, accept_len, cap in zip(rids, accept_lens, caps, strict=True):
            usable = min(num_drafts, cap)
            reached, accepted = min(accept_len, usable), max(0, min(accept_len - 1, usable))
            reached_by[reached] += 1
            accepted_by[accepted] += 1
            rejections, fair = self._rows.get(rid, (0.0, 0.0))
            rows[rid] = keep * rejections + (accepted < reached), keep * fair + expected[reached]
        self._rows = rows
        fade = math.exp(-float(reached_by[1:].sum()) / _HORIZON_DRAFTS)
        self._reached = fade * self._reached + _at_least(reached_by)
        self._accepted = fade * self._accepted + _at_least(accepted_by)

    def rates(self) -> NDArray[np.float64]:
        """The share accepted of those reached, by position, of all requests."""
        return self._accepted / self._reached

    def drafts_accepted(self, rids: Sequence[str], caps: Sequence[int]) -> NDArray[np.float64]:
        """How many requests are expected to accept a draft at each position, and can use it."""
        seen, missed = np.array([self._rows.get(rid, (0.0, 0.0)) for rid in rids]), 1.0 - self.rates()
        weight = _ROW_DRAFTS * max(_LEAST_MISSED, float(missed.mean()))
        times_rejected = (seen[:, 0] + weight) / (seen[:, 1] + weight)
        rates = 1.0 - np.minimum(1.0, times_rejected[:, None] * missed)
        usable = np.arange(rates.shape[1]) < np.array(caps)[:, None]
        accepted: NDArray[np.float64] = (rates.cumprod(axis=1) * usable).sum(axis=0)
        return accepted


class AdaptiveLength:
    """Chooses the least length whose expected tokens per second are about the most."""

    def __init__(self, lengths: Sequence[int]) -> None:
        """``lengths``: those that can be had, ascending, 0 among them."""
        self._lengths = tuple(lengths)
        self._acceptance = Acceptance(self._lengths[-1])
        self._num_rounds = 0
        self.times = RoundTimes(lengths)

    def choose(self, rids: Sequence[str], caps: Sequence[int]) -> int:
        most = least_length(self._lengths, max(caps))
        if not most:
            return 0
        times = self.times.of(len(caps))
        gained = len(caps) + np.cumsum([0.0, *self._acceptance.drafts_accepted(rids, caps)])
        rates = {n: float(gained[n]) / times[n] for n in self._lengths if n <= most}
        best = next(n for n, rate in rates.items() if rate >= _CLOSE * max(rates.values()))
        self._num_rounds += 1
        turn, no_probe = divmod(self._num_rounds, _PROBE_EVERY)
        if no_probe:
            return best
        at = self._lengths.index(best) + (1 if turn % 2 else -1)
        return min(self._lengths[max(0, min(at, len(self._lengths) - 1))], most)

    def observe(self, num_drafts: int, rids: Sequence[str], accept_lens: Sequence[int], caps: Sequence[int]) -> None:
        self._acceptance.observe(num_drafts, rids, accept_lens, caps)

    def observe_time(self, num_rows: int, num_drafts: int, round_s: float, host_s: float | None) -> None:
        self.times.observe(num_rows, num_drafts, round_s, host_s)


def _at_least(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """How many are at least 1, 2, .., of counts by number 0, 1, .."""
    return counts[::-1].cumsum()[::-1][1:]


def _around(keys: Sequence[int], at: int) -> tuple[int, int, float]:
    """The two of ``keys`` (ascending) nearest to both sides of ``at``, or the last two, and how far between ``at``
    is: above 1 beyond the last."""
    if len(keys) == 1:
        return keys[0], keys[0], 1.0
    right = min(bisect.bisect_left(keys, at, lo=1), len(keys) - 1)
    low, high = keys[right - 1], keys[right]
    return low, high, (at - low) / (high - low)


def _line(values: Mapping[int, float], at: int) -> float:
    """Through the two neighbours of ``at``; never below the last."""
    low, high, part = _around(sorted(values), at)
    found = (1.0 - part) * values[low] + part * values[high]
    return max(found, values[high]) if part > 1.0 else found


def _time(run: Callable[[int, int], None], num_rows: int, num_drafts: int, clock: Callable[[], float]) -> float:
    start = clock()
    run(num_rows, num_drafts)
    return clock() - start
