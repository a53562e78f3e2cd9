"""Norm and rotation of all heads of a layer, straight from the merged projection."""

from __future__ import annotations

import torch

from sgl_kernel.cpu_ops import usable
from sgl_kernel.launch import triton_kernels
from sgl_kernel.norm import rmsnorm_torch
from sgl_kernel.rope import apply_rope


def head_norm_rope(
    heads: torch.Tensor, weights: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, num_values: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys normed with weight and rotated; values normed without weight and not rotated.

    ``heads`` [T, Hin, D]: queries, keys, values, or queries and keys where values are the raw keys; ``weights``
    [Hrot, D]: one row per query and key head; ``cos``, ``sin`` [T, 1, D] from ``rope_tables``; the values are the last
    ``num_values`` input heads. Returns [T, Hrot, D] and [T, num_values, D].
    """
    if heads.dim() == 4:
        heads = heads.sum(0).to(cos.dtype)
    rows, num_heads, width = heads.shape
    rotated = weights.shape[0]
    ops = usable(heads, weights, cos, sin) if width % 16 == 0 else None
    if ops is None:
        return head_norm_rope_torch(heads, weights, cos, sin, num_values, eps)
    out = torch.empty((rows, rotated, width))
    values = torch.empty((rows, num_values, width))
    ops.sgl_head_norm_rope(
        heads.data_ptr(), weights.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr(), values.data_ptr(),
        rows, num_heads, rotated, num_heads - num_values, num_values, width, eps,
    )  # fmt: skip
    return out, values


def query_norm_rope(
    heads: torch.Tensor, weights: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float
) -> torch.Tensor:
    """Queries of a layer without KV of its own: ``heads`` [T, H, D] or parts [S, T, H, D] -> [T, H, D]."""
    if heads.is_cuda:
        return triton_kernels("head_norm_rope").head_norm_rope(heads, weights, cos, sin, 0, eps)
    return head_norm_rope(heads, weights, cos, sin, 0, eps)[0]


def head_norm_rope_torch(
    heads: torch.Tensor, weights: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, num_values: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference of ``head_norm_rope``."""
    normed = rmsnorm_torch(heads, None, eps)
    values = normed[:, normed.shape[1] - num_values :]
    return apply_rope(normed[:, : weights.shape[0]] * weights, cos, sin), values
