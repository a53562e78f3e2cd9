"""RMSNorm layer."""

from __future__ import annotations

import torch

from sgl_kernel.norm import rmsnorm


class RMSNorm:
    def __init__(self, width: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(width, dtype=dtype, device=device)
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [..., width], same shape and dtype out."""
        return rmsnorm(x, self.weight, self.eps)
