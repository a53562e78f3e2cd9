from __future__ import annotations

import numpy as np
import pytest

from sglang.srt.mem_cache.kv_manager import KVCacheManager, RequestKV
from sglang.srt.mem_cache.req_to_token import ReqToTokenPool

from .kv_cases import make_pool


def make_manager(
    size_tokens: int = 32,
    page_size: int = 1,
    max_requests: int = 4,
    max_len: int = 64,
    disable_radix_cache: bool = False,
) -> KVCacheManager:
    pool = make_pool(size_tokens, page_size)
    table = ReqToTokenPool(max_requests, max_len, "cpu")
    return KVCacheManager(pool, table, disable_radix_cache=disable_radix_cache)


def run(manager: KVCacheManager, token_ids: list[int], num_tokens: int | None = None) -> RequestKV:
    """Open a request and commit its first ``num_tokens`` (default: all)."""
    num_tokens = len(token_ids) if num_tokens is None else num_tokens
    kv = manager.open(token_ids)
    assert kv is not None and manager.grow(kv, num_tokens)
    manager.commit(kv, num_tokens)
    return kv


def test_a_request_from_open_to_close() -> None:
    manager = make_manager(page_size=4)
    kv = manager.open(range(10))
    assert kv is not None
    assert (kv.cached_len, kv.committed_len, kv.allocated_len) == (0, 0, 0)
    assert manager.grow(kv, 10)
    assert (kv.allocated_len, manager.available_tokens) == (12, 20)
    assert manager.locs(kv, 0, 12).tolist() == list(range(4, 16))
    assert manager.locs(kv, 9, 11).dtype == np.int64
    manager.commit(kv, 10)
    manager.close(kv, range(10))
    stats = manager.stats()
    assert (stats.free, stats.evictable, stats.protected, stats.owned, stats.open_requests) == (24, 8, 0, 0, 0)
    assert manager.available_tokens == manager.total_tokens == 32
    manager.check_integrity()


def test_the_next_request_finds_the_prefix_but_computes_its_last_token() -> None:
    manager = make_manager()
    first = run(manager, [1, 2, 3, 4])
    slots = manager.locs(first, 0, 4).tolist()
    manager.close(first, [1, 2, 3, 4])
    assert manager.match_len([1, 2, 3, 4]) == 3
    kv = manager.open([1, 2, 3, 4])
    assert kv is not None and (kv.cached_len, kv.committed_len) == (3, 3)
    assert manager.locs(kv, 0, 3).tolist() == slots[:3]
    assert manager.match_len([1, 2, 3, 4, 5]) == 4
    manager.check_integrity()


def test_a_partly_filled_page_is_never_shared() -> None:
    manager = make_manager(page_size=4)
    manager.close(run(manager, list(range(7))), range(7))
    kv = manager.open(range(9))
    assert kv is not None and kv.cached_len == 4
    assert manager.open(range(4)).cached_len == 0
    manager.check_integrity()


def test_grow_that_cannot_succeed_changes_nothing() -> None:
    manager = make_manager(size_tokens=16, page_size=4)
    manager.close(run(manager, list(range(8))), range(8))
    held = run(manager, [50, 51, 52])
    kv = manager.open(list(range(8)) + [9])
    assert kv is not None and kv.cached_len == 8
    before = manager.stats()
    assert manager.available_tokens == 4
    assert not manager.grow(kv, 13)
    assert (manager.stats(), kv.allocated_len) == (before, 8)
    assert manager.grow(kv, 12)
    manager.close(held, [50, 51, 52])
    assert manager.grow(kv, 16)
    manager.check_integrity()


def test_grow_evicts_only_what_it_needs() -> None:
    manager = make_manager(size_tokens=8)
    manager.close(run(manager, [1, 2, 3, 4]), [1, 2, 3, 4])
    kv = run(manager, [5, 6, 7, 8, 9, 10])
    assert kv.allocated_len == 6
    assert manager.match_len([1, 2, 3, 4, 0]) == 2
    manager.check_integrity()


def test_no_row_left_is_none_and_changes_nothing() -> None:
    manager = make_manager(max_requests=1)
    manager.open([1, 2])
    before = manager.stats()
    assert manager.open([1, 2]) is None
    assert manager.stats() == before


def test_a_running_request_shares_what_it_has_committed() -> None:
    manager = make_manager(page_size=4)
    first = run(manager, list(range(10)))
    manager.cache_unfinished(first, range(10))
    second = manager.open(range(20))
    assert second is not None and second.cached_len == 8
    assert manager.locs(second, 0, 8).tolist() == manager.locs(first, 0, 8).tolist()
    assert manager.stats().protected == 8
    manager.close(first, range(10))
    assert manager.stats().protected == 8
    manager.check_integrity()


