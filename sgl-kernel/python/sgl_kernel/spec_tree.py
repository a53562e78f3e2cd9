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
