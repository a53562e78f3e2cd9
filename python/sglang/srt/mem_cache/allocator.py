"""Free pages of the KV pool."""

from __future__ import annotations

import numpy as np


class PageAllocator:
    """Hands out pages ``1 .. num_pages``; page 0 is the pool's dummy page and is never handed out.

    The order is deterministic: a fresh allocator gives ascending pages, and pages freed last are given out first.
    """

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 1, f"{num_pages=}"
        self.num_pages = num_pages
        self.reset()

    def reset(self) -> None:
        """All pages free, in the order of a fresh allocator."""
        # _stack[:_available] are the free pages, the next one to give out last.
        self._stack = np.arange(self.num_pages, 0, -1, dtype=np.int64)
        self._available = self.num_pages
        self._is_free = np.ones(self.num_pages + 1, dtype=bool)
        self._is_free[0] = False

    @property
    def available(self) -> int:
        """Free pages."""
        return self._available

    def free_pages(self) -> np.ndarray:
        """The free pages, [available] int64, a copy."""
        return self._stack[: self._available].copy()

    def alloc(self, n_pages: int) -> np.ndarray | None:
        """``n_pages`` pages, [n_pages] int64, or None (and nothing changed) when fewer are free."""
        assert n_pages >= 0, f"{n_pages=}"
        if n_pages > self._available:
            return None
        rest = self._available - n_pages
        pages = self._stack[rest : self._available][::-1].copy()
        self._available = rest
        self._is_free[pages] = False
        return pages

    def free(self, pages: np.ndarray) -> None:
        """Give pages back. A page that is free already, or given twice, is a double free and asserts."""
        n_pages = len(pages)
        if n_pages == 0:
            return
        assert pages.min() >= 1 and pages.max() <= self.num_pages, f"pages outside 1..{self.num_pages}: {pages}"
        twice = self._is_free[pages]
        assert not twice.any(), f"double free of pages {pages[twice]}"
        assert n_pages == 1 or len(np.unique(pages)) == n_pages, f"a page is freed twice in one call: {pages}"
        self._is_free[pages] = True
        self._stack[self._available : self._available + n_pages] = pages[::-1]
        self._available += n_pages
