"""Who owns which KV slot: the only caller of the page allocator, the prefix cache and the request table.

Positions of one open request, left to right (all boundaries but ``committed_len`` are whole pages):

    0            cached_len      shared_len      committed_len      allocated_len
    |                |               |                 |                  |
    |  tree's pages, locked by this  |  this request's own pages, freed   |
    |  request and by others who     |  or given to the tree when closed  |
    |  share them; never written     |  committed KV    |  reserve: slots |
    |  again                         |                  |  for what comes |

``cached_len`` was found when the request was opened; ``shared_len`` moves right when a request publishes what it has
computed. A page that is only partly committed always belongs to one request alone. Speculation writes into the
reserve; a rejected draft leaves its slots there to be written again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglang.srt.mem_cache.allocator import PageAllocator
from sglang.srt.mem_cache.kv_pool import KVReader
from sglang.srt.mem_cache.prefix_cache import InsertResult, NullPrefixCache, PrefixCache, PrefixHandle
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.req_to_token import ReqToTokenPool


@dataclass(slots=True, eq=False)  # mutable: only KVCacheManager edits it, from open to close
class RequestKV:
    """The KV of one open request, in tokens; the picture above says what the lengths mean."""

    req_pool_idx: int
    cached_len: int
    shared_len: int
    committed_len: int
    allocated_len: int
    prefix: PrefixHandle


@dataclass(frozen=True, slots=True)
class KVStats:
    """Where all slots are, in tokens: ``free + evictable + protected + owned == total``."""

    total: int
    free: int
    evictable: int
    protected: int
    owned: int
    open_requests: int


class KVCacheManager:
    """Opens, grows, commits and closes the KV of requests. Token ids may be any integer sequence; an int32 array or
    ``array('i')`` is read without a copy, which matters for long prompts that are matched often."""

    def __init__(self, pool: KVReader, req_to_token: ReqToTokenPool, *, disable_radix_cache: bool) -> None:
        page_size = pool.page_size
        assert req_to_token.max_len % page_size == 0, (
            f"rows of {req_to_token.max_len} positions are not whole pages of {page_size}"
        )
        self.page_size = page_size
        self.total_tokens = pool.size_tokens
        self._req_to_token = req_to_token
        self._allocator = PageAllocator(pool.size_tokens // page_size)
        self._prefix_cache: PrefixCache = NullPrefixCache() if disable_radix_cache else RadixCache(page_size)
        self._open: dict[int, RequestKV] = {}

    @property
    def available_tokens(self) -> int:
        """Tokens that could be allocated now: free ones and those the prefix cache would give up."""
        return self._allocator.available * self.page_size + self._prefix_cache.evictable_tokens

    def match_len(self, token_ids: Sequence[int] | np.ndarray) -> int:
        """Prefix tokens that ``open`` would find now; changes nothing."""
        return self._prefix_cache.match_len(_as_ids(token_ids)[:-1])

    def open(self, token_ids: Sequence[int] | np.ndarray, max_cached_len: int | None = None) -> RequestKV | None:
        """A row and the longest cached prefix, locked; None (and nothing changed) if no row is free.

        The last token is never taken from the cache: its forward is needed for the next token's logits. Nor is
        anything beyond ``max_cached_len``.
        """
        row = self._req_to_token.alloc()
        if row is None:
            return None
        match = self._prefix_cache.match_prefix(_as_ids(token_ids)[:-1][:max_cached_len])
        self._prefix_cache.lock(match.handle)
        self._write_pages(row, 0, match.pages)
        n = match.num_tokens
        kv = RequestKV(row, cached_len=n, shared_len=n, committed_len=n, allocated_len=n, prefix=match.handle)
        self._open[row] = kv
        return kv

    def grow(self, kv: RequestKV, num_tokens: int) -> bool:
        """Own slots for at least ``num_tokens`` positions, evicting cached prefixes if it must.

        False, and nothing changed, if even that is not enough.
        """
        if num_tokens <= kv.allocated_len:
            return True
        self._assert_open(kv)
        n_pages = -(-(num_tokens - kv.allocated_len) // self.page_size)
        end = kv.allocated_len + n_pages * self.page_size
        assert end <= self._req_to_token.max_len, f"{num_tokens} positions exceed a row of {self._req_to_token.max_len}"
        lacking = n_pages - self._allocator.available
        if lacking > 0:
            if lacking * self.page_size > self._prefix_cache.evictable_tokens:
                return False
            self._allocator.free(self._prefix_cache.evict(lacking * self.page_size))
        pages = self._allocator.alloc(n_pages)
        assert pages is not None, f"eviction promised {n_pages} pages, {self._allocator.available} are free"
        self._write_pages(kv.req_pool_idx, kv.allocated_len, pages)
        kv.allocated_len = end
        return True

    def locs(self, kv: RequestKV, start: int, end: int) -> np.ndarray:
        """Slots of positions ``start .. end``, [end - start] int64."""
        assert 0 <= start <= end <= kv.allocated_len, f"positions {start}..{end} of {kv.allocated_len} allocated"
        return self._req_to_token.host[kv.req_pool_idx, start:end].astype(np.int64)

    def commit(self, kv: RequestKV, committed_len: int) -> None:
        """The KV of the first ``committed_len`` positions is final. It never shrinks."""
        assert kv.committed_len <= committed_len <= kv.allocated_len, f"commit of {committed_len} tokens to {kv}"
        kv.committed_len = committed_len

    def show_device(self) -> None:
        """Make the request table on the device equal to the host's; comes before a forward that reads it."""
        self._req_to_token.flush()

    def cache_unfinished(self, kv: RequestKV, token_ids: Sequence[int] | np.ndarray) -> None:
        """Let others share the committed whole pages of a request that goes on.

        ``token_ids`` are the ids of the committed positions; further ids are ignored, and positions without an id
        are not shared. Where another request has cached the same tokens in the meantime, this one moves over to
        those slots and frees its own, so ``locs`` of committed positions may change.
        """
        self._assert_open(kv)
        result = self._publish(kv, token_ids)
        match = result.match
        shared_pages = kv.shared_len // self.page_size
        self._write_pages(kv.req_pool_idx, kv.shared_len, match.pages[shared_pages:])
        self._prefix_cache.lock(match.handle)
        self._prefix_cache.unlock(kv.prefix)
        kv.prefix = match.handle
        kv.shared_len = match.num_tokens

    def close(self, kv: RequestKV, token_ids: Sequence[int] | np.ndarray) -> None:
        """End of a request, for whatever reason: cache the committed whole pages, free all else and the row.

        ``token_ids`` as in ``cache_unfinished``.
        """
        self._assert_open(kv)
        result = self._publish(kv, token_ids)
        kept = max(kv.shared_len, result.match.num_tokens)
        self._allocator.free(self._pages(kv, kept, kv.allocated_len))
        self._prefix_cache.unlock(kv.prefix)
        self._req_to_token.free(kv.req_pool_idx)
        del self._open[kv.req_pool_idx]

    def flush(self) -> bool:
        """Empty the prefix cache; False (and nothing changed) while requests are open."""
        if self._open:
            return False
        self._prefix_cache.reset()
        self._allocator.reset()  # everything is free now, and in the order of a fresh start
        return True

    def stats(self) -> KVStats:
        return KVStats(
            total=self.total_tokens,
            free=self._allocator.available * self.page_size,
            evictable=self._prefix_cache.evictable_tokens,
            protected=self._prefix_cache.protected_tokens,
            owned=sum(kv.allocated_len - kv.shared_len for kv in self._open.values()),
            open_requests=len(self._open),
        )

    def check_integrity(self) -> None:
        """RuntimeError with numbers unless every page has exactly one owner and every lock a request."""
        stats = self.stats()
        accounted = stats.free + stats.evictable + stats.protected + stats.owned
        if accounted != stats.total:
            raise RuntimeError(f"KV slots do not balance: {accounted} accounted for, {stats.total} exist: {stats}")
        owned = [self._pages(kv, kv.shared_len, kv.allocated_len) for kv in self._open.values()]
        pages = np.concatenate([self._allocator.free_pages(), self._prefix_cache.cached_pages(), *owned])
        owners = np.bincount(pages, minlength=self._allocator.num_pages + 1)
        wrong = np.flatnonzero(owners[1:] != 1) + 1
        if owners[0] or len(owners) > self._allocator.num_pages + 1 or len(wrong):
            raise RuntimeError(
                f"KV pages without exactly one owner: {wrong[:16]} of 1..{self._allocator.num_pages}: {stats}"
            )
        self._prefix_cache.check_integrity(kv.prefix for kv in self._open.values())
        rows_in_use = self._req_to_token.max_requests - self._req_to_token.available
        if rows_in_use != len(self._open):
            raise RuntimeError(f"{rows_in_use} request rows are in use, but {len(self._open)} requests are open")

    def _assert_open(self, kv: RequestKV) -> None:
        assert self._open.get(kv.req_pool_idx) is kv, f"request is not open: {kv}"

    def _publish(self, kv: RequestKV, token_ids: Sequence[int] | np.ndarray) -> InsertResult:
        """Insert the committed whole pages and free this request's duplicates of pages that were cached already."""
        token_ids = _as_ids(token_ids)
        n_pages = min(len(token_ids), kv.committed_len) // self.page_size
        n_pages = max(n_pages, kv.shared_len // self.page_size)
        end = n_pages * self.page_size
        assert end <= len(token_ids), f"{len(token_ids)} ids do not cover the {kv.shared_len} shared tokens"
        result = self._prefix_cache.insert(token_ids[:end], self._pages(kv, 0, end))
        assert result.num_present >= kv.shared_len, f"{result.num_present} tokens are cached, {kv.shared_len} locked"
        self._allocator.free(self._pages(kv, kv.shared_len, result.num_present))
        return result

    def _pages(self, kv: RequestKV, start: int, end: int) -> np.ndarray:
        """Pages of the positions ``start .. end``, whole pages both, int64."""
        slots = self._req_to_token.host[kv.req_pool_idx, start : end : self.page_size]
        return slots.astype(np.int64) // self.page_size

    def _write_pages(self, row: int, start: int, pages: np.ndarray) -> None:
        slots = (pages[:, None] * self.page_size + np.arange(self.page_size)).ravel()
        self._req_to_token.write(row, start, slots)


def _as_ids(token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.asarray(token_ids, dtype=np.int32)
