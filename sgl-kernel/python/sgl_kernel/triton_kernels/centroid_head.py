"""Sparse output head: score the clusters, then only the tokens of the best few.

Four kernels: scores of all clusters; the best clusters of a row; dot products with a part of one of these clusters,
which leave (best, token, sum of exponentials); a reduction over a row's parts.
"""

import torch
import triton
import triton.language as tl

from sgl_kernel.triton_kernels.common import (
    cdiv,
    dot_precision,
    next_power_of_2,
    options,
    release_dependents,
    wait_for_inputs,
)
from sgl_kernel.triton_kernels.head_argmax import best_and_sum, reduce_parts
from sgl_kernel.triton_kernels.select import key_index, ranking_keys


@triton.jit
def scores_kernel(
    x_ptr, centroids_ptr, scores_ptr, T, C, D,
    BN: tl.constexpr, BM: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """scores[t, c] = x[t] . centroids[c], rounded to the dtype of x. Grid: (row tiles, cluster tiles)."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.program_id(1) * BN + tl.arange(0, BN)
    wait_for_inputs()
    scores = tl.zeros((BN, BM), dtype=tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        w = tl.load(centroids_ptr + c[:, None] * D + d[None, :], mask=(c[:, None] < C) & (d[None, :] < D), other=0.0)
        x = tl.load(x_ptr + m[None, :] * D + d[:, None], mask=(m[None, :] < T) & (d[:, None] < D), other=0.0)
        scores = tl.dot(w, x, scores, input_precision=PRECISION)
    release_dependents()
    tl.store(scores_ptr + m[None, :] * C + c[:, None], scores.to(dtype), mask=(m[None, :] < T) & (c[:, None] < C))


@triton.jit
def best_clusters_kernel(scores_ptr, clusters_ptr, C, top_k, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr):
    """The ``top_k`` best clusters of a row, best first; of equal scores the lower cluster. One row per program."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK_C)
    rank = tl.arange(0, BLOCK_K)
    wait_for_inputs()
    scores = tl.load(scores_ptr + row * C + c, mask=c < C, other=float("-inf"))
    best = key_index(tl.topk(ranking_keys(scores, c), BLOCK_K))
    release_dependents()
    tl.store(clusters_ptr + row * top_k + rank, best, mask=rank < top_k)


@triton.jit
def candidates_kernel(
    x_ptr, clusters_ptr, head_ptr, ordering_ptr, best_ptr, position_ptr, sum_ptr, token_ptr, top_k, D, per_cluster,
    SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Statistics of BLOCK_N tokens of one of a row's best clusters. Grid: (ranks * SPLITS, rows).

    A position counts a row's candidates cluster by cluster, the best cluster first: of equal logits the first wins.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    rank = part // SPLITS
    j = part % SPLITS * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    inside = (j[:, None] < per_cluster) & (d[None, :] < D)
    wait_for_inputs()
    start = tl.load(clusters_ptr + row * top_k + rank).to(tl.int64) * per_cluster
    x = tl.load(x_ptr + row * D + d, mask=d < D, other=0.0).to(tl.float32)
    w = tl.load(head_ptr + (start + j)[:, None] * D + d[None, :], mask=inside, other=0.0)
    logits = tl.sum(w.to(tl.float32) * x[None, :], axis=1).to(dtype).to(tl.float32)
    release_dependents()
    position = rank * per_cluster + j
    best, first, total = best_and_sum(tl.where(j < per_cluster, logits, float("-inf")), position)
    at = row * tl.num_programs(0) + part
    tl.store(best_ptr + at, best)
    tl.store(position_ptr + at, first)
    tl.store(sum_ptr + at, total)
    tl.store(token_ptr + at, tl.load(ordering_ptr + start + tl.minimum(first - rank * per_cluster, per_cluster - 1)))


def centroid_best(hidden, centroids, clustered_head, token_ordering, top_k):
    """``hidden`` [T, D], ``centroids`` [C, D], ``clustered_head`` [C, V/C, D], ``token_ordering`` [V] int64
    -> ids [T] int64, max logit [T] and log-sum-exp [T] over the tokens of the best ``top_k`` clusters."""
    _check(hidden, centroids, clustered_head, token_ordering, top_k)
    (rows, width), per_cluster, device = hidden.shape, clustered_head.shape[1], hidden.device
    chosen = best_clusters(hidden, centroids, top_k)
    block_n = min(64, next_power_of_2(per_cluster))
    splits = cdiv(per_cluster, block_n)
    best, total = (torch.empty((rows, top_k * splits), dtype=torch.float32, device=device) for _ in range(2))
    position = torch.empty((rows, top_k * splits), dtype=torch.int32, device=device)
    tokens = torch.empty((rows, top_k * splits), dtype=torch.int64, device=device)
    candidates_kernel[(top_k * splits, rows)](
        hidden, chosen, clustered_head, token_ordering, best, position, total, tokens, top_k, width, per_cluster,
        SPLITS=splits, BLOCK_N=block_n, BLOCK_D=next_power_of_2(width), **options(8),
    )  # fmt: skip
    return reduce_parts(best, position, total, tokens)


def best_clusters(hidden, centroids, top_k):
    """``hidden`` [T, D], ``centroids`` [C, D] -> [T, top_k] int32, best first."""
    (rows, width), clusters = hidden.shape, centroids.shape[0]
    scores = torch.empty((rows, clusters), dtype=hidden.dtype, device=hidden.device)
    chosen = torch.empty((rows, top_k), dtype=torch.int32, device=hidden.device)
    block_d = min(32 if hidden.dtype.itemsize == 4 else 256, max(16, next_power_of_2(width)))
    scores_kernel[(cdiv(rows, 16), cdiv(clusters, 16))](
        hidden, centroids, scores, rows, clusters, width,
        BN=16, BM=16, BLOCK_D=block_d, PRECISION=dot_precision(hidden.dtype), **options(1),
    )  # fmt: skip
    best_clusters_kernel[(rows,)](
        scores, chosen, clusters, top_k,
        BLOCK_C=max(2, next_power_of_2(clusters)), BLOCK_K=max(2, next_power_of_2(top_k)), **options(8),
    )  # fmt: skip
    return chosen


def _check(hidden, centroids, clustered_head, token_ordering, top_k):
    clusters, per_cluster, width = clustered_head.shape
    fits = list(centroids.shape) == [clusters, width] and token_ordering.numel() == clusters * per_cluster
    if (
        not fits
        or hidden.dim() != 2
        or hidden.shape[1] != width
        or hidden.shape[0] == 0
        or not 0 < top_k <= clusters <= 65536
    ):
        raise ValueError(
            f"centroid head: hidden [T, D], centroids [C, D], clustered_head [C, V/C, D], token_ordering [V] and "
            f"top_k <= C <= 65536 do not fit: {list(hidden.shape)}, {list(centroids.shape)}, "
            f"{list(clustered_head.shape)}, {list(token_ordering.shape)}, {top_k}"
        )
    named = {"hidden": hidden, "centroids": centroids, "clustered_head": clustered_head}
    for name, tensor in (named | {"token_ordering": token_ordering}).items():
        if not tensor.is_contiguous() or tensor.device != hidden.device:
            raise ValueError(f"centroid head: {name} must be contiguous on {hidden.device}, is {tensor.device}")
    if len({tensor.dtype for tensor in named.values()}) > 1 or token_ordering.dtype is not torch.int64:
        raise ValueError(
            f"centroid head: {', '.join(named)} must have one dtype and token_ordering int64, got "
            f"{[str(tensor.dtype) for tensor in named.values()]} and {token_ordering.dtype}"
        )
