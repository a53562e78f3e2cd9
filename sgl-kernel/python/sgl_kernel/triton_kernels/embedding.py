"""Rows of an embedding table, scaled; and the per-layer embeddings made from them."""

import torch
import triton
import triton.language as tl

from sgl_kernel.triton_kernels.common import (
    cdiv,
    next_power_of_2,
    options,
    release_dependents,
    wait_for_inputs,
)
from sgl_kernel.triton_kernels.linear import gelu_tanh
from sgl_kernel.triton_kernels.norm import inverse_rms, sum_parts


@triton.jit
def embed_kernel(ids_ptr, table_ptr, beside_ptr, out_ptr, width, scale, HAS_BESIDE: tl.constexpr, BLOCK: tl.constexpr):
    """out[t] = table[ids[t]] * scale, followed by beside[t] where there is one. Grid (T, column blocks)."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    wait_for_inputs()
    release_dependents()
    token = tl.load(ids_ptr + row)
    value = tl.load(table_ptr + token * width + cols, mask=mask, other=0.0).to(tl.float32) * scale
    out = out_ptr + row * (2 * width if HAS_BESIDE else width) + cols
    tl.store(out, value.to(out_ptr.dtype.element_ty), mask=mask)
    if HAS_BESIDE:
        tl.store(out + width, tl.load(beside_ptr + row * width + cols, mask=mask, other=0.0), mask=mask)


def embed(ids, table, scale, beside=None):
    """``ids`` [T] int64, ``table`` [V, D] -> [T, D], or [T, 2 D] with ``beside`` [T, D] in the right half."""
    rows, width = ids.shape[0], table.shape[1]
    if beside is not None and (beside.shape != (rows, width) or not beside.is_contiguous()):
        raise ValueError(f"what stands beside {rows} embeddings of width {width} is {list(beside.shape)}")
    if not table.is_contiguous() or ids.dtype is not torch.int64:
        raise ValueError(f"an embedding needs int64 ids and a contiguous table, got {ids.dtype} and {table.stride()}")
    columns = width if beside is None else 2 * width
    out = torch.empty((rows, columns), dtype=table.dtype, device=table.device)
    block = min(1024, next_power_of_2(width))
    embed_kernel[(rows, cdiv(width, block))](
        ids, table, table if beside is None else beside, out, width, scale, HAS_BESIDE=beside is not None, BLOCK=block,
        **options(4),
    )  # fmt: skip
    return out


@triton.jit
def per_layer_inputs_kernel(
    ids_ptr, table_ptr, context_ptr, weight_ptr, out_ptr, part_stride, num_rows, num_layers, table_scale, gain, eps,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[layer, t] = (norm(context * gain) + table row * scale) / sqrt(2). Grid (T, layers)."""
    row, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < WIDTH
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    wait_for_inputs()
    release_dependents()
    dtype = out_ptr.dtype.element_ty
    token = tl.load(ids_ptr + row)
    table = tl.load(table_ptr + (token * num_layers + layer) * WIDTH + cols, mask=mask, other=0.0).to(tl.float32)
    context = sum_parts(context_ptr, part_stride, (row * num_layers + layer) * WIDTH + cols, mask, PARTS)
    context = (context * gain).to(dtype).to(tl.float32)
    context = (context * inverse_rms(context, WIDTH, eps) * weight).to(dtype).to(tl.float32)
    table = (table * table_scale).to(dtype).to(tl.float32)
    value = (context + table) * 0.7071067811865476
    tl.store(out_ptr + (layer * num_rows + row) * WIDTH + cols, value.to(dtype), mask=mask)


def per_layer_inputs(ids, table, table_scale, context, gain, weight, eps):
    """``ids`` [T], ``table`` [V, n P], ``context`` [S, T, n P] parts, ``weight`` [P] -> [n, T, P]."""
    parts, rows, total = context.shape
    width = weight.shape[0]
    layers = total // width
    if table.shape[1] != total or ids.shape != (rows,) or not context.is_contiguous() or not table.is_contiguous():
        raise ValueError(
            f"per-layer inputs need a table [V, {total}] and ids [{rows}], got {list(table.shape)}, {list(ids.shape)}"
        )
    out = torch.empty((layers, rows, width), dtype=table.dtype, device=table.device)
    per_layer_inputs_kernel[(rows, layers)](
        ids, table, context, weight, out, rows * total, rows, layers, table_scale, gain, eps,
        PARTS=parts, WIDTH=width, BLOCK=next_power_of_2(width), **options(1 if width <= 256 else 4),
    )  # fmt: skip
    return out


@triton.jit
def gated_projection_kernel(
    gate_ptr, factor_ptr, w_ptr, y_ptr, N, part_stride,
    PARTS: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """y[t, n] = sum_k w[n, k] gelu_tanh(gate[t, k]) factor[t, k]; K is small. Grid (weight tiles, T).

    ``gate`` comes from the kernel before; all else must be older. A tile of the weight is multiplied without the matrix
    unit: it is one row, and the weight is here before the row is.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    w = tl.load(w_ptr + n[:, None] * K + k[None, :], mask=(n[:, None] < N) & (k[None, :] < K), other=0.0)
    row = tl.program_id(1).to(tl.int64)
    factor = tl.load(factor_ptr + row * K + k, mask=k < K, other=0.0).to(tl.float32)
    wait_for_inputs()
    release_dependents()
    gate = sum_parts(gate_ptr, part_stride, row * K + k, k < K, PARTS)
    h = (gelu_tanh(gate) * factor).to(w.dtype).to(tl.float32)
    tl.store(y_ptr + row * N + n, tl.sum(w.to(tl.float32) * h[None, :], axis=1), mask=n < N)


def gated_projection(gate, factor, weight):
    """``gate`` [S, T, P] parts, ``factor`` [T, P], ``weight`` [N, P] -> [1, T, N] float32, one part."""
    parts, rows, width = gate.shape
    n = weight.shape[0]
    if factor.shape != (rows, width) or weight.shape[1] != width:
        shapes = f"{list(gate.shape)}, {list(factor.shape)} and {list(weight.shape)}"
        raise ValueError(f"gate [S, T, P], factor [T, P] and weight [N, P] do not fit: {shapes}")
    for name, tensor in {"gate": gate, "factor": factor, "weight": weight}.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, its strides are {tensor.stride()}")
    y = torch.empty((1, rows, n), dtype=torch.float32, device=gate.device)
    block_n = 32
    gated_projection_kernel[(cdiv(n, block_n), rows)](
        gate, factor, weight, y, n, rows * width,
        PARTS=parts, K=width, BK=next_power_of_2(width), BN=block_n, **options(4),
    )  # fmt: skip
    return y
