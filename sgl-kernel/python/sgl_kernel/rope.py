"""Rotary embedding with the half-split pairing (dimension j with j + D/2)."""

from __future__ import annotations

import torch

from sgl_kernel.cpu_ops import usable
from sgl_kernel.launch import triton_kernels


def rope_tables(
    positions: torch.Tensor, inv_freq: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and signed sin for ``apply_rope``, both [T, 1, D] in ``dtype``.

    ``positions`` [T] int64, ``inv_freq`` [D/2] float32. Angles are computed in float32 and cast afterwards. The first
    half of the sine is negated here, so that rotating needs no negation later.
    """
    if positions.is_cuda:
        return triton_kernels("head_norm_rope").rope_tables(positions, inv_freq, dtype)
    ops = usable(inv_freq) if dtype is torch.float32 and positions.is_contiguous() else None
    if ops is None:
        return rope_tables_torch(positions, inv_freq, dtype)
    rows, half = len(positions), len(inv_freq)
    cos, sin = torch.empty((rows, 1, 2 * half)), torch.empty((rows, 1, 2 * half))
    ops.sgl_rope_tables(positions.data_ptr(), inv_freq.data_ptr(), cos.data_ptr(), sin.data_ptr(), rows, half)
    return cos, sin


def rope_tables_torch(
    positions: torch.Tensor, inv_freq: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference of ``rope_tables``."""
    angle = positions.to(torch.float32)[:, None] * inv_freq
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), -1).unsqueeze(1).to(dtype), torch.cat((-sin, sin), -1).unsqueeze(1).to(dtype)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``x`` [T, heads, D] rotated by tables from ``rope_tables``."""
    first, second = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat((second, first), -1), sin)
