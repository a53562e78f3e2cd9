"""The one place where a layer meets the KV pool."""

from __future__ import annotations

import torch

from sglang.srt.mem_cache.kv_pool import KVCache
from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class RadixAttention:
    """Attention of one layer over the KV of physical layer ``kv_layer_id`` (its own, or one it shares or borrows)."""

    def __init__(self, kv_layer_id: int) -> None:
        self.kv_layer_id = kv_layer_id

    def attend(self, q: torch.Tensor, fb: ForwardBatch) -> torch.Tensor:
        """Read only. ``q`` [T, H, D] -> [T, H, D]."""
        return fb.attn.attend(q, fb.token_to_kv_pool.layer(self.kv_layer_id))

    def store_and_attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, fb: ForwardBatch) -> torch.Tensor:
        """For a layer that owns KV: store ``k``, ``v`` [T, KH, D] at ``fb.out_cache_loc``, then attend."""
        pool = fb.token_to_kv_pool
        assert isinstance(pool, KVCache) and fb.out_cache_loc is not None, "a layer that owns KV needs a writable pool"
        pool.set_kv_buffer(self.kv_layer_id, fb.out_cache_loc, k, v)
        return self.attend(q, fb)
