"""How many drafts a round makes: what a decode loop asks before it starts one, and tells after it has read one."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Protocol

from sglang.srt.distributed.parallel_state import TpGroup


class DraftLength(Protocol):
    """``rids``: the requests of a round; ``caps``: the most drafts that can be of use to each. Nothing here changes an
    answer."""

    def choose(self, rids: Sequence[str], caps: Sequence[int]) -> int:
        """Drafts of the next round of these requests."""
        ...

    def observe(self, num_drafts: int, rids: Sequence[str], accept_lens: Sequence[int], caps: Sequence[int]) -> None:
        """What a round of ``num_drafts`` gained, in tokens that requests kept."""
        ...

    def observe_time(self, num_rows: int, num_drafts: int, round_s: float, host_s: float | None) -> None:
        """How long a round took, and what the host did between the one before and it, where that comes on top."""
        ...


class FixedLength:
    """The most drafts always, but no more than one of the requests can use."""

    def __init__(self, lengths: Sequence[int]) -> None:
        """``lengths``: those that can be had, ascending."""
        self._lengths = tuple(lengths)

    def choose(self, rids: Sequence[str], caps: Sequence[int]) -> int:
        return least_length(self._lengths, max(caps))

    def observe(self, num_drafts: int, rids: Sequence[str], accept_lens: Sequence[int], caps: Sequence[int]) -> None:
        """Nothing is learned."""

    def observe_time(self, num_rows: int, num_drafts: int, round_s: float, host_s: float | None) -> None:
        """Nothing is learned."""


class SharedLength:
    """Rank 0's choice on every rank: what it has measured, the others have not."""

    def __init__(self, length: DraftLength, group: TpGroup) -> None:
        self._length = length
        self._group = group

    def choose(self, rids: Sequence[str], caps: Sequence[int]) -> int:
        return int(self._group.share_number(lambda: self._length.choose(rids, caps)))

    def observe(self, num_drafts: int, rids: Sequence[str], accept_lens: Sequence[int], caps: Sequence[int]) -> None:
        self._length.observe(num_drafts, rids, accept_lens, caps)

    def observe_time(self, num_rows: int, num_drafts: int, round_s: float, host_s: float | None) -> None:
        self._length.observe_time(num_rows, num_drafts, round_s, host_s)


def least_length(lengths: Sequence[int], wanted: int) -> int:
    """The least of ``lengths`` (ascending) that is at least ``wanted``, or the last."""
    return lengths[min(bisect.bisect_left(lengths, wanted), len(lengths) - 1)]
