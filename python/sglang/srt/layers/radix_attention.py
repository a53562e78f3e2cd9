"""The one place where a layer meets the KV pool."""

from __future__ import annotations

import torch

from sglang.srt.distributed.parallel_state import TpGroup
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


class HeadGatheringAttention(RadixAttention):
    """Attention of all query heads, where each rank has the KV of some: it computes theirs, and gets the others'."""

    def __init__(self, kv_layer_id: int, num_kv_heads: int, group: TpGroup) -> None:
        """``num_kv_heads``: of all ranks together."""
        super().__init__(kv_layer_id)
        self._num_kv_heads = num_kv_heads
        self._kv_heads = group.kv_heads(num_kv_heads)
        self._group = group

    def attend(self, q: torch.Tensor, fb: ForwardBatch) -> torch.Tensor:
        """Read only. ``q`` [T, H, D], the same on all ranks -> [T, H, D], too."""
        per_kv_head = q.shape[1] // self._num_kv_heads
        own = q[:, self._kv_heads.start * per_kv_head : self._kv_heads.stop * per_kv_head].contiguous()
        of_ranks = self._group.gather(super().attend(own, fb))
        # ranks that have the same heads stand next to each other
        copies = len(of_ranks) * len(self._kv_heads) // self._num_kv_heads
        return of_ranks[::copies].transpose(0, 1).reshape(q.shape)
