"""Dense Triton kernels under the interpreter, against their torch references."""

from __future__ import annotations

import pytest
import torch

from fixtures.dense_cases import CASES, Inputs, Shape
from fixtures.interpreter import interpreted

SHAPES = [
    Shape(1, 96, 80, 4, 2, 32),
    Shape(5, 128, 64, 3, 1, 64, per_layer=16, layers=2),
    Shape(33, 70, 48, 2, 2, 16, per_layer=256),
]


@interpreted
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"T{shape.rows}D{shape.hidden}")
@pytest.mark.parametrize("name", CASES)
def test_interpreted(name: str, shape: Shape) -> None:
    from sgl_kernel.launch import triton_kernels

    module, case = CASES[name]
    got, expected = case(triton_kernels(module), Inputs(torch.float32, "cpu", seed=shape.rows), shape)
    for actual, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(actual.float(), wanted.float(), atol=2e-5, rtol=2e-5)
