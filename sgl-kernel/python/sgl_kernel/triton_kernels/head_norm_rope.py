"""Norm, rotation and KV store of all heads of a layer: one head of one row per program."""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from sgl_kernel.triton_kernels.common import ON_GPU, next_power_of_2, options, release_dependents, wait_for_inputs
from sgl_kernel.triton_kernels.norm import sum_parts


@triton.jit
def head_norm_rope_kernel(
    x_ptr, w_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr, loc_ptr, part_stride, num_inputs, value_input, eps,
    PARTS: tl.constexpr, NUM_Q: tl.constexpr, NUM_KV: tl.constexpr, HAS_KV: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (T, NUM_Q + 2 NUM_KV): queries, then keys, then values. Values are normed without weight, not rotated.

    ``x`` comes from the kernel before; all else must be older.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    j = tl.arange(0, BLOCK)
    mask = j < HALF
    is_value = head >= NUM_Q + NUM_KV
    source = tl.where(is_value, value_input + head - NUM_Q - NUM_KV, head)
    x = x_ptr + (row * num_inputs + source) * (2 * HALF)
    weight_row = w_ptr + tl.where(is_value, 0, head) * (2 * HALF)
    w0 = tl.where(is_value, 1.0, tl.load(weight_row + j, mask=mask, other=0.0).to(tl.float32))
    w1 = tl.where(is_value, 1.0, tl.load(weight_row + HALF + j, mask=mask, other=0.0).to(tl.float32))
    table = row * (2 * HALF) + j
    cos = tl.load(cos_ptr + table, mask=mask, other=0.0)
    sin = tl.load(sin_ptr + HALF + table, mask=mask, other=0.0)
    if HAS_KV:
        slot = tl.load(loc_ptr + row)
    wait_for_inputs()
    release_dependents()
    a = sum_parts(x, part_stride, j, mask, PARTS)
    b = sum_parts(x, part_stride, HALF + j, mask, PARTS)
    scale = tl.rsqrt((tl.sum(a * a, axis=0) + tl.sum(b * b, axis=0)) / (2 * HALF) + eps)
    dtype = q_ptr.dtype.element_ty
    a = (a * scale * w0).to(dtype).to(tl.float32)
    b = (b * scale * w1).to(dtype).to(tl.float32)
    cos = tl.where(is_value, 1.0, cos.to(tl.float32))
    sin = tl.where(is_value, 0.0, sin.to(tl.float32))
    first, second = a * cos - b * sin, b * cos + a * sin
    out = q_ptr + (row * NUM_Q + head) * (2 * HALF) + j
    is_query = j < tl.where(head < NUM_Q, HALF, 0)
    tl.store(out, first.to(dtype), mask=is_query)
    tl.store(out + HALF, second.to(dtype), mask=is_query)
    if HAS_KV:
        kv_head = (head + NUM_KV - NUM_Q) % NUM_KV
        offset = (slot * NUM_KV + kv_head) * (2 * HALF) + j
        kv_dtype = k_ptr.dtype.element_ty
        is_key = j < tl.where((head >= NUM_Q) & (head < NUM_Q + NUM_KV), HALF, 0)
        tl.store(k_ptr + offset, first.to(kv_dtype), mask=is_key)
        tl.store(k_ptr + offset + HALF, second.to(kv_dtype), mask=is_key)
        of_value = j < tl.where(is_value, HALF, 0)
        tl.store(v_ptr + offset, first.to(kv_dtype), mask=of_value)
        tl.store(v_ptr + offset + HALF, second.to(kv_dtype), mask=of_value)


def head_norm_rope(heads, weights, cos, sin, num_kv, eps, k_buf=None, v_buf=None, loc=None):
    """See ``sgl_kernel.head_norm_rope``. Without buffers only queries come (``num_kv`` 0)."""
    rows, num_inputs, width = heads.shape[-3:]
    parts = heads.shape[0] if heads.dim() == 4 else 1
    num_q = weights.shape[0] - num_kv
    _check(heads, weights, cos, sin, width, num_kv, num_q, k_buf, v_buf, loc)
    q = torch.empty((rows, num_q, width), dtype=cos.dtype, device=heads.device)
    buffers = (q, q, q) if num_kv == 0 else (k_buf, v_buf, loc)
    head_norm_rope_kernel[(rows, num_q + 2 * num_kv)](
        heads, weights, cos, sin, q, *buffers, rows * num_inputs * width, num_inputs, num_inputs - num_kv, eps,
        PARTS=parts, NUM_Q=num_q, NUM_KV=max(1, num_kv), HAS_KV=num_kv > 0, HALF=width // 2,
        BLOCK=next_power_of_2(width // 2),
        **options(1 if width <= 256 else 2),
    )  # fmt: skip
    return q


def _check(heads, weights, cos, sin, width, num_kv, num_q, k_buf, v_buf, loc):
    rows = heads.shape[-3]
    tables = cos.shape[-1] == width and sin.shape[-1] == width and cos.shape[0] == sin.shape[0] == rows
    if weights.shape[1] != width or not tables or num_q < 1:
        raise ValueError(
            f"heads {list(heads.shape)} need norm weights [heads, {width}] and tables [{rows}, 1, {width}], got "
            f"{list(weights.shape)}, {list(cos.shape)} and {list(sin.shape)}"
        )
    for name, tensor in {"heads": heads, "weights": weights, "cos": cos, "sin": sin}.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, its strides are {tensor.stride()}")
    if num_kv == 0:
        return
    if k_buf is None or v_buf is None or loc is None:
        raise ValueError(f"{num_kv} KV heads need key and value buffers and slots to store them in")
    expected = (num_kv, width)
    fits = k_buf.shape[1:] == expected and v_buf.shape == k_buf.shape and loc.shape == (rows,)
    if not fits or not k_buf.is_contiguous() or not v_buf.is_contiguous() or loc.dtype is not torch.int64:
        raise ValueError(
            f"KV buffers must be contiguous [slots, {num_kv}, {width}] and loc [{rows}] int64, got "
            f"{list(k_buf.shape)}, {list(v_buf.shape)} and {list(loc.shape)} {loc.dtype}"
        )


@triton.jit
def rope_tables_kernel(pos_ptr, freq_ptr, cos_ptr, sin_ptr, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """Both halves of the cosine, and the sine with its first half negated. Grid (T,)."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK)
    mask = j < HALF
    freq = tl.load(freq_ptr + j, mask=mask, other=0.0)
    wait_for_inputs()
    release_dependents()
    angle = tl.load(pos_ptr + row).to(tl.float32) * freq
    if ON_GPU:  # the approximate instructions lose all digits at large angles
        cos, sin = libdevice.cos(angle), libdevice.sin(angle)
    else:
        cos, sin = tl.cos(angle), tl.sin(angle)
    dtype = cos_ptr.dtype.element_ty
    out = row * (2 * HALF) + j
    tl.store(cos_ptr + out, cos.to(dtype), mask=mask)
    tl.store(cos_ptr + out + HALF, cos.to(dtype), mask=mask)
    tl.store(sin_ptr + out, (-sin).to(dtype), mask=mask)
    tl.store(sin_ptr + out + HALF, sin.to(dtype), mask=mask)


def rope_tables(positions, inv_freq, dtype):
    """``positions`` [T] int64, ``inv_freq`` [D/2] float32 -> cos and signed sin [T, 1, D]."""
    half, rows = inv_freq.shape[0], positions.shape[0]
    cos = torch.empty((rows, 1, 2 * half), dtype=dtype, device=positions.device)
    sin = torch.empty_like(cos)
    rope_tables_kernel[(rows,)](
        positions, inv_freq, cos, sin, HALF=half, BLOCK=next_power_of_2(half), **options(1 if half <= 128 else 2)
    )
    return cos, sin
