"""Gated GELU and the soft cap of logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sgl_kernel.cpu_ops import usable
from sgl_kernel.launch import triton_kernels


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``gate_up`` [T, 2 * I], gate half first -> gelu_tanh(gate) * up, [T, I]."""
    if gate_up.is_cuda:
        return gelu_tanh_mul(*gate_up.chunk(2, dim=-1))
    ops = usable(gate_up) if gate_up.dim() == 2 else None
    if ops is None:
        return gelu_tanh_and_mul_torch(gate_up)
    rows, both = gate_up.shape
    width = both // 2
    y = torch.empty((rows, width))
    gate = gate_up.data_ptr()
    ops.sgl_gelu_mul(gate, gate + 4 * width, y.data_ptr(), rows, width, both, both)
    return y


def gelu_tanh_mul(gate: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """gelu_tanh(gate) * factor, both [T, I]; the rows of ``factor`` may lie apart."""
    if gate.is_cuda:
        return triton_kernels("activation").gelu_tanh_mul(gate, factor)
    if factor.dtype is torch.float32 and factor.is_cpu and factor.stride(1) == 1:
        ops = usable(gate)
        if ops is not None:
            y = torch.empty_like(gate)
            rows, width = gate.shape
            ops.sgl_gelu_mul(gate.data_ptr(), factor.data_ptr(), y.data_ptr(), rows, width, width, factor.stride(0))
            return y
    return F.gelu(gate, approximate="tanh") * factor


def softcap_(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """``cap * tanh(logits / cap)`` in place; any shape."""
    if logits.is_cuda:
        return triton_kernels("activation").softcap_(logits, cap)
    ops = usable(logits)
    if ops is None:
        return logits.div_(cap).tanh_().mul_(cap)
    ops.sgl_softcap(logits.data_ptr(), logits.numel(), cap)
    return logits


def gelu_tanh_and_mul_torch(gate_up: torch.Tensor) -> torch.Tensor:
    """The reference of ``gelu_tanh_and_mul``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up
