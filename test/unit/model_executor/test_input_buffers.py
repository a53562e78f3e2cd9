"""Buffers of programs: one block of memory, views of fewer rows, and padding as declared."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from sglang.srt.model_executor.input_buffers import ROWS, InputBuffers, buffer

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, eq=False)
class Example(InputBuffers):
    ids: torch.Tensor = buffer(ROWS, dtype=torch.int64, pad="nobody")
    flags: torch.Tensor = buffer(ROWS, dtype=torch.bool, pad=True)
    states: torch.Tensor = buffer("layers", ROWS, "width", dtype=None, pad=-1.5)


@dataclass(frozen=True, slots=True, eq=False)
class Longer(Example):
    more: torch.Tensor = buffer(ROWS, "width", dtype=torch.int32, pad=7)


SIZES = {ROWS: 5, "layers": 2, "width": 3, "nobody": 99}


@pytest.fixture(params=[Example, Longer])
def buffers(request: pytest.FixtureRequest) -> Example:
    return request.param.allocate(SIZES, torch.bfloat16, CPU)


def test_fields_have_the_declared_shapes_types_and_pads(buffers: Example) -> None:
    assert buffers.ids.shape == (5,) and buffers.ids.dtype is torch.int64 and buffers.ids.tolist() == [99] * 5
    assert buffers.flags.shape == (5,) and buffers.flags.all()
    assert buffers.states.shape == (2, 5, 3) and buffers.states.dtype is torch.bfloat16
    assert (buffers.states == -1.5).all()
    if isinstance(buffers, Longer):
        assert buffers.more.shape == (5, 3) and (buffers.more == 7).all()


def test_fields_lie_in_one_block_and_do_not_overlap(buffers: Example) -> None:
    fields = [getattr(buffers, name) for name in type(buffers).specs()]
    start, end = buffers.block.data_ptr(), buffers.block.data_ptr() + buffers.block.numel()
    spans = sorted((field.data_ptr(), field.data_ptr() + field.numel() * field.itemsize) for field in fields)
    assert spans[0][0] >= start and spans[-1][1] <= end
    assert all(before[1] <= after[0] for before, after in zip(spans, spans[1:], strict=False))
    other = type(buffers).allocate(SIZES, torch.bfloat16, CPU)
    for field in fields:
        field.copy_(torch.arange(field.numel()).view(field.shape) % 2)
    other.block.copy_(buffers.block)
    assert all(torch.equal(getattr(other, name), getattr(buffers, name)) for name in type(buffers).specs())


def test_fewer_rows_are_the_same_memory(buffers: Example) -> None:
    few = buffers.first(2)
    assert few is buffers.first(2) and few is not buffers.first(3)
    assert few.ids.shape == (2,) and few.states.shape == (2, 2, 3)
    few.ids.fill_(4)
    few.states.fill_(0.0)
    assert buffers.ids.tolist() == [4, 4, 99, 99, 99]
    assert buffers.states[:, 2:].eq(-1.5).all() and not buffers.states[:, :2].any()


def test_padding_fills_the_rows_it_is_given(buffers: Example) -> None:
    buffers.ids.copy_(torch.arange(5))
    buffers.states.zero_()
    buffers.first(4).pad(2)
    assert buffers.ids.tolist() == [0, 1, 99, 99, 4]
    assert [bool(row.any()) for row in buffers.states.unbind(1)] == [False, False, True, True, False]
    buffers.pad(0, 1)
    assert buffers.ids.tolist() == [99, 1, 99, 99, 4]
