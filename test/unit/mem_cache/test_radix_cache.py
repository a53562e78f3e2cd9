from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.mem_cache.prefix_cache import NullPrefixCache, PrefixCache
from sglang.srt.mem_cache.radix_cache import RadixCache


def ids(*token_ids: int) -> np.ndarray:
    return np.array(token_ids, dtype=np.int32)


def pages(*page_ids: int) -> np.ndarray:
    return np.array(page_ids, dtype=np.int64)


def test_match_ends_where_the_tokens_differ() -> None:
    cache = RadixCache(1)
    assert cache.insert(ids(1, 2, 3, 4), pages(11, 12, 13, 14)).num_present == 0
    match = cache.match_prefix(ids(1, 2, 9, 4))
    assert (match.num_tokens, match.pages.tolist()) == (2, [11, 12])
    assert cache.match_prefix(ids(9)).num_tokens == 0
    assert cache.match_prefix(ids()).num_tokens == 0
    assert cache.match_prefix(ids(1, 2, 3, 4, 5)).pages.tolist() == [11, 12, 13, 14]


def test_insert_keeps_what_it_has_and_takes_the_rest() -> None:
    cache = RadixCache(1)
    cache.insert(ids(1, 2, 3), pages(11, 12, 13))
    result = cache.insert(ids(1, 2, 7, 8), pages(21, 22, 23, 24))
    assert (result.num_present, result.match.num_tokens) == (2, 4)
    assert result.match.pages.tolist() == [11, 12, 23, 24]
    assert sorted(cache.cached_pages().tolist()) == [11, 12, 13, 23, 24]
    assert cache.insert(ids(1, 2), pages(31, 32)).num_present == 2
    assert cache.total_tokens == 5
    cache.check_integrity([])


def test_only_whole_pages_are_kept_and_matched() -> None:
    cache = RadixCache(4)
    cache.insert(ids(1, 2, 3, 4, 5, 6, 7, 8), pages(1, 2))
    cache.insert(ids(1, 2, 3, 4, 5, 6, 7, 9, 10), pages(3, 4))
    assert sorted(cache.cached_pages().tolist()) == [1, 2, 4]
    assert cache.match_len(ids(1, 2, 3, 4, 5, 6, 7)) == 4
    assert cache.match_prefix(ids(1, 2, 3, 4, 5, 6, 7, 9)).pages.tolist() == [1, 4]
    assert cache.match_len(ids(1, 2, 3)) == 0


def test_match_len_does_not_count_as_use() -> None:
    cache = RadixCache(1)
    cache.insert(ids(1), pages(1))
    cache.insert(ids(2), pages(2))
    assert cache.match_len(ids(1)) == 1
    assert cache.evict(1).tolist() == [1]


def test_the_least_recently_used_leaf_goes_first_from_its_end() -> None:
    cache = RadixCache(1)
    cache.insert(ids(1, 2, 3), pages(1, 2, 3))
    cache.insert(ids(1, 5, 6), pages(0, 5, 6))
    cache.insert(ids(7, 8), pages(7, 8))
    cache.match_prefix(ids(1, 2, 3))
    assert cache.evict(1).tolist() == [6]
    assert cache.evict(2).tolist() == [5, 8]
    assert cache.evict(2).tolist() == [7, 3]
    assert cache.match_len(ids(1, 2, 3)) == 2
    assert cache.evict(100).tolist() == [2, 1]
    assert (cache.total_tokens, cache.evict(1).tolist()) == (0, [])


def test_eviction_is_rounded_up_to_pages() -> None:
    cache = RadixCache(4)
    cache.insert(ids(*range(12)), pages(1, 2, 3))
    assert cache.evict(5).tolist() == [2, 3]
    assert cache.evictable_tokens == 4


