"""Mixture of experts on a GPU, at the shape of 26B-A4B."""

from __future__ import annotations

import pytest
import torch

from fixtures.moe_cases import Experts, MoEShape, check_align, check_pairs, check_route, check_router, check_tail

REAL = MoEShape(experts=128, top_k=8, hidden=2816, width=704)
SMALL = MoEShape(experts=16, top_k=3, hidden=72, width=40)

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("skew", [0.0, 0.5])
@pytest.mark.parametrize("rows", [1, 4, 16, 17, 32, 33, 128, 300])
def test_experts_of_each_pair(rows: int, skew: float) -> None:
    check_pairs(REAL, torch.bfloat16, "cuda", rows, skew)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 7, 40, 2000])
def test_experts_at_odd_widths(rows: int, dtype: torch.dtype) -> None:
    check_pairs(SMALL, dtype, "cuda", rows, 0.0)


def test_rows_do_not_depend_on_the_tile_they_fall_into() -> None:
    """Bitwise, over every way of grouping; and 100 runs agree."""
    layer = Experts(REAL, torch.bfloat16, "cuda")
    x, ids = layer.randn(2048, REAL.hidden), layer.routing(2048)
    whole = layer.pairs(x, ids)
    for rows in (1, 2, 4, 8, 16, 20, 32, 33, 64, 128, 256, 512, 1024):
        assert torch.equal(layer.pairs(x[:rows], ids[:rows]), whole[:rows]), rows
    for _ in range(100):
        assert torch.equal(layer.pairs(x[:4], ids[:4]), whole[:4])


@pytest.mark.parametrize("rows", [40, 512, 8192])
def test_grouping_is_stable(rows: int) -> None:
    check_align(Experts(MoEShape(128, 8, 16, 16), torch.float32, "cuda").routing(rows, skew=0.1), 128)


@pytest.mark.parametrize("rows", [1, 16, 1000])
def test_routing(rows: int) -> None:
    check_route(REAL, "cuda", rows, parts=4)
    check_route(MoEShape(experts=3, top_k=1, hidden=1, width=1), "cuda", rows, parts=1)
    check_router(REAL, torch.float32, "cuda", rows)
    check_router(REAL, torch.bfloat16, "cuda", max(rows, 16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 300])
def test_end_of_a_sparse_layer(rows: int, dtype: torch.dtype) -> None:
    check_tail(REAL, dtype, "cuda", rows, parts=4)
