"""Mixture of experts: Triton kernels under the interpreter against their references."""

from __future__ import annotations

import pytest
import torch

from fixtures.interpreter import interpreted
from fixtures.moe_cases import Experts, MoEShape, check_align, check_pairs, check_route, check_router, check_tail
from sgl_kernel.launch import triton_kernels

F32, F16 = torch.float32, torch.float16
SMALL = MoEShape(experts=16, top_k=3, hidden=72, width=40)
FEW = MoEShape(experts=5, top_k=2, hidden=64, width=24)

pytestmark = interpreted


@pytest.mark.parametrize("skew", [0.0, 2.0])
@pytest.mark.parametrize("rows", [1, 6, 32, 45])
def test_experts_of_each_pair(rows: int, skew: float) -> None:
    """1: a tile per pair; 6, 32: a tile per expert; 45: sorted by expert, with experts that fill several tiles."""
    check_pairs(SMALL if rows < 32 else FEW, F32, "cpu", rows, skew)


@pytest.mark.parametrize("rows", [3, 40])
def test_experts_in_half_precision(rows: int) -> None:
    check_pairs(FEW, F16, "cpu", rows, 0.0)


def test_grouping_is_stable() -> None:
    check_align(Experts(SMALL, F32, "cpu").routing(70, skew=0.3), SMALL.experts)
    check_align(torch.full((5, 1), 3), 4)


@pytest.mark.parametrize(("rows", "parts"), [(1, 4), (5, 1)])
def test_routing(rows: int, parts: int) -> None:
    check_route(SMALL, "cpu", rows, parts)
    check_route(MoEShape(experts=3, top_k=1, hidden=1, width=1), "cpu", rows, parts)


def test_equally_likely_experts_are_taken_by_lower_id() -> None:
    logits = torch.tensor([[0.0, 2.0, -1.0, 2.0, 2.0, 0.0, 1.0, 1.0]])
    weights, ids = triton_kernels("moe_router").route(logits, torch.ones(8), 4)
    assert ids.tolist() == [[1, 3, 4, 6]]
    assert weights[0, 0] == weights[0, 1] == weights[0, 2] > weights[0, 3] > 0
    assert float(weights.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("rows", [1, 18])
def test_router_with_its_norm(rows: int) -> None:
    check_router(MoEShape(experts=20, top_k=3, hidden=300, width=1), F32, "cpu", rows)


@pytest.mark.parametrize("dtype", [F32, F16])
def test_end_of_a_sparse_layer(dtype: torch.dtype) -> None:
    check_tail(SMALL, dtype, "cpu", rows=3, parts=2)


def test_wrong_inputs_are_named() -> None:
    kernels = triton_kernels("moe")
    layer = Experts(FEW, F32, "cpu")
    x, ids = layer.randn(2, FEW.hidden), layer.routing(2)
    with pytest.raises(ValueError, match=r"gate_up \[E, 2M, D\]"):
        kernels.expert_pairs(x, ids, layer.down, layer.down)
    with pytest.raises(ValueError, match="x must be contiguous"):
        kernels.expert_pairs(layer.randn(FEW.hidden, 2).T, ids, layer.gate_up, layer.down)
    with pytest.raises(ValueError, match="one dtype"):
        kernels.expert_pairs(x.half(), ids, layer.gate_up, layer.down)
    with pytest.raises(ValueError, match="do not fit 5 experts"):
        triton_kernels("moe_router").route(torch.zeros(2, 5), torch.ones(4), 2)
    with pytest.raises(ValueError, match="weights"):
        kernels.combine(layer.randn(2, 3, 8), torch.ones(2, 2))