def test_a_lock_protects_the_whole_prefix_also_after_a_split() -> None:
    cache = RadixCache(1)
    handle = cache.insert(ids(1, 2, 3, 4), pages(1, 2, 3, 4)).match.handle
    cache.lock(handle)
    upper = cache.match_prefix(ids(1, 2)).handle
    cache.lock(upper)
    assert (cache.protected_tokens, cache.evictable_tokens) == (4, 0)
    assert cache.evict(4).tolist() == []
    cache.check_integrity([handle, upper])
    cache.unlock(handle)
    assert (cache.protected_tokens, cache.evictable_tokens) == (2, 2)
    assert cache.evict(4).tolist() == [3, 4]
    cache.unlock(upper)
    assert cache.evict(4).tolist() == [1, 2]
    with pytest.raises(AssertionError, match="unlocked more often than locked"):
        cache.unlock(upper)


def test_reset_needs_everything_unlocked_and_returns_all_pages() -> None:
    cache = RadixCache(1)
    handle = cache.insert(ids(1, 2), pages(5, 6)).match.handle
    cache.lock(handle)
    with pytest.raises(AssertionError, match="2 cached tokens are locked"):
        cache.reset()
    cache.unlock(handle)
    assert cache.reset().tolist() == [5, 6]
    assert (cache.total_tokens, cache.match_len(ids(1, 2))) == (0, 0)


def test_the_integrity_check_notices_a_forgotten_lock() -> None:
    cache = RadixCache(1)
    handle = cache.insert(ids(1, 2), pages(5, 6)).match.handle
    cache.lock(handle)
    cache.check_integrity([handle])
    with pytest.raises(RuntimeError, match="has 1 locks, requests hold 0"):
        cache.check_integrity([])


def test_it_does_not_keep_the_callers_arrays() -> None:
    cache = RadixCache(1)
    token_ids, page_ids = ids(1, 2, 3), pages(1, 2, 3)
    cache.insert(token_ids, page_ids)
    token_ids[:] = 0
    page_ids[:] = 0
    assert cache.match_prefix(ids(1, 2, 3)).pages.tolist() == [1, 2, 3]


def test_long_prompts_take_few_nodes_and_no_work_per_token() -> None:
    """A 100,000-token prompt and its 1,000 continuations: time is not measured, the number of nodes is."""
    cache = RadixCache(1)
    prompt = np.arange(100_000, dtype=np.int32)
    for tail in range(1000):
        tokens = np.append(prompt, np.int32(200_000 + tail))
        present = cache.insert(tokens, np.arange(len(tokens), dtype=np.int64)).num_present
        assert present == (100_000 if tail else 0)
    assert cache.total_tokens == 101_000
    assert len(list(cache._nodes())) == 1001


def test_the_null_cache_keeps_nothing() -> None:
    cache: PrefixCache = NullPrefixCache()
    result = cache.insert(ids(1, 2), pages(1, 2))
    assert (result.num_present, result.match.num_tokens, cache.match_len(ids(1, 2))) == (0, 0, 0)
    cache.lock(result.match.handle)
    assert cache.total_tokens == cache.evictable_tokens == cache.protected_tokens == 0
    assert cache.evict(5).tolist() == cache.reset().tolist() == cache.cached_pages().tolist() == []
    cache.unlock(result.match.handle)
    cache.check_integrity([])


