"""Gated GELU and the soft cap over many elements, where they are not part of a product."""

import torch
import triton
import triton.language as tl

from sgl_kernel.triton_kernels.common import cdiv, options, release_dependents, wait_for_inputs
from sgl_kernel.triton_kernels.linear import gelu_tanh

_BLOCK = 1024


@triton.jit
def tanh(x):
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0.0, -t, t)


@triton.jit
def gelu_mul_kernel(gate_ptr, factor_ptr, y_ptr, width, gate_stride, factor_stride, BLOCK: tl.constexpr):
    """y = gelu_tanh(gate) * factor. Grid (T, column blocks)."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    wait_for_inputs()
    release_dependents()
    gate = tl.load(gate_ptr + row * gate_stride + cols, mask=mask, other=0.0).to(tl.float32)
    factor = tl.load(factor_ptr + row * factor_stride + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * width + cols, (gelu_tanh(gate) * factor).to(y_ptr.dtype.element_ty), mask=mask)


def gelu_tanh_mul(gate, factor):
    """``gate``, ``factor`` [T, I] with contiguous columns -> [T, I]."""
    rows, width = gate.shape
    if factor.shape != gate.shape or gate.stride(1) != 1 or factor.stride(1) != 1:
        raise ValueError(
            f"gate {list(gate.shape)} and factor {list(factor.shape)} must agree and be contiguous in a row"
        )
    y = torch.empty((rows, width), dtype=gate.dtype, device=gate.device)
    gelu_mul_kernel[(rows, cdiv(width, _BLOCK))](
        gate, factor, y, width, gate.stride(0), factor.stride(0), BLOCK=_BLOCK, **options(4)
    )
    return y


@triton.jit
def softcap_kernel(x_ptr, size, cap, BLOCK: tl.constexpr):
    """x = cap * tanh(x / cap) in place."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs()
    release_dependents()
    x = tl.load(x_ptr + at, mask=at < size, other=0.0)
    tl.store(x_ptr + at, (cap * tanh(x.to(tl.float32) / cap)).to(x.dtype), mask=at < size)


def softcap_(logits, cap):
    """In place, any contiguous shape."""
    if not logits.is_contiguous():
        raise ValueError(f"the soft cap works on contiguous logits, got strides {logits.stride()}")
    softcap_kernel[(cdiv(logits.numel(), _BLOCK),)](logits, logits.numel(), cap, BLOCK=_BLOCK, **options(4))
    return logits
