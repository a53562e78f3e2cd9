"""What is added without the library, and that this is given up where it does not add as it should."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sglang.srt.distributed.custom_all_reduce import CustomAllReduce, _trial
from sglang.srt.distributed.parallel_state import TpGroup

NUM_RANKS = 3


class Sums(CustomAllReduce):
    """Adds what ``parts`` says the ranks have."""

    def __init__(self, parts: Callable[[torch.Tensor], torch.Tensor], order: tuple[int, ...] = (0, 1, 2)) -> None:
        super().__init__(torch.empty(4096, dtype=torch.uint8), "ranks")
        self._parts = parts
        self._order = order

    def total(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = self._parts(x)[list(self._order)].unbind(0)
        for other in others:
            first = first + other
        return first


def trials(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([_trial(rank, len(x), x.dtype) for rank in range(NUM_RANKS)])


def test_small_tensors_of_two_types_are_taken() -> None:
    sums = Sums(trials)
    for dtype in (torch.float32, torch.bfloat16):
        assert sums.takes(torch.empty(1, 8, dtype=dtype))
        assert sums.takes(torch.empty(4096 // dtype.itemsize, dtype=dtype))
        assert not sums.takes(torch.empty(4096 // dtype.itemsize + 8, dtype=dtype))
        assert not sums.takes(torch.empty(3, 1, dtype=dtype))
        assert not sums.takes(torch.empty(0, 8, dtype=dtype))
    assert not sums.takes(torch.empty(1, 8, dtype=torch.float16))
    assert not sums.takes(torch.empty(1, 8, dtype=torch.int64))


def test_the_operator_exists_and_keeps_shapes() -> None:
    """What it computes takes GPUs: test/gpu."""
    sums = CustomAllReduce(torch.empty(4096, dtype=torch.uint8, device="meta"), "ranks")
    for x in (torch.empty(2, 16, device="meta"), torch.empty(5, 8, dtype=torch.bfloat16, device="meta")):
        total = sums.total(x)
        assert (total.shape, total.dtype) == (x.shape, x.dtype)


@pytest.mark.parametrize(("order", "right"), [((0, 1, 2), True), ((2, 0, 1), False), ((0, 1), False)])
def test_a_trial_tells_the_order_of_ranks(order: tuple[int, ...], right: bool) -> None:
    for rank in range(NUM_RANKS):
        assert Sums(trials, order).is_right(rank, trials) is right


def test_an_operator_that_fails_is_not_right() -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such kernel")

    asked = []

    def gather(x: torch.Tensor) -> torch.Tensor:
        asked.append(len(x))
        return trials(x)

    assert not Sums(fail).is_right(0, gather)
    assert len(asked) == 6, "the other ranks wait for every exchange"


def test_a_group_adds_what_is_small_that_way() -> None:
    def never(x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("small tensors are not exchanged")

    small = Sums(lambda x: torch.stack((x, 10 * x, 100 * x)))
    group = TpGroup(0, NUM_RANKS, small_sums=small)
    group.gather = never  # type: ignore[method-assign]
    x = torch.arange(16.0).view(2, 8)
    torch.testing.assert_close(group.total(x), 111 * x)
    torch.testing.assert_close(group.pick(x), 111 * x)
    torch.testing.assert_close(group.sum(torch.stack((x, x))), 222 * x[None])
    with pytest.raises(AssertionError, match="not exchanged"):
        group.total(torch.ones(4096))
