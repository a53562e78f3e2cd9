"""Seconds of rounds by number of requests and draft length: measured at the start, corrected while serving."""

from __future__ import annotations

import bisect
import logging
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

logger = logging.getLogger(__name__)

_PACE_RATE = 1.0 / 8.0  # of what changes from moment to moment
_LEARNING_RATE = 0.1  # of round times, each time the length changes
_MOST_ERROR = 0.5  # of the logarithm of a round's time, as far as it is believed
_WARM_ROUNDS = 10
_MEASURED_ROWS = (1, 4, 16, 64)
MOST_MEASURED_ROWS = _MEASURED_ROWS[-1]
_FIRST_SWEEP = 0.3  # of the budget; numbers of requests beyond it are left out
_SETTLED = 0.02  # of the budget: rounds of a kind go on for that long, since the first ones pay for those before


class RoundTimes:
    """Only the ratios of lengths at one number of requests matter.

    Rounds of the kind that came last find their memory in caches. A length that stays is always such a round, so the
    first round of another length says nothing about it and only the ones behind it are believed.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = tuple(lengths)
        self._index = {n: at for at, n in enumerate(lengths)}
        # by length; before anything is measured, a draft costs a fifth of a round without any
        self._measured = {1: [1.0 + 0.2 * n for n in lengths]}
        self._between: dict[int, list[float]] = {}  # the same, interpolated
        self._kind = (0, 0)  # of the last round: requests and drafts
        self._paced = (0, 0)  # the kind that ``_pace`` is of
        self._pace = 0.0  # logarithm of how much slower rounds are now than they were measured
        self._host = 0.0  # time between two rounds, at the pace that was measured: the same for every length

    def measure(
        self, run: Callable[[int, int], None], max_rows: int, budget_s: float, clock: Callable[[], float]
    ) -> None:
        """``run(num_rows, num_drafts)`` is a round. Sweeps over all kinds of rounds, so that a moment in which the
        machine is slower or faster is shared by all of them. What the budget does not reach goes on as what it did."""
        # one draft more costs about the same wherever a chain has got to, so few lengths say what the others take
        picked = sorted({*self._lengths[:2], self._lengths[len(self._lengths) // 2], self._lengths[-1]})
        start, found = clock(), dict[int, dict[int, list[float]]]()

        def spent() -> float:
            return (clock() - start) / budget_s

        def take(num_rows: int, n: int) -> float:
            seconds = [_time(run, num_rows, n, clock)]
            while sum(seconds) < _SETTLED * budget_s:
                seconds.append(_time(run, num_rows, n, clock))
            return statistics.median(seconds)

        for _ in range(_WARM_ROUNDS):
            if spent() < _FIRST_SWEEP / 2:
                run(1, self._lengths[-1])
        for num_rows in sorted({min(num, max_rows) for num in _MEASURED_ROWS}):
            if not found or spent() < _FIRST_SWEEP:
                run(num_rows, picked[-1])  # memory that has never been used
                found[num_rows] = {n: [take(num_rows, n)] for n in picked}
        while spent() < 1.0:
            for num_rows, times in found.items():
                for n in picked:
                    if spent() < 1.0:
                        times[n].append(take(num_rows, n))
        self._measured = {num_rows: self._table(times) for num_rows, times in found.items()}
        self._between.clear()
        rows = {num: [round(1e3 * t, 2) for t in times] for num, times in self._measured.items()}
        logger.info("Round times (ms) of %s drafts by number of requests: %s", list(self._lengths), rows)

    def _table(self, times: Mapping[int, Sequence[float]]) -> list[float]:
        seconds = {n: statistics.median(found) for n, found in times.items()}
        for less, more in pairwise(sorted(seconds)):  # what is measured too high is never a reason to draft more
            seconds[more] = max(seconds[more], seconds[less])
        return [_line(seconds, n) for n in self._lengths]

    def of(self, num_rows: int) -> list[float]:
        """By draft length, from the start of a round to the start of the next."""
        return [seconds + self._host for seconds in self._alone(num_rows)]

    def _alone(self, num_rows: int) -> list[float]:
        """Without what the host does between two rounds."""
        found = self._between.get(num_rows)
        if found is None:
            columns = range(len(self._lengths))
            found = [_line({num: times[at] for num, times in self._measured.items()}, num_rows) for at in columns]
            self._between[num_rows] = found
        return found

    def observe(self, num_rows: int, num_drafts: int, round_s: float, host_s: float | None) -> None:
        """Rounds of one length and those of another one before them correct the ratio of their times; rounds of one
        length never do, since the speed of a machine changes from moment to moment."""
        at = self._index[num_drafts]
        expected = self._alone(num_rows)[at]
        if host_s is not None:
            self._host += _PACE_RATE * (min(host_s / round_s, 2.0) * expected - self._host)
        last, self._kind = self._kind, (num_rows, num_drafts)
        if last != self._kind:
            return
        error, paced = math.log(round_s / expected), self._paced
        if paced == last:
            self._pace += _PACE_RATE * (_believed(error - self._pace))
            return
        if paced[0] == num_rows:
            self._correct(num_rows, at, self._index[paced[1]], _LEARNING_RATE * _believed(error - self._pace))
        self._pace, self._paced = error, last

    def _correct(self, num_rows: int, at: int, other: int, step: float) -> None:
        """The ratio of two lengths; those beyond either of them move along with it."""
        low, high, part = _around(sorted(self._measured), num_rows)
        first, last = min(at, other), max(at, other)
        for num, share in ((low, 1.0 - part), (high, part)):
            change = math.exp(max(0.0, min(1.0, share)) * (step if at > other else -step) / 2)
            times = self._measured[num]
            times[: first + 1] = [seconds / change for seconds in times[: first + 1]]
            times[last:] = [seconds * change for seconds in times[last:]]
        self._between.clear()


def _believed(error: float) -> float:
    return max(-_MOST_ERROR, min(_MOST_ERROR, error))


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
