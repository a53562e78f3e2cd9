"""Paged attention: Triton kernels under the interpreter against the reference in float64, and row by row, bitwise."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fixtures.attention_cases import Problem
from fixtures.interpreter import interpreted
from sgl_kernel.launch import triton_kernels
from sgl_kernel.paged_attention import HeadKind

pytestmark = interpreted


def _kind(heads: int, kv_heads: int, width: int, window: int | None, dtype: torch.dtype = torch.float32) -> HeadKind:
    return HeadKind(heads, kv_heads, width, dtype, window)


def _run(problem: Problem) -> torch.Tensor:
    """The Triton launchers, with everything they allocate poisoned."""
    module = triton_kernels("attention_extend" if problem.rows.is_extend else "paged_attention")
    plan, attend = (
        (module.plan_extend, module.attend_extend)
        if problem.rows.is_extend
        else (module.plan_decode, module.attend_decode)
    )
    work = plan(problem.rows, problem.kind)
    return attend(problem.q, problem.key, problem.value, problem.rows, problem.kind, work)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """New tensors are full of NaN, or of the largest integer."""
    with torch.utils.deterministic.fill_uninitialized_memory_set(True):
        yield


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
