"""Draft length by expected tokens per second: what a round costs, measured, against what its drafts are worth.

The drafts of a round are accepted from the left, so a round of n drafts gains 1 + a_1 + a_1 a_2 + .. + a_1 .. a_n
tokens of a request on average, where a_j is the share of drafts at position j that are accepted among those reached.
What all requests accept is remembered for long, and what one request accepts better or worse than that, for a few
rounds. So a request that is new, or has not drafted lately, is taken to be like the others, and no length is written
off for ever. Of lengths that promise about the same the last one stays, since rounds that are alike find their memory
in caches; and now and then two rounds take a neighbour of it, which shows what that costs.

All of this is done between two rounds, of which small ones take a millisecond: it is plain arithmetic on few numbers,
and what changes slowly is not computed every time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from sglang.srt.model_executor.draft_length import least_length
from sglang.srt.speculative.round_times import RoundTimes

_START = 0.05  # share of drafts that are rejected before there are any: a hopeful start
_LIKE_BEFORE = 4.0  # drafts that a position must have had to say as much as the one before it
_HORIZON_DRAFTS = 2000.0  # first drafts of rounds, all requests together
_ROW_KEEP = math.exp(-1.0 / 10.0)  # of what a request rejected, from round to round
_FIRST_ROUNDS = 2  # of a request, with drafts
_ROW_DRAFTS = 4.0  # that a request must have had to count as much as all others
_LEAST_MISSED = 0.01  # share of drafts, so that the first rejection ever does not count for everything
_FOLDED = 1.0 / 16.0  # of what is known: that many new drafts change it
_CLOSE = 0.985  # of the best promise is as good, since what drafts promise is an estimate
_DECIDE_EVERY = 4  # rounds of one request, 2 of two, each round of some: the shorter it is, the less it shows
_MANY = 8  # requests: of more, a few that come or go change little, and deciding takes longer
_PROBE_EVERY, _PROBE_ROUNDS = 128, 2  # the second of them is timed, see RoundTimes
_EVERY_LENGTH_TO = 8


def draft_lengths(num_steps: int, *, coarse: bool) -> tuple[int, ...]:
    """Lengths to choose from, none and ``num_steps`` among them. ``coarse``: few, since each costs memory or time."""
    if coarse:
        return tuple(sorted({0, num_steps // 2, num_steps}))
    longer = range(_EVERY_LENGTH_TO, num_steps, 4)
    return tuple(sorted({*range(min(num_steps, _EVERY_LENGTH_TO) + 1), *longer, num_steps}))


class _Shares:
    """By position, how often drafts were reached and accepted; what is new is added now and then."""

    def __init__(self, num_positions: int) -> None:
        self._reached, self._accepted = [0.0] * num_positions, [0.0] * num_positions
        # how often so many drafts were reached and accepted, in rounds that are not among these yet
        self._reached_by, self._accepted_by = [0] * (num_positions + 1), [0] * (num_positions + 1)
        self._num_new = 0
        self._fold()

    def add(self, reached: int, accepted: int) -> None:
        self._reached_by[reached] += 1
        self._accepted_by[accepted] += 1
        self._num_new += reached > 0
        if self._num_new > _FOLDED * self._reached[0]:
            self._fold()

    def _fold(self) -> None:
        fade = math.exp(-self._num_new / _HORIZON_DRAFTS)
        self._reached = _faded(self._reached, fade, self._reached_by)
        self._accepted = _faded(self._accepted, fade, self._accepted_by)
        self._reached_by, self._accepted_by = [0] * len(self._reached_by), [0] * len(self._accepted_by)
        self._num_new = 0
        self.missed, share = list[float](), _START  # by position, the share rejected of those reached
        for reached, accepted in zip(self._reached, self._accepted, strict=True):
            share = (reached - accepted + _LIKE_BEFORE * share) / (reached + _LIKE_BEFORE)
            self.missed.append(share)
        self.expected = list(accumulate(self.missed, initial=0.0))  # rejections, by drafts reached


@dataclass(frozen=True, slots=True)
class _Row:
    """A running request: rejections, and how many there would have been if it were like others of its age."""

    rejections: float = 0.0
    fair: float = 0.0
    rounds: int = 0


class Acceptance:
    """What all requests accept by position, and how many times as often one of them rejects.

    First rounds of requests are counted by themselves: of the others, most belong to requests with long answers.
    """

    def __init__(self, num_positions: int) -> None:
        self._num_positions = num_positions
        self._first, self._later = _Shares(num_positions), _Shares(num_positions)
        self._rows: dict[str, _Row] = {}
        self._rounds_without = 0  # drafts, since the last one with some

    def observe(self, num_drafts: int, rids: Sequence[str], accept_lens: Sequence[int], caps: Sequence[int]) -> None:
        """A round; what requests accepted is faded by it even if it had no drafts."""
        if num_drafts == 0:
            self._rounds_without += 1
            return
        keep, rows = _ROW_KEEP ** (1 + self._rounds_without), {}
        self._rounds_without = 0
        for rid, accept_len, cap in zip(rids, accept_lens, caps, strict=True):
            usable = min(num_drafts, cap)
            reached, accepted = min(accept_len, usable), max(0, min(accept_len - 1, usable))
            row = self._rows.get(rid, _NEW)
            shares = self._shares(row)
            fair = keep * row.fair + shares.expected[reached]
            rows[rid] = _Row(keep * row.rejections + (accepted < reached), fair, row.rounds + 1)
            shares.add(reached, accepted)
        self._rows = rows

    def gained(self, rids: Sequence[str], caps: Sequence[int]) -> list[float]:
        """Tokens that a round of these requests is expected to gain by its number of drafts, from none."""
        accepted = [0.0] * self._num_positions  # drafts at each position, of all requests
        keep = _ROW_KEEP**self._rounds_without
        for rid, cap in zip(rids, caps, strict=True):
            row = self._rows.get(rid, _NEW)
            shares, reach = self._shares(row), 1.0
            weight = _ROW_DRAFTS * max(_LEAST_MISSED, shares.expected[-1] / self._num_positions)
            times_rejected = (keep * row.rejections + weight) / (keep * row.fair + weight)
            for at, share in enumerate(shares.missed[:cap]):
                reach *= max(0.0, 1.0 - times_rejected * share)
                accepted[at] += reach
        return list(accumulate(accepted, initial=float(len(rids))))

    def _shares(self, row: _Row) -> _Shares:
        return self._first if row.rounds < _FIRST_ROUNDS else self._later


_NEW = _Row()


class AdaptiveLength:
    """Chooses the length whose expected tokens per second are about the most."""

    def __init__(self, lengths: Sequence[int]) -> None:
        """``lengths``: those that can be had, ascending, 0 among them."""
        self._lengths = tuple(lengths)
        self._acceptance = Acceptance(self._lengths[-1])
        self._num_rounds = 0
        self._best = 0
        self._decided_for: Sequence[str] = ()
        self._decide_at = 0
        self.times = RoundTimes(lengths)

    def choose(self, rids: Sequence[str], caps: Sequence[int]) -> int:
        self._num_rounds += 1
        if self._num_rounds >= self._decide_at or self._is_another(rids):
            self._decide(rids, caps)
        turn, rounds = divmod(self._num_rounds, _PROBE_EVERY)
        n = self._best
        if rounds >= _PROBE_EVERY - _PROBE_ROUNDS:
            at = self._lengths.index(n)
            neighbours = [*self._lengths[max(0, at - 1) : at], *self._lengths[at + 1 : at + 2]]
            n = neighbours[turn % len(neighbours)]
        return min(n, least_length(self._lengths, max(caps)))

    def _is_another(self, rids: Sequence[str]) -> bool:
        """Whether this is another batch than the one decided for."""
        if len(rids) <= _MANY:
            return rids != self._decided_for
        return _MANY * abs(len(rids) - len(self._decided_for)) > len(rids)

    def _decide(self, rids: Sequence[str], caps: Sequence[int]) -> None:
        gained, seconds = self._acceptance.gained(rids, caps), self.times.of(len(rids))
        promises = {n: gained[n] / s for n, s in zip(self._lengths, seconds, strict=True)}
        best = max(promises, key=promises.__getitem__)
        if promises[self._best] < _CLOSE * promises[best]:
            self._best = best
        rounds = _DECIDE_EVERY if len(rids) > _MANY else max(1, _DECIDE_EVERY // len(rids))
        self._decided_for, self._decide_at = rids, self._num_rounds + rounds

    def observe(self, num_drafts: int, rids: Sequence[str], accept_lens: Sequence[int], caps: Sequence[int]) -> None:
        self._acceptance.observe(num_drafts, rids, accept_lens, caps)

    def observe_time(self, num_rows: int, num_drafts: int, round_s: float, host_s: float | None) -> None:
        self.times.observe(num_rows, num_drafts, round_s, host_s)


def _faded(former: Sequence[float], fade: float, counts: Sequence[int]) -> list[float]:
    """``former`` faded, and how many more there are of at least 1, 2, .., by counts of exactly 0, 1, .."""
    at_least = list(accumulate(reversed(counts[1:])))
    return [fade * old + new for old, new in zip(former, reversed(at_least), strict=True)]
