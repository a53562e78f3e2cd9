"""A small KV layout with two geometries and sharing layers, for the tests of this folder."""

from __future__ import annotations

import torch

from sglang.srt.configs.model_config import FULL, SLIDING, KVLayout, LayerKVSpec
from sglang.srt.mem_cache.kv_pool import MHATokenToKVPool

SLIDING_SPEC = (SLIDING, 2, 4, 8)  # kind, KV heads, head width, window
FULL_SPEC = (FULL, 1, 8, None)
OWNERS = (0, 1, 2, 3)
SHARING = {4: 2, 5: 3}


def make_layout() -> KVLayout:
    """Layers 0 to 3 own KV (sliding, full, sliding, full); 4 reads 2's and 5 reads 3's."""
    specs = [
        LayerKVSpec(layer_id, *(FULL_SPEC if layer_id % 2 else SLIDING_SPEC), SHARING.get(layer_id, layer_id))
        for layer_id in (*OWNERS, *SHARING)
    ]
    return KVLayout(tuple(specs))


def make_pool(size_tokens: int = 32, page_size: int = 4, dtype: torch.dtype = torch.float32) -> MHATokenToKVPool:
    return MHATokenToKVPool(make_layout(), size_tokens, page_size, dtype, "cpu")


def random_kv(pool: MHATokenToKVPool, layer_id: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v [num_tokens, KH, D] in the geometry of a layer."""
    shape = (num_tokens, *pool.layer(layer_id).key.shape[1:])
    return torch.randn(shape), torch.randn(shape)
