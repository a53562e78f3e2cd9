"""Acceptance of drafted tokens."""

from __future__ import annotations

import torch

from sgl_kernel.launch import triton_kernels


def accept_chain(draft_tokens: torch.Tensor, target_tokens: torch.Tensor) -> torch.Tensor:
    """How many tokens each request gains from a verified chain, [B] int64 in 1..N.

    ``draft_tokens`` [B, N] int64, row 0 the root; ``target_tokens`` [B, N]: the token the target chose after each node.
    Draft j+1 is accepted when it equals the target's choice at j and every draft before it was accepted; the target's
    choice after the last accepted node is always gained too, so the gained run is ``target_tokens[b, :accept_len]``.
    """
    agree = draft_tokens[:, 1:] == target_tokens[:, :-1]
    return agree.to(torch.int64).cumprod(dim=1).sum(dim=1) + 1


def accept_and_gather(
    draft_tokens: torch.Tensor,
    target_tokens: torch.Tensor,
    hidden: torch.Tensor,
    forced_accept_lens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``accept_chain``, and what the next draft starts from.

    ``draft_tokens``, ``target_tokens`` [B, N] int64; ``hidden`` [B * N, H], the target's state of every node;
    ``forced_accept_lens`` [B] int64: lengths to report instead of compared ones, cut to 1..N (to measure with)
    -> accept lens [B] int64, bonus tokens [B] int64 (the last gained token), their hidden states [B, H].
    """
    if hidden.is_cuda:
        return triton_kernels("spec_tree").accept_and_gather(draft_tokens, target_tokens, hidden, forced_accept_lens)
    return accept_and_gather_torch(draft_tokens, target_tokens, hidden, forced_accept_lens)


def accept_and_gather_torch(
    draft_tokens: torch.Tensor,
    target_tokens: torch.Tensor,
    hidden: torch.Tensor,
    forced_accept_lens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The reference of ``accept_and_gather``."""
    batch, num_nodes = draft_tokens.shape
    if forced_accept_lens is None:
        accept_lens = accept_chain(draft_tokens, target_tokens)
    else:
        accept_lens = forced_accept_lens.clamp(1, num_nodes)
    last = accept_lens - 1
    rows = torch.arange(batch, device=hidden.device) * num_nodes + last
    return accept_lens, target_tokens.gather(1, last[:, None]).squeeze(1), hidden[rows]


def select_tree(
    tokens: torch.Tensor, scores: torch.Tensor, parents: torch.Tensor, num_nodes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best ``num_nodes`` candidates of each request as a tree below its root.

    ``tokens``, ``parents`` [B, M] int64, the latter the candidate each one follows (-1: the root); ``scores`` [B, M]
    float32, never above the parent's, and every parent comes before its children. So whoever is chosen has its
    parent chosen too, as of equal scores the earlier candidate wins.
    -> drafts [B, num_nodes] int64 and the node each follows, where node 0 is the root and draft i is node i + 1. A
    node's number is larger than its parent's.
    """
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, :num_nodes].sort(dim=1).values
    numbers = torch.arange(1, num_nodes + 1, device=tokens.device).expand(len(tokens), -1)
    # one column before the first candidate stands for the root
    node_of = torch.zeros((len(tokens), tokens.shape[1] + 1), dtype=torch.int64, device=tokens.device)
    node_of.scatter_(1, best + 1, numbers)
    return tokens.gather(1, best), node_of.gather(1, parents.gather(1, best) + 1)


def tree_visibility(parents: torch.Tensor, max_depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What each node of a tree sees, and how deep it is.

    ``parents`` [B, N] int64, the root (node 0) its own parent; no node is deeper than ``max_depth``
    -> mask [B, N, N] bool, row i set at node i and its ancestors; depths [B, N] int64, 0 at the root.
    """
    batch, num_nodes = parents.shape
    mask = torch.eye(num_nodes, dtype=torch.bool, device=parents.device).repeat(batch, 1, 1)
    ancestor = parents
    for _ in range(max_depth):
        mask.scatter_(2, ancestor[:, :, None], True)
        ancestor = parents.gather(1, ancestor)
    return mask, mask.sum(dim=2) - 1


def accept_tree(
    draft_tokens: torch.Tensor, target_tokens: torch.Tensor, parents: torch.Tensor, max_depth: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """How many tokens each request gains from a verified tree, and at which nodes.

    ``draft_tokens`` [B, N] int64, node 0 the root; ``target_tokens`` [B, N]: the token the target chose after each
    node; ``parents`` [B, N] as in ``tree_visibility``. From the root on, the child that equals the target's choice at
    its parent is accepted; siblings differ, so it is one at most.
    -> accept lens [B] int64 in 1..max_depth + 1, and the accepted nodes [B, max_depth + 1] in order, the last of them
    repeated to the end. The gained run is the target's choice at each.
    """
    node = torch.zeros_like(draft_tokens[:, :1])
    accept_lens, path = torch.ones_like(node[:, 0]), [node]
    for _ in range(max_depth):
        follows = (parents == node) & (draft_tokens == target_tokens.gather(1, node))
        follows[:, 0] = False  # the root follows nobody
        found, child = follows.max(dim=1, keepdim=True)
        node = torch.where(found, child, node)
        accept_lens = accept_lens + found[:, 0].to(torch.int64)
        path.append(node)
    return accept_lens, torch.cat(path, dim=1)
