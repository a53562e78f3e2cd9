"""What the KV manager asks of a prefix cache, and the cache that keeps nothing.

A prefix cache owns whole pages: a page enters with ``insert`` and leaves with ``evict`` or ``reset``, which return
it to the caller. It never sees the allocator.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np


class PrefixHandle:
    """Names a cached prefix; opaque outside the cache that made it."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, eq=False)
class PrefixMatch:
    """A cached prefix: its length, its pages [num_tokens / page_size] int64, and the handle to lock it with."""

    num_tokens: int
    pages: np.ndarray
    handle: PrefixHandle


@dataclass(frozen=True, slots=True, eq=False)
class InsertResult:
    """``num_present`` leading tokens were cached before, so the caller still owns its own pages for them.

    ``match`` is the whole cached prefix afterwards; the cache took the caller's pages from ``num_present`` up to
    ``match.num_tokens``.
    """

    num_present: int
    match: PrefixMatch


class PrefixCache(Protocol):
    """Token ids are [n] int32. Lengths that are not whole pages are cut down to whole pages."""

    @property
    def evictable_tokens(self) -> int: ...

    @property
    def protected_tokens(self) -> int: ...

    @property
    def total_tokens(self) -> int: ...

    def match_len(self, token_ids: np.ndarray) -> int:
        """Length of the longest cached prefix, without touching the cache."""
        ...

    def match_prefix(self, token_ids: np.ndarray) -> PrefixMatch:
        """The longest cached prefix, marked as just used. Lock it before anything else happens to the cache."""
        ...

    def insert(self, token_ids: np.ndarray, pages: np.ndarray) -> InsertResult:
        """Give the cache the pages of a prefix. ``pages``: [len(token_ids) // page_size] int64."""
        ...

    def lock(self, handle: PrefixHandle) -> None:
        """Keep the prefix from eviction until ``unlock``; locks are counted."""
        ...

    def unlock(self, handle: PrefixHandle) -> None: ...

    def evict(self, num_tokens: int) -> np.ndarray:
        """Drop at least ``num_tokens`` unlocked tokens if there are as many; returns their pages, int64."""
        ...

    def reset(self) -> np.ndarray:
        """Drop everything and return all pages, int64. Nothing may be locked."""
        ...

    def cached_pages(self) -> np.ndarray:
        """All pages the cache owns, int64, in no special order."""
        ...

    def check_integrity(self, locked: Iterable[PrefixHandle]) -> None:
        """RuntimeError unless counters and locks agree with ``locked``, the handles locked now (with repeats)."""
        ...


_NO_PAGES = np.empty(0, dtype=np.int64)
_NO_PAGES.flags.writeable = False
_EMPTY = PrefixMatch(0, _NO_PAGES, PrefixHandle())


class NullPrefixCache:
    """Caches nothing, for ``--disable-radix-cache``."""

    evictable_tokens = 0
    protected_tokens = 0
    total_tokens = 0

    def match_len(self, token_ids: np.ndarray) -> int:
        return 0

    def match_prefix(self, token_ids: np.ndarray) -> PrefixMatch:
        return _EMPTY

    def insert(self, token_ids: np.ndarray, pages: np.ndarray) -> InsertResult:
        return InsertResult(0, _EMPTY)

    def lock(self, handle: PrefixHandle) -> None:
        return None

    def unlock(self, handle: PrefixHandle) -> None:
        return None

    def evict(self, num_tokens: int) -> np.ndarray:
        return _NO_PAGES

    def reset(self) -> np.ndarray:
        return _NO_PAGES

    def cached_pages(self) -> np.ndarray:
        return _NO_PAGES

    def check_integrity(self, locked: Iterable[PrefixHandle]) -> None:
        return None