class ModelCache:
    """The same cache without a tree: every cached page under the tokens up to its end."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.page_of: dict[tuple[int, ...], int] = {}
        self.last_access: dict[tuple[int, ...], int] = {}
        self.locks: list[tuple[int, ...]] = []
        self.clock = 0

    def prefixes(self, token_ids: tuple[int, ...]) -> list[tuple[int, ...]]:
        ends = range(self.page_size, len(token_ids) + 1, self.page_size)
        return [token_ids[:end] for end in ends]

    def match(self, token_ids: tuple[int, ...]) -> list[int]:
        found = []
        for prefix in self.prefixes(token_ids):
            if prefix not in self.page_of:
                break
            found.append(self.page_of[prefix])
        return found

    def touch(self, token_ids: tuple[int, ...]) -> None:
        self.clock += 1
        for prefix in self.prefixes(token_ids):
            if prefix in self.page_of:
                self.last_access[prefix] = self.clock

    def is_locked(self, prefix: tuple[int, ...]) -> bool:
        return any(lock[: len(prefix)] == prefix for lock in self.locks)

    def evicted_by(self, evicted: set[int]) -> None:
        """Check that these pages may go: unlocked, ends first, none used later than an end that stays."""
        gone = {prefix for prefix, page in self.page_of.items() if page in evicted}
        assert len(gone) == len(evicted)
        stay = self.page_of.keys() - gone
        assert not any(self.is_locked(prefix) for prefix in gone)
        parents = {prefix[: -self.page_size] for prefix in self.page_of}
        assert not any(prefix[: -self.page_size] in gone for prefix in stay)
        ends = [self.last_access[p] for p in stay if p not in parents and not self.is_locked(p)]
        if gone and ends:
            assert max(self.last_access[prefix] for prefix in gone) <= min(ends)
        for prefix in gone:
            del self.page_of[prefix], self.last_access[prefix]


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["insert", "insert", "match", "lock", "unlock", "evict"]),
        st.lists(st.integers(0, 1), max_size=6),
        st.integers(0, 9),
    ),
    min_size=25,
    max_size=50,
)


@pytest.mark.parametrize("page_size", [1, 4])
@settings(max_examples=120, deadline=None, derandomize=True)
@given(operations=OPERATIONS)
def test_it_behaves_like_a_table_of_prefixes(page_size: int, operations: list[tuple[str, list[int], int]]) -> None:
    cache, twin, model = RadixCache(page_size), RadixCache(page_size), ModelCache(page_size)
    handles: list[tuple[object, object]] = []
    next_page = 1
    for name, pattern, n in operations:
        tokens = tuple(t for t in pattern for _ in range(page_size)) + (7,) * (n % page_size)
        array = ids(*tokens)
        assert cache.match_len(array) == len(model.match(tokens)) * page_size
        if name == "insert":
            fresh = np.arange(next_page, next_page + len(pattern), dtype=np.int64)
            next_page += len(pattern)
            present = model.match(tokens)
            result = cache.insert(array, fresh)
            twin.insert(array, fresh)
            assert result.num_present == len(present) * page_size
            for prefix, page in zip(model.prefixes(tokens), fresh.tolist(), strict=True):
                model.page_of.setdefault(prefix, page)
            model.touch(tokens)
            assert result.match.pages.tolist() == model.match(tokens)
        elif name in ("match", "lock"):
            match, same = cache.match_prefix(array), twin.match_prefix(array)
            assert match.pages.tolist() == model.match(tokens)
            model.touch(tokens)
            if name == "lock":
                cache.lock(match.handle)
                twin.lock(same.handle)
                handles.append((match.handle, same.handle))
                model.locks.append(tokens[: match.num_tokens])
        elif name == "unlock" and handles:
            handle, same = handles.pop(n % len(handles))
            model.locks.pop(n % len(model.locks))
            cache.unlock(handle)
            twin.unlock(same)
        elif name == "evict":
            evictable = cache.evictable_tokens
            evicted = cache.evict(n)
            assert evicted.tolist() == twin.evict(n).tolist()
            assert len(evicted) == min(-(-n // page_size), evictable // page_size)
            model.evicted_by(set(evicted.tolist()))
        cache.check_integrity([handle for handle, _ in handles])
        assert sorted(cache.cached_pages().tolist()) == sorted(model.page_of.values())
        protected = sum(model.is_locked(prefix) for prefix in model.page_of)
        assert (cache.protected_tokens, cache.total_tokens) == (
            protected * page_size,
            len(model.page_of) * page_size,
        )
