"""A radix tree of cached prefixes, in whole pages.

Every node holds a run of tokens and the pages with their KV; the path from the root spells a prefix. Siblings differ
in their first page, which is the key they are found by. A lock on a node counts on its whole path, so an unlocked
node has only unlocked descendants and everything unlocked can be evicted from the leaves upwards.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from sglang.srt.mem_cache.prefix_cache import InsertResult, PrefixHandle, PrefixMatch


class RadixNode(PrefixHandle):
    """Edited only by the RadixCache that made it."""

    __slots__ = ("children", "last_access", "lock_count", "pages", "parent", "queued", "serial", "token_ids")

    def __init__(
        self, parent: RadixNode | None, token_ids: np.ndarray, pages: np.ndarray, serial: int, last_access: int
    ) -> None:
        self.parent = parent
        self.token_ids = token_ids
        self.pages = pages
        self.serial = serial
        self.last_access = last_access
        self.lock_count = 0
        self.children: dict[bytes, RadixNode] = {}
        self.queued = False  # has an entry in the eviction queue

    @property
    def is_evictable(self) -> bool:
        """An unlocked leaf, and not the root."""
        return self.lock_count == 0 and not self.children and self.parent is not None


class RadixCache:
    """Prefix cache with least-recently-used eviction.

    "Recently" is a counter, not a clock, and ties go to the older node, so equal histories evict equally.
    """

    def __init__(self, page_size: int) -> None:
        assert page_size >= 1, f"{page_size=}"
        self._page_size = page_size
        self._clock = 0
        self._serial = 0
        self._clear()

    @property
    def evictable_tokens(self) -> int:
        return self._evictable_tokens

    @property
    def protected_tokens(self) -> int:
        return self._protected_tokens

    @property
    def total_tokens(self) -> int:
        return self._evictable_tokens + self._protected_tokens

    def match_len(self, token_ids: np.ndarray) -> int:
        """Length of the longest cached prefix, without touching the cache."""
        length = 0
        for _, num_pages in self._walk(self._whole_pages(token_ids)):
            length += num_pages * self._page_size
        return length

    def match_prefix(self, token_ids: np.ndarray) -> PrefixMatch:
        """The longest cached prefix, marked as just used. Lock it before anything else happens to the cache."""
        return self._touch_path(self._whole_pages(token_ids))

    def insert(self, token_ids: np.ndarray, pages: np.ndarray) -> InsertResult:
        """Give the cache the pages of a prefix; it takes those beyond what it has already."""
        token_ids = self._whole_pages(token_ids)
        assert len(pages) * self._page_size == len(token_ids), f"{len(pages)} pages for {len(token_ids)} tokens"
        present = self._touch_path(token_ids)
        start = present.num_tokens
        if start == len(token_ids):
            return InsertResult(start, present)
        assert isinstance(present.handle, RadixNode)
        new_pages = pages[start // self._page_size :].copy()
        leaf = self._add_child(present.handle, token_ids[start:].copy(), new_pages, self._clock)
        self._evictable_tokens += len(leaf.token_ids)
        self._queue(leaf)
        return InsertResult(start, PrefixMatch(len(token_ids), np.concatenate((present.pages, new_pages)), leaf))

    def lock(self, handle: PrefixHandle) -> None:
        for node in self._path_up(handle):
            if node.lock_count == 0:
                self._evictable_tokens -= len(node.token_ids)
                self._protected_tokens += len(node.token_ids)
            node.lock_count += 1

    def unlock(self, handle: PrefixHandle) -> None:
        for node in self._path_up(handle):
            assert node.lock_count > 0, f"node {node.serial} is unlocked more often than locked"
            node.lock_count -= 1
            if node.lock_count == 0:
                self._protected_tokens -= len(node.token_ids)
                self._evictable_tokens += len(node.token_ids)
                self._queue(node)

    def evict(self, num_tokens: int) -> np.ndarray:
        """Drop ``num_tokens`` unlocked tokens, rounded up to pages, if there are as many; returns their pages.

        Leaves go least recently used first, each from its end: a prefix is of use as long as its beginning is there.
        """
        missing = -(-num_tokens // self._page_size)
        evicted: list[np.ndarray] = []
        while missing > 0 and (leaf := self._pop_least_recent_leaf()) is not None:
            kept = max(0, len(leaf.pages) - missing)
            evicted.append(leaf.pages[kept:])
            missing -= len(leaf.pages) - kept
            self._evictable_tokens -= (len(leaf.pages) - kept) * self._page_size
            if kept:
                leaf.pages = leaf.pages[:kept]
                leaf.token_ids = leaf.token_ids[: kept * self._page_size]
                self._queue(leaf)
            else:
                self._remove_leaf(leaf)
        return np.concatenate(evicted) if evicted else np.empty(0, dtype=np.int64)

    def reset(self) -> np.ndarray:
        """Drop everything and return all pages."""
        assert self._protected_tokens == 0, f"{self._protected_tokens} cached tokens are locked"
        pages = self.cached_pages()
        self._clear()
        return pages

    def cached_pages(self) -> np.ndarray:
        """All pages the cache owns, int64, in no special order."""
        pages = [node.pages for node in self._nodes()]
        return np.concatenate(pages) if pages else np.empty(0, dtype=np.int64)

    def check_integrity(self, locked: Iterable[PrefixHandle]) -> None:
        """RuntimeError unless tree, counters and locks agree with ``locked``, the handles locked now."""
        expected = Counter(node.serial for handle in locked for node in self._path_up(handle))
        tokens = {True: 0, False: 0}
        for node in self._nodes():
            tokens[node.lock_count > 0] += len(node.token_ids)
            held = expected[node.serial]
            if node.lock_count != held:
                raise RuntimeError(f"radix cache node {node.serial} has {node.lock_count} locks, requests hold {held}")
            if len(node.pages) == 0 or len(node.pages) * self._page_size != len(node.token_ids):
                raise RuntimeError(
                    f"radix cache node {node.serial} has {len(node.pages)} pages for {len(node.token_ids)} tokens"
                )
            if node.is_evictable and not node.queued:
                raise RuntimeError(f"radix cache node {node.serial} is an unlocked leaf that eviction cannot find")
        if (tokens[True], tokens[False]) != (self._protected_tokens, self._evictable_tokens):
            raise RuntimeError(
                f"radix cache counts {self._protected_tokens} protected and {self._evictable_tokens} evictable tokens, "
                f"but its nodes hold {tokens[True]} and {tokens[False]}"
            )

    def _clear(self) -> None:
        nothing = np.empty(0, dtype=np.int64)
        self._root = RadixNode(None, nothing, nothing, serial=0, last_access=0)
        self._evictable_tokens = 0
        self._protected_tokens = 0
        # Heap of (last_access, serial, node), at most one entry per node. An entry may be outdated: its time is then
        # too early, or its node is no unlocked leaf any more. Both are put right when it comes up.
        self._eviction_queue: list[tuple[int, int, RadixNode]] = []

    def _whole_pages(self, token_ids: np.ndarray) -> np.ndarray:
        return token_ids[: len(token_ids) // self._page_size * self._page_size]

    def _first_page(self, token_ids: np.ndarray) -> bytes:
        return token_ids[: self._page_size].tobytes()

    def _walk(self, token_ids: np.ndarray) -> Iterator[tuple[RadixNode, int]]:
        """The nodes along a prefix, each with the number of its pages that match (all of them except in the last)."""
        node = self._root
        while len(token_ids) and (child := node.children.get(self._first_page(token_ids))) is not None:
            num_pages = _common_len(child.token_ids, token_ids) // self._page_size
            is_whole = num_pages == len(child.pages)
            yield child, num_pages
            if not is_whole:
                return
            node = child
            token_ids = token_ids[num_pages * self._page_size :]

    def _touch_path(self, token_ids: np.ndarray) -> PrefixMatch:
        """Match, split the last node where the match ends inside it, and mark the path as used."""
        self._clock += 1
        node, pages = self._root, []
        for child, num_pages in self._walk(token_ids):
            node = child if num_pages == len(child.pages) else self._split(child, num_pages)
            node.last_access = self._clock
            pages.append(node.pages)
        matched = np.concatenate(pages) if pages else np.empty(0, dtype=np.int64)
        return PrefixMatch(len(matched) * self._page_size, matched, node)

    def _split(self, node: RadixNode, num_pages: int) -> RadixNode:
        """Move the first pages of ``node`` into a new node above it.

        ``node`` keeps the end, so handles to it still name the same prefix, and their locks count above it too.
        """
        parent, num_tokens = node.parent, num_pages * self._page_size
        assert parent is not None
        upper = self._add_child(parent, node.token_ids[:num_tokens], node.pages[:num_pages], node.last_access)
        upper.lock_count = node.lock_count
        node.parent = upper
        node.token_ids = node.token_ids[num_tokens:]
        node.pages = node.pages[num_pages:]
        upper.children[self._first_page(node.token_ids)] = node
        return upper

    def _add_child(self, parent: RadixNode, token_ids: np.ndarray, pages: np.ndarray, last_access: int) -> RadixNode:
        self._serial += 1
        child = RadixNode(parent, token_ids, pages, self._serial, last_access)
        parent.children[self._first_page(token_ids)] = child
        return child

    def _remove_leaf(self, leaf: RadixNode) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[self._first_page(leaf.token_ids)]
        self._queue(parent)

    def _queue(self, node: RadixNode) -> None:
        """Offer a node for eviction if it is an unlocked leaf."""
        if node.is_evictable and not node.queued:
            node.queued = True
            heapq.heappush(self._eviction_queue, (node.last_access, node.serial, node))

    def _pop_least_recent_leaf(self) -> RadixNode | None:
        while self._eviction_queue:
            queued_at, _, node = heapq.heappop(self._eviction_queue)
            node.queued = False
            if queued_at == node.last_access and node.is_evictable:
                return node
            self._queue(node)  # used since it was queued: later in line, or out of it
        return None

    def _path_up(self, handle: PrefixHandle) -> Iterator[RadixNode]:
        assert isinstance(handle, RadixNode)
        node = handle
        while node.parent is not None:
            yield node
            node = node.parent

    def _nodes(self) -> Iterator[RadixNode]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


def _common_len(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common prefix of two id arrays."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax())
    return first if differs[first] else n
