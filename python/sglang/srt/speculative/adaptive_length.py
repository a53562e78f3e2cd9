"""Draft length by expected tokens per second: what a round costs, measured, against what its drafts are worth.

The drafts of a round are accepted from the left, so a round of n drafts gains 1 + a_1 + a_1 a_2 + .. + a_1 .. a_n
tokens on average, where a_j is the share of drafts at position j that are accepted among those reached. Every count
behind an a_j fades with rounds, seen or not, and where little is left of it the position before answers for it. So a
length that is not used is not written off for ever. Now and then a neighbour of the best length is used, which shows
what it takes and what is accepted there.
"""

from __future__ import annotations

import bisect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from sglang.srt.model_executor.draft_length import least_length

logger = logging.getLogger(__name__)

_GUESS = 0.5  # of the first draft's acceptance
_GUESS_WEIGHT = 1.0  # in observed drafts
_START = (4.0, 3.2)  # drafts reached and accepted at every position, before there are any: a hopeful start
# what was observed fades with rounds, and faster where they have many rows
_HORIZON_ROUNDS, _HORIZON_ROWS = 32.0, 64.0
# drafting has to promise so much more than no drafts, since what it promises is an estimate
_MARGIN = 1.03
_PACE_RATE = 1.0 / 8.0  # of what changes from moment to moment
_LEARNING_RATE = 0.1  # of round times, from two rounds that follow each other
_PROBE_EVERY = 64  # rounds: a neighbour of the best length is timed then
_WARM_ROUNDS, _MEASURED_ROUNDS = 10, 5
_MAX_MEASURED_ROWS = 64
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
        self._used: dict[int, dict[int, float]] = {}
        self._last: tuple[int, int, float] | None = None
        self._pace = 1.0  # of rounds now, against those measured
        self._host_s = 0.0  # between two rounds, which is the same for every length

    def measure(
        self, run: Callable[[int, int], None], max_rows: int, budget_s: float, clock: Callable[[], float]
    ) -> None:
        """``run(num_rows, num_drafts)`` is a round. What the budget does not reach goes on as what it did."""
        start, num_rows = clock(), 1
        for _ in range(_WARM_ROUNDS):
            run(1, self._lengths[-1])
        while num_rows <= min(max_rows, _MAX_MEASURED_ROWS) and clock() - start < budget_s:
            self._measured[num_rows] = self._measure_at(run, num_rows, clock)
            num_rows *= 2
        self._used.clear()
        rows = {num: [round(1e3 * t, 2) for t in times.values()] for num, times in self._measured.items()}
        logger.info("Round times (ms) of %s drafts by number of requests: %s", list(self._lengths), rows)

    def _measure_at(
        self, run: Callable[[int, int], None], num_rows: int, clock: Callable[[], float]
    ) -> dict[int, float]:
        """One draft more costs about the same wherever a chain has got to, so few lengths say what the others take."""
        lengths = self._lengths
        picked = sorted({*lengths[:2], lengths[len(lengths) // 2], lengths[-1]})
        seconds = {n: _best_of(run, num_rows, n, clock) for n in picked}
        for less, more in pairwise(picked):  # what is measured too high is never a reason to draft more
            seconds[more] = max(seconds[more], seconds[less])
        return {n: _line(seconds, n) for n in lengths}

    def of(self, num_rows: int) -> dict[int, float]:
        """Seconds by draft length, from the start of a round to the start of the next."""
        return {n: self._pace * seconds + self._host_s for n, seconds in self._alone(num_rows).items()}

    def _alone(self, num_rows: int) -> dict[int, float]:
        """Seconds by draft length as they were measured, without what the host does between two rounds."""
        found = self._used.get(num_rows)
        if found is None:
            found = self._used[num_rows] = self._interpolate(num_rows)
        return found

    def observe(self, num_rows: int, num_drafts: int, round_s: float, host_s: float | None) -> None:
        """Two rounds in a row with other lengths correct the ratio of their times; one round never does, since the
        speed of a machine changes from moment to moment."""
        times = self._alone(num_rows)
        pace = max(0.25, min(4.0, round_s / times[num_drafts]))
        self._pace += _PACE_RATE * (pace - self._pace)
        if host_s is not None:
            self._host_s += _PACE_RATE * (min(host_s, 2.0 * self._pace * times[num_drafts]) - self._host_s)
        last, self._last = self._last, (num_rows, num_drafts, round_s)
        if last is None or last[0] != num_rows or last[1] == num_drafts:
            return
        _, other, other_s = last
        error = math.log(round_s / other_s) - math.log(times[num_drafts] / times[other])
        step = _LEARNING_RATE * max(-0.5, min(0.5, error)) / 2
        times[num_drafts] *= math.exp(step)
        times[other] *= math.exp(-step)

    def _interpolate(self, num_rows: int) -> dict[int, float]:
        return {n: _line({num: times[n] for num, times in self._measured.items()}, num_rows) for n in self._lengths}


class Acceptance:
    """Drafts reached and accepted at each position, fading with rounds."""

    def __init__(self, num_positions: int) -> None:
        self._reached = [_START[0]] * num_positions
        self._accepted = [_START[1]] * num_positions

    def observe(self, num_drafts: int, accept_lens: Sequence[int], caps: Sequence[int]) -> None:
        fade = math.exp(-max(1.0 / _HORIZON_ROUNDS, len(caps) / _HORIZON_ROWS))
        for j in range(len(self._reached)):
            self._reached[j] *= fade
            self._accepted[j] *= fade
        for accept_len, cap in zip(accept_lens, caps, strict=True):
            usable = min(num_drafts, cap)
            for j in range(min(accept_len, usable)):
                self._reached[j] += 1.0
                self._accepted[j] += j + 1 < accept_len

    def rates(self) -> list[float]:
        """The share accepted of those reached, by position."""
        rates, guess = [], _GUESS
        for reached, accepted in zip(self._reached, self._accepted, strict=True):
            guess = (accepted + _GUESS_WEIGHT * guess) / (reached + _GUESS_WEIGHT)
            rates.append(guess)
        return rates


class AdaptiveLength:
    """Chooses the length with the most expected tokens per second."""

    def __init__(self, lengths: Sequence[int]) -> None:
        """``lengths``: those that can be had, ascending, 0 among them."""
        self._lengths = tuple(lengths)
        self._acceptance = Acceptance(self._lengths[-1])
        self._num_rounds = 0
        self.times = RoundTimes(lengths)

    def choose(self, caps: Sequence[int]) -> int:
        most = least_length(self._lengths, max(caps))
        times, gained = self.times.of(len(caps)), self._gains(caps)
        best = max((n for n in self._lengths if n <= most), key=lambda n: gained[n] / times[n])
        if gained[best] / times[best] < _MARGIN * gained[0] / times[0]:
            best = 0
        self._num_rounds += 1
        turn, no_probe = divmod(self._num_rounds, _PROBE_EVERY)
        if no_probe or not most:
            return best
        at = self._lengths.index(best) + (1 if turn % 2 else -1)
        return min(self._lengths[max(0, min(at, len(self._lengths) - 1))], most)

    def observe(self, num_drafts: int, accept_lens: Sequence[int], caps: Sequence[int]) -> None:
        self._acceptance.observe(num_drafts, accept_lens, caps)

    def observe_time(self, num_rows: int, num_drafts: int, round_s: float, host_s: float | None) -> None:
        self.times.observe(num_rows, num_drafts, round_s, host_s)

    def _gains(self, caps: Sequence[int]) -> list[float]:
        """Tokens that a round of each length is expected to gain, all requests together."""
        gained, reach = [float(len(caps))], 1.0
        for j, rate in enumerate(self._acceptance.rates()):
            reach *= rate
            gained.append(gained[-1] + reach * sum(cap > j for cap in caps))
        return gained


def _line(values: Mapping[int, float], at: int) -> float:
    """Through the two neighbours of ``at``, or through the last two where it lies beyond; never below the last."""
    keys = sorted(values)
    if len(keys) == 1:
        return values[keys[0]]
    right = min(bisect.bisect_left(keys, at, lo=1), len(keys) - 1)
    low, high = keys[right - 1], keys[right]
    part = (at - low) / (high - low)
    found = (1.0 - part) * values[low] + part * values[high]
    return max(found, values[high]) if part > 1.0 else found


def _best_of(run: Callable[[int, int], None], num_rows: int, num_drafts: int, clock: Callable[[], float]) -> float:
    run(num_rows, num_drafts)
    times = []
    for _ in range(_MEASURED_ROUNDS):
        start = clock()
        run(num_rows, num_drafts)
        times.append(clock() - start)
    return min(times)
