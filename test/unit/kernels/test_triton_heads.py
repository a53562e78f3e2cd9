"""Output heads: Triton kernels under the interpreter against their references."""

from __future__ import annotations

import pytest
import torch

from fixtures.head_cases import check_best_clusters, check_centroids, check_head, check_head_ties
from fixtures.interpreter import interpreted
from sgl_kernel.launch import triton_kernels

F32, F16 = torch.float32, torch.float16

pytestmark = interpreted


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(("rows", "width", "vocab"), [(1, 64, 256), (5, 72, 200), (19, 40, 130), (70, 32, 65)])
def test_head_argmax(rows: int, width: int, vocab: int, softcap: float | None) -> None:
    check_head(F32, "cpu", rows, width, vocab, softcap)


def test_head_argmax_in_half_precision() -> None:
    check_head(F16, "cpu", 12, 64, 320, 5.0)


def test_softcap_is_accurate_at_both_ends() -> None:
    """Logits of hundreds, where tanh is one, and logits near zero, where its exponential form cancels."""
    for gain in (1e-4, 1e-2, 0.3, 40.0):
        check_head(F32, "cpu", 3, 32, 96, 30.0, gain)


def test_of_equal_logits_the_lowest_id_wins() -> None:
    check_head_ties(F32, "cpu", 200)


@pytest.mark.parametrize(
    ("rows", "clusters", "per_cluster", "width", "top_k"), [(1, 32, 4, 64, 8), (5, 20, 7, 48, 3), (18, 16, 70, 16, 2)]
)
def test_centroid_head(rows: int, clusters: int, per_cluster: int, width: int, top_k: int) -> None:
    check_centroids(F32, "cpu", rows, clusters, per_cluster, width, top_k)


def test_centroid_head_in_half_precision() -> None:
    check_centroids(F16, "cpu", 4, 32, 16, 64, 8)


@pytest.mark.parametrize("dtype", [F32, F16])
def test_best_clusters_in_order(dtype: torch.dtype) -> None:
    check_best_clusters(dtype, "cpu", rows=3, clusters=100, top_k=20)
    check_best_clusters(dtype, "cpu", rows=2, clusters=5, top_k=1)


def test_wrong_inputs_are_named() -> None:
    hidden, centroids, head = torch.zeros(2, 16), torch.zeros(8, 16), torch.zeros(8, 4, 16)
    best = triton_kernels("centroid_head").centroid_best
    with pytest.raises(ValueError, match=r"token_ordering \[V\]"):
        best(hidden, centroids, head, torch.arange(31), 4)
    with pytest.raises(ValueError, match="token_ordering int64"):
        best(hidden, centroids, head, torch.arange(32).int(), 4)
    with pytest.raises(ValueError, match="hidden must be contiguous"):
        best(torch.zeros(16, 2).T, centroids, head, torch.arange(32), 4)
    with pytest.raises(ValueError, match="weight"):
        triton_kernels("head_argmax").head_argmax(hidden, torch.zeros(64, 32), None)
