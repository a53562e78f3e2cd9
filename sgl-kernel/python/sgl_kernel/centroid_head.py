"""Sparse output head: score the clusters, then only the tokens of the best few.

Source: the ordered-embeddings head of Gemma 4's small MTP assistants.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sgl_kernel.launch import triton_kernels
from sgl_kernel.packed_linear import PackedWeight, packed_linear, packed_linear_groups


def centroid_candidates(
    hidden: torch.Tensor,
    centroids: torch.Tensor,
    clustered_head: torch.Tensor,
    top_k: int,
    packed: PackedWeight | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the tokens in each row's ``top_k`` best clusters.

    ``hidden`` [B, D]; ``centroids`` [C, D]; ``clustered_head`` [C, V/C, D], the head's rows grouped by cluster;
    ``packed``: the same rows for ``packed_linear``, where the head is small enough for the CPU to read whole.
    Returns logits [B, top_k * V/C] and the cluster of each group [B, top_k] int64.
    """
    clusters = F.linear(hidden, centroids).topk(top_k, dim=-1).indices
    batch, per_cluster = hidden.shape[0], clustered_head.shape[1]
    if packed is not None and per_cluster % 32 == 0 and batch * top_k < clustered_head.shape[0]:
        return packed_linear_groups(hidden, packed, clusters, per_cluster), clusters
    whole = clustered_head.view(-1, clustered_head.shape[2])
    if packed is not None or batch * top_k >= clustered_head.shape[0]:
        # gathering would take longer, or read at least as many rows as the whole head has
        scores = F.linear(hidden, whole) if packed is None else packed_linear(hidden, packed)
        scores = scores.view(batch, -1, per_cluster)
        picked = scores.gather(1, clusters[:, :, None].expand(-1, -1, per_cluster))
        return picked.reshape(batch, -1), clusters
    gathered = clustered_head.index_select(0, clusters.view(-1)).view(batch, top_k * per_cluster, -1)
    return torch.bmm(gathered, hidden.unsqueeze(2)).squeeze(2), clusters


def centroid_argmax(
    hidden: torch.Tensor,
    centroids: torch.Tensor,
    clustered_head: torch.Tensor,
    token_ordering: torch.Tensor,
    top_k: int,
    packed: PackedWeight | None = None,
) -> torch.Tensor:
    """Best token id of each row, [B] int64. ``token_ordering`` [C, V/C] int64 names the tokens of each cluster."""
    if hidden.is_cuda:
        return triton_kernels("centroid_head").centroid_best(hidden, centroids, clustered_head, token_ordering, top_k)[
            0
        ]
    logits, clusters = centroid_candidates(hidden, centroids, clustered_head, top_k, packed)
    return _candidate_tokens(logits.argmax(dim=-1), clusters, clustered_head.shape[1], token_ordering)


def centroid_best(
    hidden: torch.Tensor,
    centroids: torch.Tensor,
    clustered_head: torch.Tensor,
    token_ordering: torch.Tensor,
    top_k: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``centroid_argmax`` with more to tell: ids [B] int64, their logits [B] and the log-sum-exp [B] over all
    candidates, both float32. Of equal logits the token of the better cluster wins, then the earlier one in it."""
    if hidden.is_cuda:
        return triton_kernels("centroid_head").centroid_best(hidden, centroids, clustered_head, token_ordering, top_k)
    return centroid_best_torch(hidden, centroids, clustered_head, token_ordering, top_k)


def centroid_best_torch(
    hidden: torch.Tensor,
    centroids: torch.Tensor,
    clustered_head: torch.Tensor,
    token_ordering: torch.Tensor,
    top_k: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The reference of ``centroid_best``."""
    logits, clusters = centroid_candidates(hidden, centroids, clustered_head, top_k)
    best = logits.argmax(dim=-1)
    ids = _candidate_tokens(best, clusters, clustered_head.shape[1], token_ordering)
    values = logits.float()
    return ids, values.gather(1, best[:, None]).squeeze(1), values.logsumexp(dim=-1)


def _candidate_tokens(
    best: torch.Tensor, clusters: torch.Tensor, per_cluster: int, token_ordering: torch.Tensor
) -> torch.Tensor:
    """Token ids of candidates ``best`` [B], counted through a row's clusters [B, top_k]."""
    group = torch.div(best, per_cluster, rounding_mode="floor")
    cluster = clusters.gather(1, group[:, None]).squeeze(1)
    return token_ordering.view(-1)[cluster * per_cluster + best - group * per_cluster]
