"""RMSNorm as Gemma 4 uses it: plain weight (no +1), statistics in float32, one cast at the end."""

from __future__ import annotations

from functools import cache

import torch

from sgl_kernel.cpu_ops import usable
from sgl_kernel.launch import triton_kernels


def rmsnorm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """``x`` [..., D] normalised over its last dimension, times ``weight`` (broadcast against ``x``) if given.

    Same shape and dtype as ``x``. ``weight`` may be [D], or [heads, D] to norm several heads at once.
    """
    if x.is_cuda and (weight is None or weight.dim() == 1):
        return triton_kernels("norm").rmsnorm(x, weight, eps)
    if weight is not None and weight.dim() == 1 and x.shape[-1] % 16 == 0:
        ops = usable(x, weight)
        if ops is not None:
            y = torch.empty_like(x)
            width = x.shape[-1]
            ops.sgl_rmsnorm(x.data_ptr(), weight.data_ptr(), None, y.data_ptr(), x.numel() // width, width, eps)
            return y
    return rmsnorm_torch(x, weight, eps)


def norms(x: torch.Tensor, weights: tuple[torch.Tensor, ...], eps: float) -> tuple[torch.Tensor, ...]:
    """``x`` [T, D] normed with each of up to three ``weights`` [D]."""
    if x.is_cuda:
        return triton_kernels("norm").norms(x, weights, eps)
    return tuple(rmsnorm(x, weight, eps) for weight in weights)


def add_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor,
    scale: torch.Tensor | None,
    next_weights: tuple[torch.Tensor, ...],
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """``s = (residual + rmsnorm(x, weight)) * scale`` and s normed with each of up to three ``next_weights`` [D].

    ``x``: [T, D] or parts [S, T, D] of a product; ``residual`` [T, D]; ``scale`` [1]. -> s [T, D], tuple of [T, D].
    """
    if residual.is_cuda:
        return triton_kernels("norm").add_norm(x, weight, eps, residual, scale, next_weights)
    if x.dim() == 3:
        x = x.sum(0).to(residual.dtype)
    if scale is None and len(next_weights) == 1:
        total, y = rmsnorm_add_rmsnorm(x, weight, eps, residual, next_weights[0])
        return total, (y,)
    total = rmsnorm_add(x, weight, eps, residual)
    total = total if scale is None else total * scale
    return total, norms(total, next_weights, eps)


def sum_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """``x`` [T, D] or parts [S, T, D] -> the sum over parts in the dtype of ``weight``, and its norm, [T, D] both."""
    if x.is_cuda and x.dim() == 3:
        return triton_kernels("norm").sum_norm(x, weight, eps)
    total = x.sum(0).to(weight.dtype) if x.dim() == 3 else x
    return total, rmsnorm(total, weight, eps)


def rmsnorm_add(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor) -> torch.Tensor:
    """``residual + rmsnorm(x, weight)``, all [..., D]; the norm is cast to the dtype of ``x`` before it is added."""
    width = x.shape[-1]
    ops = usable(x, weight, residual) if width % 16 == 0 else None
    if ops is None:
        return residual + rmsnorm_torch(x, weight, eps)
    y = torch.empty_like(x)
    rows = x.numel() // width
    ops.sgl_rmsnorm(x.data_ptr(), weight.data_ptr(), residual.data_ptr(), y.data_ptr(), rows, width, eps)
    return y


def rmsnorm_add_rmsnorm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor, next_weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``s = rmsnorm_add(x, weight, residual)`` and ``rmsnorm(s, next_weight)``, all [..., D]."""
    width = x.shape[-1]
    ops = usable(x, weight, residual, next_weight) if width % 16 == 0 else None
    if ops is None:
        total = rmsnorm_add(x, weight, eps, residual)
        return total, rmsnorm(total, next_weight, eps)
    total, y = torch.empty_like(x), torch.empty_like(x)
    ops.sgl_rmsnorm_add_rmsnorm(
        x.data_ptr(), weight.data_ptr(), residual.data_ptr(), next_weight.data_ptr(), total.data_ptr(), y.data_ptr(),
        x.numel() // width, width, eps,
    )  # fmt: skip
    return total, y


def rmsnorm_torch(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """The reference of ``rmsnorm``."""
    if x.dtype is not torch.float32:
        return rmsnorm_torch(x.float(), None if weight is None else weight.float(), eps).to(x.dtype)
    # vector_norm is one pass over x where pow + mean are two
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    y = x * torch.addcmul(_constant(eps, x.device), norm, norm, value=1.0 / x.shape[-1]).rsqrt_()
    return y if weight is None else y.mul_(weight)


@cache
def _constant(value: float, device: torch.device) -> torch.Tensor:
    """A Python number in an element-wise op is wrapped into a new tensor on every call: as slow as the op."""
    return torch.tensor([value], dtype=torch.float32, device=device)
