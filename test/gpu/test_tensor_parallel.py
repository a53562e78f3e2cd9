"""Ranks with a GPU each say what one GPU says alone, with captured graphs, however often they are asked."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from fixtures.make_tiny_gemma4 import KINDS
from fixtures.tp_cases import Case, all_answers, repeated_answers, wrong_sums
from fixtures.tp_ranks import run_ranks
from sglang.srt.utils.env import SGLANG_DEBUG_TP_CONSISTENCY

pytestmark = pytest.mark.cuda
# kernels of many shapes are compiled first
DEADLINE_S = 300.0
ENVIRONMENT = {SGLANG_DEBUG_TP_CONSISTENCY.name: "1"}


def need_gpus(num: int) -> None:
    if torch.cuda.device_count() < num:
        pytest.skip(f"needs {num} CUDA devices")


def cases_of(folder: Path, kind: str) -> tuple[Case, ...]:
    return tuple(
        Case(folder / kind, folder / f"{kind}-assistant", batch, num_steps, device="cuda")
        for batch, num_steps in ((3, 0), (2, 1), (4, 3), (6, 3))
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 4])
def test_gpus_say_what_one_does(size: int, kind: str, tiny_checkpoints: Path) -> None:
    need_gpus(size)
    cases = cases_of(tiny_checkpoints, kind)
    # in a process of its own, so that this one holds no memory of the first card
    (alone,) = run_ranks(1, all_answers, cases, {}, "cuda", DEADLINE_S)
    of_ranks = run_ranks(size, all_answers, cases, ENVIRONMENT, "cuda", DEADLINE_S)
    wrong = [
        f"{dataclasses.replace(case, target=Path(case.target.name), assistant=Path())} rank {rank}: {got} is not {want}"
        for rank, found in enumerate(of_ranks)
        for case, got, want in zip(cases, found, alone, strict=True)
        if got.tokens != want.tokens
    ]
    assert not wrong, "\n".join(wrong)


def test_the_same_every_time(tiny_checkpoints: Path) -> None:
    """Thirty times: three engines, ten times each."""
    need_gpus(2)
    case = dataclasses.replace(cases_of(tiny_checkpoints, "dense_keqv")[2], mixed=True)
    engines = [run_ranks(2, repeated_answers, case, ENVIRONMENT, "cuda", DEADLINE_S) for _ in range(3)]
    assert len({answer.tokens for of_ranks in engines for found in of_ranks for answer in found}) == 1


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("custom", [True, False], ids=["custom", "nccl"])
def test_sums_are_right_in_captured_graphs(custom: bool, size: int) -> None:
    """Ranks are added in their order, by a kernel that reads all ranks' memory and by the library."""
    need_gpus(size)
    found = run_ranks(size, wrong_sums, "cuda", {}, "cuda", custom_all_reduce=custom)
    assert [uses for uses, _ in found] == [custom] * size
    assert not any(wrong for _, wrong in found), found
