"""The frame of a decode step: Triton kernels under the interpreter against their references, and the references."""

from __future__ import annotations

import pytest
import torch

from fixtures.decode_step_cases import check_advance, check_place
from fixtures.interpreter import interpreted
from sgl_kernel.decode_step import advance_rows, place_rows
from sgl_kernel.launch import triton_kernels


def test_rows_stand_behind_the_committed_tokens() -> None:
    table = torch.arange(40, dtype=torch.int32).view(4, 10) + 100
    positions, slots, kv_lens = place_rows(table, torch.tensor([2, 0]), torch.tensor([3, 7]), 3)
    assert positions.tolist() == [3, 4, 5, 7, 8, 9]
    assert slots.tolist() == [123, 124, 125, 107, 108, 109] and slots.dtype is torch.int64
    assert kv_lens.tolist() == [6, 10]


def test_rows_advance_by_what_was_accepted() -> None:
    draft, target = torch.tensor([[1, 5, 6], [2, 7, 8], [3, 9, 9]]), torch.tensor([[5, 6, 4], [7, 1, 8], [1, 9, 9]])
    committed, bonus = torch.tensor([10, 20, 30]), torch.zeros(3, dtype=torch.int64)
    result, states = torch.zeros(3, 4, dtype=torch.int64), torch.zeros(3, 2)
    hidden = torch.arange(18.0).view(9, 2)
    live = torch.tensor([1, 1, 0])
    advance_rows(draft, target, live, None, None, committed, bonus, result, hidden, states)
    assert committed.tolist() == [13, 22, 30] and bonus.tolist() == [4, 1, 1]
    assert result.tolist() == [[5, 6, 4, 3], [7, 1, 8, 2], [1, 9, 9, 1]]
    assert states.tolist() == [[4, 5], [8, 9], [12, 13]]


def test_plain_decode_is_a_chain_of_one() -> None:
    table = torch.arange(40, dtype=torch.int32).view(4, 10) + 100
    positions, slots, kv_lens = place_rows(table, torch.tensor([2, 0]), torch.tensor([3, 7]), 1)
    assert (positions.tolist(), slots.tolist(), kv_lens.tolist()) == ([3, 7], [123, 107], [4, 8])
    target, committed, bonus = torch.tensor([[5], [6]]), torch.tensor([10, 20]), torch.tensor([8, 9])
    result = torch.zeros(2, 2, dtype=torch.int64)
    advance_rows(bonus[:, None], target, torch.tensor([1, 0]), None, None, committed, bonus, result)
    assert committed.tolist() == [11, 20] and bonus.tolist() == [5, 6] and result.tolist() == [[5, 1], [6, 1]]
    assert positions.tolist() == [3, 7], "positions are a copy"


@interpreted
@pytest.mark.parametrize("num_rows", [1, 3, 6])
def test_place(num_rows: int) -> None:
    for batch in (1, 5):
        check_place("cpu", batch, num_rows)


@interpreted
@pytest.mark.parametrize("num_rows", [1, 2, 5])
@pytest.mark.parametrize("width", [None, 40, 1100])
def test_advance(num_rows: int, width: int | None) -> None:
    for batch in (1, 7):
        check_advance("cpu", batch, num_rows, width)


@interpreted
def test_wrong_tensors_are_named() -> None:
    kernels, long = triton_kernels("decode_step"), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="req_to_token must be"):
        kernels.place_rows(torch.zeros(3, 4), long, long, 2)
    with pytest.raises(ValueError, match=r"committed_lens must be contiguous \[2\] int64"):
        kernels.place_rows(torch.zeros(3, 4, dtype=torch.int32), long, long.int(), 2)
    tokens, result = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="result must be"):
        kernels.advance_rows(tokens, tokens, long, None, None, long, long, tokens, None, None)
    with pytest.raises(ValueError, match="come together"):
        kernels.advance_rows(tokens, tokens, long, None, None, long, long, result, torch.zeros(6, 8), None)
    with pytest.raises(ValueError, match=r"hidden \[6, H\]"):
        kernels.advance_rows(tokens, tokens, long, None, None, long, long, result, torch.zeros(5, 8), torch.zeros(2, 8))
