"""RMSNorm as Gemma 4 uses it: plain weight (no +1), statistics in float32, one cast at the end."""

from __future__ import annotations

import torch


def rmsnorm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """``x`` [..., D] normalised over its last dimension, times ``weight`` (broadcast against ``x``) if given.

    Same shape and dtype as ``x``. ``weight`` may be [D], or [heads, D] to norm several heads at once.
    """
    if x.dtype is not torch.float32:
        y = rmsnorm(x.float(), None if weight is None else weight.float(), eps)
        return y.to(x.dtype)
    # vector_norm is one pass over x where pow + mean are two
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale = torch.rsqrt_((norm * norm).mul_(1.0 / x.shape[-1]).add_(eps))
    y = x * scale
    return y if weight is None else y.mul_(weight)
