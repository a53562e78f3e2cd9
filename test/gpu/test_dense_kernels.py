"""Dense Triton kernels on a GPU, on the shapes of the five model sizes."""

from __future__ import annotations

import pytest
import torch

from fixtures.dense_cases import CASES, Inputs, Shape
from sgl_kernel.launch import triton_kernels

# hidden, MLP, query heads, KV heads, head width, per-layer width, layers
SIZES = {
    "e2b": (1536, 6144, 8, 1, 256, 256, 35),
    "e4b": (2560, 10240, 8, 2, 512, 256, 42),
    "12b": (3840, 15360, 16, 8, 256, 256, 2),
    "26b": (2816, 2112, 16, 2, 512, 256, 2),
    "31b": (5376, 21504, 32, 16, 256, 256, 2),
    "assistant": (256, 2048, 4, 1, 256, 256, 2),
    "tiny": (96, 80, 3, 1, 32, 16, 3),
}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}

pytestmark = pytest.mark.cuda


def _error(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    wanted = wanted.double()
    return float((actual.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_against_reference(name: str, size: str, dtype: torch.dtype) -> None:
    module, case = CASES[name]
    for rows in (1, 5, 16, 47, 130):
        got, expected = case(triton_kernels(module), Inputs(dtype, "cuda", seed=rows), Shape(rows, *SIZES[size]))
        for actual, wanted in zip(got, expected, strict=True):
            assert _error(actual, wanted) < TOLERANCE[dtype], (rows, actual.shape)


@pytest.mark.parametrize("size", SIZES)
def test_rows_do_not_depend_on_each_other(size: str) -> None:
    """Bitwise: the first rows of a large product are those of a small one; 100 runs agree."""
    hidden, mlp = SIZES[size][:2]
    make = Inputs(torch.bfloat16, "cuda", seed=1)
    x, w, gate_up = make.randn(300, hidden), make.weight(mlp, hidden), make.weight(2 * mlp, hidden)
    kernel = triton_kernels("linear")
    whole = kernel.linear_parts(x, w), kernel.gate_up_gelu(x, gate_up)
    for rows in (1, 2, 4, 16, 17, 32, 64, 100, 128, 200):
        part = kernel.linear_parts(x[:rows], w), kernel.gate_up_gelu(x[:rows], gate_up)
        assert torch.equal(part[0], whole[0][:, :rows]), rows
        assert torch.equal(part[1], whole[1][:rows]), rows
    for _ in range(100):
        assert torch.equal(kernel.linear_parts(x[:4], w), whole[0][:, :4])


def test_wrong_inputs_are_named() -> None:
    kernel = triton_kernels("linear")
    x = torch.zeros(2, 64, device="cuda")
    with pytest.raises(ValueError, match="they must agree"):
        kernel.linear(x, torch.zeros(64, 64, device="cuda", dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="contiguous"):
        kernel.linear(x, torch.zeros(64, 128, device="cuda")[:, ::2])
