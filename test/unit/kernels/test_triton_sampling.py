"""Sampling and acceptance: Triton kernels under the interpreter against their references."""

from __future__ import annotations

import pytest
import torch

from fixtures.interpreter import interpreted
from fixtures.sampling_cases import REQUESTS, Controls, check_accept, check_kept, check_tokens, choose, make_logits
from sgl_kernel.launch import triton_kernels

VOCAB = 2100  # two blocks, the second nearly empty

pytestmark = interpreted


@pytest.fixture(autouse=True)
def fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole block at a time: the interpreter is slow by the operation, not by the element."""
    filters = triton_kernels("sampling_filters")
    monkeypatch.setattr(filters, "CHUNK", filters.BLOCK)


@pytest.mark.parametrize("step", [0.0, 0.5])
def test_mixed_requests(step: float) -> None:
    check_tokens(make_logits(len(REQUESTS), VOCAB, torch.float32, "cpu", step), REQUESTS)


def test_rows_of_a_verified_block() -> None:
    requests = (Controls(), Controls(0.7, min_p=0.05), Controls(greedy=True))
    check_tokens(make_logits(3 * 4, VOCAB, torch.float16, "cpu", 0.0), requests)


@pytest.mark.parametrize(
    "request_", [Controls(top_k=3), Controls(top_p=0.5), Controls(2.0, top_k=6, top_p=0.4), Controls(min_p=0.5)]
)
def test_what_filters_keep(request_: Controls) -> None:
    """Ten likely tokens, of which several are equal at any threshold, among two thousand unlikely ones."""
    row = torch.full((VOCAB,), -60.0)
    row[[3, 50, 700, 1500, 2047, 2048, 2060, 2080, 2090, 2099]] = torch.tensor([2.0, 1, 1, 1, 1.5, 1.5, 1, 1, 1, 2.0])
    check_kept(request_, row, draws=20)


def test_best_logit_of_equal_ones_is_the_first() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, [2050, 2070]] = 1.0
    assert choose(logits, torch.tensor([0, 1]), (Controls(greedy=True), Controls(greedy=True))).tolist() == [2050, 0]


@pytest.mark.parametrize("nodes", [1, 2, 5, 8])
def test_accept_and_gather(nodes: int) -> None:
    check_accept("cpu", batch=7, nodes=nodes, width=1100, dtype=torch.float32)


def test_wrong_inputs_are_named() -> None:
    choose_tokens, accept = triton_kernels("sampling").choose_tokens, triton_kernels("spec_tree").accept_and_gather
    logits, ones, ints = torch.zeros(2, 8), torch.ones(2), torch.ones(2, dtype=torch.int64)
    greedy = torch.zeros(2, dtype=torch.bool)
    with pytest.raises(ValueError, match="top_ks must be contiguous"):
        choose_tokens(logits, greedy, ones, ints, ints, ones, None, None)
    with pytest.raises(ValueError, match="2 rows of logits"):
        choose_tokens(logits, greedy, ones, ints, ints[:1], None, None, None)
    with pytest.raises(ValueError, match="hidden must be contiguous"):
        accept(ints[:, None], ints[:, None], torch.zeros(3, 4), None)
    with pytest.raises(ValueError, match="target_tokens must be int64"):
        accept(ints[:, None], ints[:, None].int(), torch.zeros(2, 4), None)
