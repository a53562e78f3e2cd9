"""Random lives of requests that share prefixes, with every slot's content checked after every step."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.mem_cache.kv_manager import KVCacheManager, RequestKV
from sglang.srt.mem_cache.req_to_token import ReqToTokenPool

from .kv_cases import make_pool

MAX_PAGES = 12
REJECTED_DRAFT = (-1,)
TokenIds = tuple[int, ...]


class RandomLife:
    """The manager and a model of it.

    ``written`` plays the KV buffers: it remembers, for every slot, the whole prefix that the KV there was computed
    from. So a slot that is lost, shared wrongly or overwritten shows up as a wrong prefix.
    """

    def __init__(self, page_size: int, num_pages: int, rows: int, disable_radix_cache: bool) -> None:
        self.page_size, self.rows, self.disable_radix_cache = page_size, rows, disable_radix_cache
        table = ReqToTokenPool(rows, MAX_PAGES * page_size, "cpu")
        pool = make_pool(num_pages * page_size, page_size)
        self.manager = KVCacheManager(pool, table, disable_radix_cache=disable_radix_cache)
        self.written: dict[int, TokenIds] = {}
        self.requests: list[tuple[RequestKV, TokenIds]] = []
        self.published: set[TokenIds] = set()
        self.evicted = False

    def open(self, which: int, amount: int) -> None:
        """Prompts are binary patterns of pages, so most of them share a beginning; the last page may be partial."""
        pattern = [(which >> bit) & 1 for bit in range(1 + which % 6)]
        token_ids = tuple(t for t in pattern for _ in range(self.page_size))
        token_ids = token_ids[: max(1, len(token_ids) - amount % self.page_size)]
        matched, expected = self.manager.match_len(token_ids), self.cacheable_len(token_ids)
        assert matched <= expected if self.evicted else matched == expected
        kv = self.manager.open(token_ids)
        assert (kv is None) == (len(self.requests) == self.rows)
        if kv is not None:
            assert kv.cached_len == kv.committed_len == kv.allocated_len == matched
            self.requests.append((kv, token_ids))

    def advance(self, which: int, amount: int) -> None:
        """Grow, write the whole reserve, commit part of it and leave rejected drafts in the rest."""
        if not self.requests:
            return
        which %= len(self.requests)
        kv, token_ids = self.requests[which]
        target = min(kv.committed_len + amount, MAX_PAGES * self.page_size)
        if not self.grow(kv, target):
            return
        end = max(kv.committed_len, target - amount % 3)
        token_ids += tuple(i % 2 for i in range(len(token_ids), end))
        slots = self.manager.locs(kv, kv.committed_len, kv.allocated_len).tolist()
        for position, slot in enumerate(slots, start=kv.committed_len):
            self.written[slot] = token_ids[: position + 1] if position < end else REJECTED_DRAFT
        self.manager.commit(kv, end)
        self.requests[which] = kv, token_ids

    def grow(self, kv: RequestKV, target: int) -> bool:
        """True exactly if free and evictable tokens suffice; nothing changes otherwise."""
        before, allocated, available = self.manager.stats(), kv.allocated_len, self.manager.available_tokens
        needed = max(0, -(-(target - allocated) // self.page_size) * self.page_size)
        grown = self.manager.grow(kv, target)
        assert grown == (needed <= available)
        if not grown:
            assert (self.manager.stats(), kv.allocated_len) == (before, allocated)
            return False
        assert kv.allocated_len == allocated + needed >= target
        assert self.manager.stats().free == max(0, before.free - needed)
        self.evicted |= needed > before.free
        return True

    def cache_unfinished(self, which: int, amount: int) -> None:
        if self.requests:
            kv, token_ids = self.requests[which % len(self.requests)]
            self.publish(kv, token_ids)
            self.manager.cache_unfinished(kv, token_ids[: kv.committed_len])

    def close(self, which: int, amount: int) -> None:
        """Some committed tokens may never have been emitted, so the caller has no ids for them."""
        if self.requests:
            kv, token_ids = self.requests.pop(which % len(self.requests))
            token_ids = token_ids[: max(kv.shared_len, len(token_ids) - amount % 4)]
            self.publish(kv, token_ids)
            self.manager.close(kv, token_ids)

    def flush(self, which: int, amount: int) -> None:
        assert self.manager.flush() == (not self.requests)
        if not self.requests:
            assert self.manager.stats().free == self.manager.total_tokens
            self.published, self.evicted = set(), False

    def publish(self, kv: RequestKV, token_ids: TokenIds) -> None:
        if not self.disable_radix_cache:
            end = min(len(token_ids), kv.committed_len) // self.page_size * self.page_size
            self.published.update(token_ids[:n] for n in range(0, end + 1, self.page_size))

    def cacheable_len(self, token_ids: TokenIds) -> int:
        """What a match gives if nothing was ever evicted."""
        ends = range(0, len(token_ids), self.page_size)
        return max((end for end in ends if token_ids[:end] in self.published), default=0)

    def check(self) -> None:
        self.manager.check_integrity()
        stats = self.manager.stats()
        assert stats.open_requests == len(self.requests)
        assert stats.free + stats.evictable + stats.protected + stats.owned == stats.total == self.manager.total_tokens
        for kv, token_ids in self.requests:
            for position, slot in enumerate(self.manager.locs(kv, 0, kv.committed_len).tolist()):
                assert slot >= self.page_size, "the dummy page is never given out"
                assert self.written[slot] == token_ids[: position + 1]

    def finish(self) -> None:
        while self.requests:
            self.close(0, 0)
        self.check()
        assert self.manager.available_tokens == self.manager.total_tokens


STEP = st.tuples(
    st.sampled_from([RandomLife.open] * 3 + [RandomLife.advance] * 4)
    | st.sampled_from([RandomLife.cache_unfinished] * 3 + [RandomLife.close] * 3 + [RandomLife.flush]),
    st.integers(0, 63),
    st.integers(0, 40),
)


@pytest.mark.parametrize(
    ("page_size", "disable_radix_cache"), [(1, False), (4, False), (16, False), (4, True)], ids=lambda value: str(value)
)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(num_pages=st.integers(4, 24), rows=st.integers(1, 4), steps=st.lists(STEP, min_size=40, max_size=60))
def test_no_slot_is_lost_or_shared_wrongly(
    page_size: int, disable_radix_cache: bool, num_pages: int, rows: int, steps: list
) -> None:
    life = RandomLife(page_size, num_pages, rows, disable_radix_cache)
    for step, which, amount in steps:
        step(life, which, amount)
        life.check()
    life.finish()
