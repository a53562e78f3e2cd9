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

    def store(
        self,
        heads: torch.Tensor,
        weights: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        eps: float,
        fb: ForwardBatch,
    ) -> torch.Tensor:
        """For a layer that owns KV: norm, rotate and store the keys and values among ``heads`` at ``fb.out_cache_loc``.

        Arguments as in ``sgl_kernel.kvcache.norm_rope_store``; the queries [T, H, D].
        """
        pool = fb.token_to_kv_pool
        assert isinstance(pool, KVCache) and fb.out_cache_loc is not None, "a layer that owns KV needs a writable pool"
        return pool.norm_rope_store(self.kv_layer_id, fb.out_cache_loc, heads, weights, cos, sin, eps)
