"""Matrix products with weights stored [out, in]."""

from __future__ import annotations

from typing import Sequence

import torch
import torch.nn.functional as F


class Linear:
    """``y = x W^T`` without bias. ``widths`` are the row counts of the checkpoint tensors merged into one product."""

    def __init__(self, in_features: int, widths: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(sum(widths), in_features, dtype=dtype, device=device)
        self.widths = tuple(widths)

    def part(self, index: int) -> torch.Tensor:
        """View of the rows that checkpoint tensor ``index`` fills."""
        start = sum(self.widths[:index])
        return self.weight[start : start + self.widths[index]]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, in] -> [T, out]."""
        return F.linear(x, self.weight)
