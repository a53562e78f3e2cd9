"""RMSNorm layer."""

from __future__ import annotations

import torch

from sgl_kernel.norm import add_norm, rmsnorm


class RMSNorm:
    def __init__(self, width: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(width, dtype=dtype, device=device)
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [..., width], same shape and dtype out."""
        return rmsnorm(x, self.weight, self.eps)

    def add_then_norm(
        self,
        residual: torch.Tensor,
        x: torch.Tensor,
        following: tuple[RMSNorm, ...],
        scale: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """``s = (residual + norm(x)) * scale`` and s through each norm of ``following``; ``x`` may come in parts."""
        weights = tuple(norm.weight for norm in following)
        return add_norm(x, self.weight, self.eps, residual, scale, weights)
