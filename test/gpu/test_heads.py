"""Output heads on a GPU, at the widths of all models and assistants."""

from __future__ import annotations

import pytest
import torch

from fixtures.head_cases import Random, check_best_clusters, check_centroids, check_head, check_head_ties
from sgl_kernel.launch import triton_kernels

VOCAB = 262144
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("width", [1024, 1536, 2560, 2816, 3840, 5376])
@pytest.mark.parametrize("rows", [1, 6, 16, 48])
def test_head_argmax(rows: int, width: int) -> None:
    check_head(torch.bfloat16, "cuda", rows, width, VOCAB, None if width == 1024 else 30.0, gain=4.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_head_argmax_of_many_rows_at_odd_shapes(dtype: torch.dtype, softcap: float | None) -> None:
    for rows in (1, 17, 33, 200):
        check_head(dtype, "cuda", rows, 72, 1030, softcap, gain=4.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_of_equal_logits_the_lowest_id_wins(dtype: torch.dtype) -> None:
    check_head_ties(dtype, "cuda", VOCAB)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 4, 40])
def test_centroid_head(rows: int, dtype: torch.dtype) -> None:
    check_centroids(dtype, "cuda", rows, clusters=2048, per_cluster=128, width=256, top_k=32)
    check_centroids(dtype, "cuda", rows, clusters=32, per_cluster=16, width=64, top_k=8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_best_clusters_in_order(dtype: torch.dtype) -> None:
    check_best_clusters(dtype, "cuda", rows=8, clusters=2048, top_k=32)
    check_best_clusters(dtype, "cuda", rows=1, clusters=5, top_k=1)


def test_a_hundred_runs_agree() -> None:
    make = Random(torch.bfloat16, "cuda", seed=0)
    hidden, weight = make.randn(64, 256), make.randn(2048, 128, 256)
    centroids, order = make.randn(2048, 256), make.permutation(VOCAB)
    head, sparse = triton_kernels("head_argmax").head_argmax, triton_kernels("centroid_head").centroid_best
    first = head(hidden, weight.view(VOCAB, 256), 30.0), sparse(hidden, centroids, weight, order, 32)
    for run in range(100):
        rows = 1 + run % 64
        again = head(hidden[:rows], weight.view(VOCAB, 256), 30.0), sparse(hidden[:rows], centroids, weight, order, 32)
        for a, b in zip((*first[0], *first[1]), (*again[0], *again[1]), strict=True):
            assert torch.equal(a[:rows], b), rows
