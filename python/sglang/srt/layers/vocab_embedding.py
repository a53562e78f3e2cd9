"""Token embedding tables."""

from __future__ import annotations

import torch

from sgl_kernel.embedding import embed


class ScaledEmbedding:
    """``table[ids] * scale``, with the scale rounded to the table's dtype first, as Gemma does."""

    def __init__(self, vocab_size: int, width: int, scale: float, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(vocab_size, width, dtype=dtype, device=device)
        self.scale = torch.tensor(scale, dtype=dtype).item()

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """``ids`` [T] int64 -> [T, width]."""
        return embed(ids, self.weight, self.scale)

    def beside(self, ids: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """``ids`` [T] int64, ``other`` [T, width] -> [T, 2 * width]: the embedding, then ``other``."""
        return embed(ids, self.weight, self.scale, other)
