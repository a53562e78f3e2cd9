"""RMSNorm, residual addition and the norms that follow, one row per program."""

import torch
import triton
import triton.language as tl

from sgl_kernel.triton_kernels.common import next_power_of_2, options, release_dependents, wait_for_inputs

_MAX_NEXT = 3


@triton.jit
def sum_parts(ptr, stride, offsets, mask, PARTS: tl.constexpr):
    """Sum over parts in ascending order, float32."""
    total = tl.load(ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(ptr + part * stride + offsets, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit
def inverse_rms(x, width, eps):
    """1 / sqrt(mean(x^2) + eps) of a row padded with zeros."""
    return tl.rsqrt(tl.sum(x * x, axis=0) / width + eps)


@triton.jit
def norm_chain_kernel(
    x_ptr, residual_ptr, weight_ptr, scale_ptr, sum_ptr, w1_ptr, w2_ptr, w3_ptr, y1_ptr, y2_ptr, y3_ptr,
    part_stride, width, eps,
    PARTS: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_SCALE: tl.constexpr,
    STORE_SUM: tl.constexpr, NUM_NEXT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """s = (residual + norm(x, weight)) * scale, with the terms that are there; y_i = norm(s, w_i). Grid (T,).

    ``x`` comes from the kernel before; all else must be older.
    """
    cols = tl.arange(0, BLOCK)
    mask = cols < width
    row = tl.program_id(0).to(tl.int64) * width + cols
    dtype = y1_ptr.dtype.element_ty
    # all that no kernel before writes is on its way before the wait
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + cols, mask=mask, other=0.0)
    if HAS_SCALE:
        scale = tl.load(scale_ptr).to(tl.float32)
    if NUM_NEXT > 0:
        w1 = tl.load(w1_ptr + cols, mask=mask, other=0.0)
    if NUM_NEXT > 1:
        w2 = tl.load(w2_ptr + cols, mask=mask, other=0.0)
    if NUM_NEXT > 2:
        w3 = tl.load(w3_ptr + cols, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row, mask=mask, other=0.0).to(tl.float32)
    wait_for_inputs()
    release_dependents()
    s = sum_parts(x_ptr, part_stride, row, mask, PARTS)
    if HAS_WEIGHT:
        s = (s * inverse_rms(s, width, eps) * weight.to(tl.float32)).to(dtype).to(tl.float32)
    if HAS_RESIDUAL:
        s = (residual + s).to(dtype).to(tl.float32)
    if HAS_SCALE:
        s = s * scale
    s = s.to(dtype).to(tl.float32)
    if STORE_SUM:
        tl.store(sum_ptr + row, s.to(dtype), mask=mask)
    if NUM_NEXT > 0:
        normed = s * inverse_rms(s, width, eps)
        tl.store(y1_ptr + row, (normed * w1.to(tl.float32)).to(dtype), mask=mask)
    if NUM_NEXT > 1:
        tl.store(y2_ptr + row, (normed * w2.to(tl.float32)).to(dtype), mask=mask)
    if NUM_NEXT > 2:
        tl.store(y3_ptr + row, (normed * w3.to(tl.float32)).to(dtype), mask=mask)


@triton.jit
def weightless_norm_kernel(x_ptr, y_ptr, width, eps, BLOCK: tl.constexpr):
    """y = x / rms(x) for one row."""
    cols = tl.arange(0, BLOCK)
    mask = cols < width
    row = tl.program_id(0).to(tl.int64) * width + cols
    wait_for_inputs()
    release_dependents()
    x = tl.load(x_ptr + row, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row, (x * inverse_rms(x, width, eps)).to(y_ptr.dtype.element_ty), mask=mask)


def _warps(width):
    """A row is read once, and what counts is to have it all under way at once: four elements a thread."""
    return min(32, max(4, next_power_of_2(width) // 128))


def rmsnorm(x, weight, eps):
    """``x`` [..., D], contiguous; ``weight`` [D] or None -> same shape and dtype."""
    width = x.shape[-1]
    _check_rows(x, width)
    y = torch.empty_like(x)
    rows, block = x.numel() // width, next_power_of_2(width)
    if weight is None:
        weightless_norm_kernel[(rows,)](x, y, width, eps, BLOCK=block, **options(_warps(width)))
    else:
        _check_rows(weight, width)
        norm_chain_kernel[(rows,)](
            x, x, x, x, y, weight, weight, weight, y, y, y, 0, width, eps,
            PARTS=1, HAS_WEIGHT=False, HAS_RESIDUAL=False, HAS_SCALE=False, STORE_SUM=False, NUM_NEXT=1, BLOCK=block,
            **options(_warps(width)),
        )  # fmt: skip
    return y


def add_norm(x, weight, eps, residual, scale, next_weights):
    """``x`` [T, D] or parts [S, T, D]; -> s = (residual + norm(x)) * scale, and its norms with ``next_weights``."""
    rows, width = residual.shape
    parts = x.shape[0] if x.dim() == 3 else 1
    if x.shape[-2:] != residual.shape or len(next_weights) > _MAX_NEXT:
        raise ValueError(
            f"x {list(x.shape)} must be [T, D] or [S, T, D] for a residual {list(residual.shape)}, with at most "
            f"{_MAX_NEXT} norms behind it"
        )
    for tensor in (x, residual, weight, *next_weights):
        _check_rows(tensor, width)
    total = torch.empty_like(residual)
    outs = tuple(torch.empty_like(residual) for _ in next_weights)
    w = (*next_weights, *(weight,) * (_MAX_NEXT - len(next_weights)))
    y = (*outs, *(total,) * (_MAX_NEXT - len(outs)))
    norm_chain_kernel[(rows,)](
        x, residual, weight, weight if scale is None else scale, total, *w, *y, rows * width, width, eps,
        PARTS=parts, HAS_WEIGHT=True, HAS_RESIDUAL=True, HAS_SCALE=scale is not None, STORE_SUM=True,
        NUM_NEXT=len(outs), BLOCK=next_power_of_2(width), **options(_warps(width)),
    )  # fmt: skip
    return total, outs


def norms(x, weights, eps):
    """``x`` [T, D] normed with each of up to three weights [D]: tuple of [T, D]."""
    rows, width = x.shape
    if not 1 <= len(weights) <= _MAX_NEXT:
        raise ValueError(f"{len(weights)} norms of one input: 1 to {_MAX_NEXT} are possible")
    for tensor in (x, *weights):
        _check_rows(tensor, width)
    outs = tuple(torch.empty_like(x) for _ in weights)
    w = (*weights, *(weights[0],) * (_MAX_NEXT - len(weights)))
    y = (*outs, *(outs[0],) * (_MAX_NEXT - len(outs)))
    norm_chain_kernel[(rows,)](
        x, x, x, x, x, *w, *y, 0, width, eps,
        PARTS=1, HAS_WEIGHT=False, HAS_RESIDUAL=False, HAS_SCALE=False, STORE_SUM=False,
        NUM_NEXT=len(outs), BLOCK=next_power_of_2(width), **options(_warps(width)),
    )  # fmt: skip
    return outs


def sum_norm(x, weight, eps):
    """Parts ``x`` [S, T, D] float32 -> their sum in the dtype of ``weight``, and its norm."""
    parts, rows, width = x.shape
    _check_rows(x, width)
    _check_rows(weight, width)
    total = torch.empty((rows, width), dtype=weight.dtype, device=x.device)
    y = torch.empty_like(total)
    norm_chain_kernel[(rows,)](
        x, total, weight, weight, total, weight, weight, weight, y, y, y, rows * width, width, eps,
        PARTS=parts, HAS_WEIGHT=False, HAS_RESIDUAL=False, HAS_SCALE=False, STORE_SUM=True, NUM_NEXT=1,
        BLOCK=next_power_of_2(width), **options(_warps(width)),
    )  # fmt: skip
    return total, y


def _check_rows(x, width):
    if x.shape[-1] != width or not x.is_contiguous():
        raise ValueError(
            f"a norm of width {width} needs contiguous tensors of that width, got {list(x.shape)} {x.stride()}"
        )
