"""Acceptance of drafted tokens."""

from __future__ import annotations

import torch


def accept_chain(draft_tokens: torch.Tensor, target_tokens: torch.Tensor) -> torch.Tensor:
    """How many tokens each request gains from a verified chain, [B] int64 in 1..N.

    ``draft_tokens`` [B, N] int64, row 0 the root; ``target_tokens`` [B, N]: the token the target chose after each node.
    Draft j+1 is accepted when it equals the target's choice at j and every draft before it was accepted; the target's
    choice after the last accepted node is always gained too, so the gained run is ``target_tokens[b, :accept_len]``.
    """
    agree = draft_tokens[:, 1:] == target_tokens[:, :-1]
    return agree.to(torch.int64).cumprod(dim=1).sum(dim=1) + 1
