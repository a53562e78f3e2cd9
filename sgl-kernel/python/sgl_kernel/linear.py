"""Products with a weight stored [N, K], for any number of rows.

*Parts*: where a consumer sums anyway, a product may be left as ``[S, T, N]`` float32, to be summed over S in order.
``[T, N]`` is a product in one part. S depends on the weight's shape only, so a row's sum is formed alike whatever the
rows beside it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sgl_kernel.activation import gelu_tanh_and_mul, gelu_tanh_mul
from sgl_kernel.launch import triton_kernels

# more rows than this are bound by arithmetic, and the vendor's library is faster
MAX_SKINNY_ROWS = 64


def linear_parts(x: torch.Tensor, weight: torch.Tensor, *, row_invariant: bool = False) -> torch.Tensor:
    """``x`` [T, K], ``weight`` [N, K] -> parts [S, T, N] float32, or [T, N] in the dtype of ``x``.

    ``row_invariant``: a row's result does not depend on T.
    """
    if x.is_cuda and (row_invariant or x.shape[0] <= MAX_SKINNY_ROWS):
        return triton_kernels("linear").linear_parts(x, weight)
    return F.linear(x, weight)


def linear(x: torch.Tensor, weight: torch.Tensor, *, row_invariant: bool = False) -> torch.Tensor:
    """``x`` [T, K], ``weight`` [N, K] -> [T, N] in the dtype of ``x``; for outputs wide enough not to be split."""
    if x.is_cuda and (row_invariant or x.shape[0] <= MAX_SKINNY_ROWS):
        return triton_kernels("linear").linear(x, weight)
    return F.linear(x, weight)


def gate_up_gelu(x: torch.Tensor, weight: torch.Tensor, *, row_invariant: bool = False) -> torch.Tensor:
    """``x`` [T, K], ``weight`` [2 I, K], gate rows first -> gelu_tanh(gate) * up, [T, I]."""
    if x.is_cuda and (row_invariant or x.shape[0] <= MAX_SKINNY_ROWS):
        return triton_kernels("linear").gate_up_gelu(x, weight)
    return gelu_tanh_and_mul(F.linear(x, weight))


def gated_projection(gate: torch.Tensor, factor: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``gate`` [S, T, P] parts or [T, P], ``factor`` [T, P], ``weight`` [N, P] -> (gelu_tanh(gate) * factor) W^T.

    As parts [1, T, N] float32, or [T, N].
    """
    if gate.dim() == 3 and gate.is_cuda:
        return triton_kernels("embedding").gated_projection(gate, factor, weight)
    if gate.dim() == 3:
        return gated_projection_torch(gate, factor, weight)
    return F.linear(gelu_tanh_mul(gate, factor), weight)


def gated_projection_torch(gate: torch.Tensor, factor: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The reference of ``gated_projection`` for parts, -> [T, N]."""
    gate = gate.sum(0)
    return F.linear((F.gelu(gate, approximate="tanh") * factor).to(weight.dtype), weight)
