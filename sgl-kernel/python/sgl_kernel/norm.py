"""RMSNorm as Gemma 4 uses it: plain weight (no +1), statistics in float32, one cast at the end."""

from __future__ import annotations

from functools import cache

import torch


def rmsnorm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """``x`` [..., D] normalised over its last dimension, times ``weight`` (broadcast against ``x``) if given.

    Same shape and dtype as ``x``. ``weight`` may be [D], or [heads, D] to norm several heads at once.
    """
    if x.dtype is not torch.float32:
        return rmsnorm(x.float(), None if weight is None else weight.float(), eps).to(x.dtype)
    y = x * _inverse_rms(x, eps)
    return y if weight is None else y.mul_(weight)


def rmsnorm_add(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor) -> torch.Tensor:
    """``residual + rmsnorm(x, weight)``, all [..., D]; the norm is cast to the dtype of ``x`` before it is added."""
    if x.dtype is not torch.float32:
        return residual + rmsnorm(x, weight, eps)
    return torch.addcmul(residual, x * _inverse_rms(x, eps), weight)


def _inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    # vector_norm is one pass over x where pow + mean are two
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(_constant(eps, x.device), norm, norm, value=1.0 / x.shape[-1]).rsqrt_()


@cache
def _constant(value: float, device: torch.device) -> torch.Tensor:
    """A Python number in an element-wise op is wrapped into a new tensor on every call: as slow as the op."""
    return torch.tensor([value], dtype=torch.float32, device=device)
