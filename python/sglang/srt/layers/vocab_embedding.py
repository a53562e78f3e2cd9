"""Token embedding tables."""

from __future__ import annotations

import torch

from sgl_kernel.embedding import embed
from sglang.srt.distributed.parallel_state import TpGroup


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


class VocabParallelEmbedding:
    """Rows of a table of which every rank holds an equal part, for tables too large to be on each of them."""

    def __init__(
        self, vocab_size: int, width: int, scale: float, dtype: torch.dtype, device: torch.device, group: TpGroup
    ) -> None:
        self.ids = group.part(vocab_size)
        self.weight = torch.empty(len(self.ids), width, dtype=dtype, device=device)
        self.scale = torch.tensor(scale, dtype=dtype).item()
        self._group = group

    def rows(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``ids`` [T] int64 -> a table that has these rows of the whole one, not scaled, and where in it, [T] int64."""
        if self._group.size == 1:
            return self.weight, ids
        here = ids - self.ids.start
        is_here = (here >= 0) & (here < len(self.ids))
        rows = self.weight[torch.where(is_here, here, 0)]
        rows = self._group.pick(torch.where(is_here[:, None], rows, 0))
        return rows, torch.arange(len(ids), device=ids.device)
