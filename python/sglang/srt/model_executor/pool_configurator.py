"""How many tokens the KV pool holds, and the pool itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang.srt.configs.model_config import KVLayout
from sglang.srt.mem_cache.kv_manager import KVCacheManager
from sglang.srt.mem_cache.kv_pool import KVReader, MHATokenToKVPool
from sglang.srt.mem_cache.kv_view import ReadOnlyKVPool
from sglang.srt.mem_cache.req_to_token import ReqToTokenPool
from sglang.srt.server_args_slices import MemoryConfig
from sglang.srt.utils.device import Device

# On a CPU memory is shared with everything else, and the pool is far from the limit of speed: stay small by default.
_CPU_DEFAULT_TOKENS = 1 << 17
_MEAN_TOKENS_PER_REQUEST = 512
_MAX_DEFAULT_REQUESTS = 2048


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
    layout: KVLayout, memory: MemoryConfig, *, tokens_per_step: int, dtype: torch.dtype, device: Device
) -> KVMemory:
    """Size and allocate. Call it after the weights are loaded, so that what is left is known.

    ``tokens_per_step``: slots a running request needs beyond its committed tokens. ``ValueError`` when the pool would
    not hold a single step of one request.
    """
    page = memory.page_size
    bytes_per_token = layout.elements_per_token * dtype.itemsize
    tokens = memory.max_total_tokens
    if tokens is None:
        tokens = int(device.available_bytes() * memory.mem_fraction_static) // bytes_per_token
        if device.kind == "cpu":
            tokens = min(tokens, max(_CPU_DEFAULT_TOKENS, memory.context_length + tokens_per_step))
    tokens = tokens // page * page
    if tokens < page + tokens_per_step:
        raise ValueError(
            f"the KV pool would hold {tokens} tokens, too few for one request: raise --max-total-tokens or "
            f"--mem-fraction-static (one token takes {bytes_per_token} bytes)"
        )
    max_requests = memory.max_running_requests
    if max_requests is None:
        max_requests = max(1, min(_MAX_DEFAULT_REQUESTS, tokens // _MEAN_TOKENS_PER_REQUEST))
    row_len = -(-(memory.context_length + tokens_per_step) // page) * page
    pool = MHATokenToKVPool(layout, tokens, page, dtype, device.torch_device)
    rows = ReqToTokenPool(max_requests, row_len, device.torch_device)
    manager = KVCacheManager(pool, rows, disable_radix_cache=memory.disable_radix_cache)
    return KVMemory(pool, manager, rows.req_to_token, max_requests, memory.context_length)
