"""Rows of an embedding table, and the per-layer embeddings of Gemma 4's small models."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sgl_kernel.launch import triton_kernels
from sgl_kernel.norm import rmsnorm


def embed(ids: torch.Tensor, table: torch.Tensor, scale: float, beside: torch.Tensor | None = None) -> torch.Tensor:
    """``table[ids] * scale``: ``ids`` [T] int64, ``table`` [V, D] -> [T, D]; with ``beside`` [T, D] on the right."""
    if ids.is_cuda:
        return triton_kernels("embedding").embed(ids, table, scale, beside)
    return embed_torch(ids, table, scale, beside)


def embed_torch(
    ids: torch.Tensor, table: torch.Tensor, scale: float, beside: torch.Tensor | None = None
) -> torch.Tensor:
    """The reference of ``embed``."""
    rows = F.embedding(ids, table).mul_(scale)
    return rows if beside is None else torch.cat((rows, beside), dim=-1)


def per_layer_inputs(
    ids: torch.Tensor,
    table: torch.Tensor,
    table_scale: float,
    context: torch.Tensor,
    gain: float,
    weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """``(rmsnorm(context * gain, weight) + table[ids] * table_scale) / sqrt(2)``, layer by layer: [n, T, P].

    ``ids`` [T] int64; ``table`` [V, n P], layer-major; ``context`` [T, n P] or parts [S, T, n P]; ``weight`` [P].
    """
    if ids.is_cuda:
        context = context if context.dim() == 3 else context[None]
        return triton_kernels("embedding").per_layer_inputs(ids, table, table_scale, context, gain, weight, eps)
    return per_layer_inputs_torch(ids, table, table_scale, context, gain, weight, eps)


def per_layer_inputs_torch(
    ids: torch.Tensor,
    table: torch.Tensor,
    table_scale: float,
    context: torch.Tensor,
    gain: float,
    weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """The reference of ``per_layer_inputs``."""
    context = context.sum(0).to(table.dtype) if context.dim() == 3 else context
    shape = (ids.shape[0], table.shape[1] // weight.shape[0], weight.shape[0])
    normed = rmsnorm((context * gain).view(shape), weight, eps)
    return ((normed + embed_torch(ids, table, table_scale).view(shape)) * 2**-0.5).transpose(0, 1)
