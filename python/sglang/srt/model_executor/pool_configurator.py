"""How many tokens the KV pool holds, and the pool itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang.srt.configs.model_config import KVLayout
from sglang.srt.distributed.parallel_state import TpGroup
from sglang.srt.mem_cache.kv_manager import KVCacheManager
from sglang.srt.mem_cache.kv_pool import KVReader, MHATokenToKVPool
from sglang.srt.mem_cache.kv_view import ReadOnlyKVPool
from sglang.srt.mem_cache.req_to_token import ReqToTokenPool
from sglang.srt.server_args_slices import MemoryConfig
from sglang.srt.utils.device import Device

# On a CPU memory is shared with everything else, and the pool is far from the limit of speed: stay small by default.
_CPU_DEFAULT_TOKENS = 1 << 17
_MEAN_TOKENS_PER_REQUEST = 512
# Rows of the request table take memory that could hold tokens: no more than this part by default.
_MAX_ROWS_PART = 1 / 50


@dataclass(frozen=True, slots=True)
class KVMemory:
    """The pool as its holder may use it (a ``KVCache`` for the target, a ``ReadOnlyKVPool`` for a drafter)."""

    pool: KVReader
    kv_manager: KVCacheManager
    req_to_token: torch.Tensor
    max_requests: int
    context_length: int

    @property
    def dummy_row(self) -> int:
        """The row of ``req_to_token`` that padding rows use."""
        return self.req_to_token.shape[0] - 1

    @property
    def max_kv_len(self) -> int:
        """No request's KV is longer, speculation's reserve included."""
        return self.req_to_token.shape[1]

    def read_only(self) -> KVMemory:
        """The same KV for somebody who must not write it."""
        return KVMemory(
            ReadOnlyKVPool(self.pool), self.kv_manager, self.req_to_token, self.max_requests, self.context_length
        )


def build_kv_memory(
    layout: KVLayout,
    memory: MemoryConfig,
    *,
    tokens_per_step: int,
    dtype: torch.dtype,
    device: Device,
    reserve_bytes: int = 0,
    group: TpGroup | None = None,
) -> KVMemory:
    """Size and allocate. Call it after the weights are loaded, so that what is left is known.

    ``layout``: of this rank. ``tokens_per_step``: slots a running request needs beyond its committed tokens;
    ``reserve_bytes``: what forwards and graphs will need of a GPU besides; ``group``: ranks that must all have a pool
    of the same size. ``ValueError`` when the pool would not hold a single step of one request.
    """
    page, group = memory.page_size, group or TpGroup()
    # a step may be started before the one before it is read: slots for two
    row_len = -(-(memory.context_length + 2 * tokens_per_step) // page) * page
    row_bytes = 0 if device.kind == "cpu" else row_len * torch.int32.itemsize
    bytes_per_token = layout.elements_per_token * dtype.itemsize
    # the ranks of a machine share its memory, unless each has a GPU of its own
    num_bytes = kv_budget_bytes(memory, device, reserve_bytes) // (group.ranks_here if device.kind == "cpu" else 1)
    tokens, max_requests = size_pool(memory, num_bytes, bytes_per_token, row_bytes)
    if device.kind == "cpu" and memory.max_total_tokens is None:
        tokens = min(tokens, max(_CPU_DEFAULT_TOKENS, memory.context_length + tokens_per_step) // page * page)
        max_requests = memory.max_running_requests or _default_requests(tokens)
    tokens, max_requests = group.least(tokens), group.least(max_requests)
    if tokens < page + tokens_per_step:
        raise ValueError(
            f"the KV pool would hold {max(tokens, 0)} tokens, too few for one request: raise --max-total-tokens or "
            f"--mem-fraction-static, or lower --chunked-prefill-size or --cuda-graph-max-bs (one token takes "
            f"{bytes_per_token} bytes; {num_bytes / 1e6:.0f} MB are there for the pool, "
            f"{reserve_bytes / 1e6:.0f} MB are kept for forwards)"
        )
    pool = MHATokenToKVPool(layout, tokens, page, dtype, device.torch_device)
    rows = ReqToTokenPool(max_requests, row_len, device.torch_device)
    manager = KVCacheManager(pool, rows, disable_radix_cache=memory.disable_radix_cache)
    return KVMemory(pool, manager, rows.req_to_token, max_requests, memory.context_length)


def kv_budget_bytes(memory: MemoryConfig, device: Device, reserve_bytes: int) -> int:
    """Bytes the pool may take. On a GPU what ``mem_fraction_static`` leaves stays free, or ``reserve_bytes``."""
    free = device.available_bytes()
    if device.kind == "cpu":
        return int(free * memory.mem_fraction_static)
    return free - max(reserve_bytes, int(device.total_bytes() * (1.0 - memory.mem_fraction_static)))


def size_pool(memory: MemoryConfig, num_bytes: int, bytes_per_token: int, row_bytes: int) -> tuple[int, int]:
    """Tokens (whole pages) and requests that ``num_bytes`` hold; each request also takes a row of ``row_bytes``."""
    page = memory.page_size
    if memory.max_total_tokens is not None:
        tokens = memory.max_total_tokens // page * page
        return tokens, memory.max_running_requests or _default_requests(tokens)
    max_requests = memory.max_running_requests
    if max_requests is None:
        max_requests = _default_requests(num_bytes // bytes_per_token)
        if row_bytes:
            max_requests = max(1, min(max_requests, int(num_bytes * _MAX_ROWS_PART) // row_bytes))
    # one row more is the dummy row, one page more the dummy page
    tokens = (num_bytes - (max_requests + 1) * row_bytes) // bytes_per_token - page
    return tokens // page * page, max_requests


def _default_requests(tokens: int) -> int:
    """As many as the pool would hold at a usual length; there is no other limit."""
    return max(1, tokens // _MEAN_TOKENS_PER_REQUEST)