def test_a_duplicate_moves_over_to_the_slots_that_came_first() -> None:
    manager = make_manager()
    first, second = run(manager, [1, 2, 3, 4]), run(manager, [1, 2, 3, 9])
    manager.cache_unfinished(first, [1, 2, 3, 4])
    tail = manager.locs(second, 3, 4).tolist()
    manager.cache_unfinished(second, [1, 2, 3, 9])
    assert manager.locs(second, 0, 4).tolist() == manager.locs(first, 0, 3).tolist() + tail
    assert manager.stats().free == 32 - 5
    manager.check_integrity()
    for kv, token_ids in ((second, [1, 2, 3, 9]), (first, [1, 2, 3, 4])):
        manager.close(kv, token_ids)
        manager.check_integrity()
    assert manager.stats().evictable == 5


def test_close_frees_the_reserve_and_what_has_no_ids() -> None:
    manager = make_manager()
    kv = manager.open([1, 2, 3])
    assert kv is not None and manager.grow(kv, 12)
    manager.commit(kv, 6)
    manager.close(kv, [1, 2, 3, 4])  # stopped inside an accepted run: two committed tokens were not emitted
    assert (manager.stats().evictable, manager.stats().free) == (4, 28)
    manager.check_integrity()


def test_an_abort_before_anything_was_computed() -> None:
    manager = make_manager()
    kv = manager.open([1, 2, 3])
    assert kv is not None and manager.grow(kv, 3)
    manager.close(kv, [1, 2, 3])
    assert (manager.stats().free, manager.stats().evictable) == (32, 0)
    manager.check_integrity()


def test_flush_waits_for_open_requests_and_restores_a_fresh_order() -> None:
    manager = make_manager()
    manager.close(run(manager, [1, 2, 3]), [1, 2, 3])
    kv = run(manager, [1, 2, 9])
    assert not manager.flush()
    assert manager.match_len([1, 2, 3, 4]) == 3
    manager.close(kv, [1, 2, 9])
    assert manager.flush()
    assert (manager.stats().free, manager.match_len([1, 2, 3, 4])) == (32, 0)
    assert manager.locs(run(manager, [5, 6]), 0, 2).tolist() == [1, 2]
    manager.check_integrity()


def test_without_a_prefix_cache_nothing_stays() -> None:
    manager = make_manager(page_size=4, disable_radix_cache=True)
    kv = run(manager, list(range(10)))
    slots = manager.locs(kv, 0, 12).tolist()
    manager.cache_unfinished(kv, range(10))
    assert manager.locs(kv, 0, 12).tolist() == slots
    assert manager.open(range(10)).cached_len == 0
    manager.close(kv, range(10))
    assert manager.stats().free == manager.total_tokens
    manager.check_integrity()


def test_a_closed_request_cannot_be_used() -> None:
    manager = make_manager()
    kv = run(manager, [1, 2])
    manager.close(kv, [1, 2])
    for use in (manager.close, manager.cache_unfinished):
        with pytest.raises(AssertionError, match="request is not open"):
            use(kv, [1, 2])
    with pytest.raises(AssertionError, match="request is not open"):
        manager.grow(kv, 9)
    manager.check_integrity()


@pytest.mark.parametrize("committed_len", [1, 9])
def test_commit_neither_shrinks_nor_passes_what_is_allocated(committed_len: int) -> None:
    manager = make_manager()
    kv = run(manager, [1, 2, 3])
    assert manager.grow(kv, 8)
    with pytest.raises(AssertionError, match="commit of"):
        manager.commit(kv, committed_len)


def leak_pages(manager: KVCacheManager) -> None:
    manager._allocator.alloc(2)


def lose_request(manager: KVCacheManager) -> None:
    manager._open.clear()


def own_a_page_twice(manager: KVCacheManager) -> None:
    manager._req_to_token.write(0, 4, manager._req_to_token.host[0, 5:6])


def forget_a_lock(manager: KVCacheManager) -> None:
    manager._prefix_cache.lock(next(iter(manager._open.values())).prefix)


def take_a_row(manager: KVCacheManager) -> None:
    manager._req_to_token.alloc()


@pytest.mark.parametrize("damage", [leak_pages, lose_request, own_a_page_twice, forget_a_lock, take_a_row])
def test_the_integrity_check_finds_damage(damage) -> None:
    manager = make_manager()
    kv = run(manager, [1, 2, 3, 4])
    manager.cache_unfinished(kv, [1, 2, 3, 4])
    assert manager.grow(kv, 6)
    manager.check_integrity()
    damage(manager)
    with pytest.raises(RuntimeError, match=r"\d"):
        manager.check_integrity()
