"""Sampling and acceptance on a GPU, over the full vocabulary."""

from __future__ import annotations

import pytest
import torch

from fixtures.sampling_cases import REQUESTS, Controls, check_accept, check_kept, check_tokens, choose, make_logits

VOCAB = 262144
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("vocab", [VOCAB, 1000, 5003])
def test_mixed_requests(vocab: int, width: int, dtype: torch.dtype) -> None:
    check_tokens(make_logits(len(REQUESTS) * width, vocab, dtype, "cuda", 0.0), REQUESTS)


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_each_request_by_itself(request_: Controls) -> None:
    """A control that nobody uses is not even launched."""
    check_tokens(make_logits(40, VOCAB, torch.bfloat16, "cuda", 0.0), (request_,))


@pytest.mark.parametrize(
    "request_",
    [Controls(top_k=64), Controls(top_p=0.6), Controls(2.0, top_k=300, top_p=0.7), Controls(min_p=0.3)],
    ids=str,
)
def test_what_filters_keep(request_: Controls) -> None:
    """A few hundred likely tokens, many of them equal, among unlikely ones."""
    row = torch.full((VOCAB,), -60.0, device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    likely = torch.randperm(VOCAB, generator=generator, device="cuda")[:500]
    row[likely] = (torch.rand(500, generator=generator, device="cuda") * 8).round() / 4
    check_kept(request_, row, draws=20_000)


def test_a_hundred_runs_agree() -> None:
    logits = make_logits(len(REQUESTS), VOCAB, torch.bfloat16, "cuda", 0.0)
    positions = torch.arange(len(logits), device="cuda")
    first = choose(logits, positions, REQUESTS)
    assert all(torch.equal(choose(logits, positions, REQUESTS), first) for _ in range(100))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1536, 2560, 2816, 3840, 5376, 96])
def test_accept_and_gather(width: int, dtype: torch.dtype) -> None:
    for batch in (1, 9, 130):
        for nodes in (1, 4, 6, 16):
            check_accept("cuda", batch, nodes, width, dtype)
