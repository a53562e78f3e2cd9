from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.mem_cache.allocator import PageAllocator


def test_a_fresh_allocator_gives_ascending_pages_without_the_dummy() -> None:
    allocator = PageAllocator(5)
    assert allocator.alloc(2).tolist() == [1, 2]
    assert allocator.alloc(3).tolist() == [3, 4, 5]
    assert allocator.available == 0


def test_too_many_pages_change_nothing() -> None:
    allocator = PageAllocator(3)
    assert allocator.alloc(4) is None
    assert allocator.available == 3
    assert allocator.alloc(0).tolist() == []


def test_pages_freed_last_come_first_and_in_order() -> None:
    allocator = PageAllocator(6)
    first, second = allocator.alloc(2), allocator.alloc(2)
    allocator.free(first)
    allocator.free(second)
    assert allocator.alloc(6).tolist() == [3, 4, 1, 2, 5, 6]


@pytest.mark.parametrize("pages", [[1], [4], [2, 2], [2, 1]])
def test_a_double_free_asserts(pages: list[int]) -> None:
    allocator = PageAllocator(4)
    taken = allocator.alloc(3)
    allocator.free(taken[:1])
    with pytest.raises(AssertionError, match="double free|freed twice"):
        allocator.free(np.array(pages))
    assert allocator.available == 2


@pytest.mark.parametrize("page", [0, -1, 5])
def test_foreign_pages_are_refused(page: int) -> None:
    allocator = PageAllocator(4)
    allocator.alloc(4)
    with pytest.raises(AssertionError, match=r"outside 1\.\.4"):
        allocator.free(np.array([page]))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 7)), max_size=60))
def test_every_page_is_in_one_place(steps: list[tuple[bool, int]]) -> None:
    allocator, twin = PageAllocator(20), PageAllocator(20)
    held: list[np.ndarray] = []
    for is_alloc, n in steps:
        if is_alloc:
            pages, same = allocator.alloc(n), twin.alloc(n)
            assert (pages is None) == (n > 20 - sum(map(len, held)))
            if pages is not None:
                assert pages.tolist() == same.tolist()
                held.append(pages)
        elif held:
            pages = held.pop(n % len(held))
            allocator.free(pages)
            twin.free(pages)
        everything = np.concatenate([allocator.free_pages(), *held])
        assert sorted(everything.tolist()) == list(range(1, 21))
        assert allocator.available == len(allocator.free_pages())
    allocator.reset()
    assert allocator.alloc(20).tolist() == list(range(1, 21))
