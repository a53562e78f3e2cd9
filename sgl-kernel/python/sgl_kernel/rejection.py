"""Drafts drawn from a distribution q, and their verification against the target's p without changing p.

A draft d is accepted with probability min(1, p(d) / q(d)); where it is not, the token is drawn from the positive part
of p - q, renormalised. Accepted or not, a token is then distributed as p. All randomness is keyed by (seed, position);
drafts and acceptance have streams of their own, since the three draws at a position must be independent.

Shapes: B requests, N rows each (a newest token, then N - 1 drafts), V vocabulary.
"""

from __future__ import annotations

import torch

from sgl_kernel.sampling import exponential_noise, filtered_probs, sample

# mixed into a request's seed
_DRAFT_STREAM = 0x5851F42D4C957F2D
_ACCEPT_STREAM = 0x14057B7EF767814F


def sampling_distribution(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor | None,
    top_ps: torch.Tensor | None,
    min_ps: torch.Tensor | None,
) -> torch.Tensor:
    """What a token is drawn from, [R, V] float32 with sum 1; arguments as in ``filtered_probs``."""
    probs = filtered_probs(logits, temperatures, top_ks, top_ps, min_ps)
    return probs / probs.sum(dim=-1, keepdim=True)


def draw_drafts(probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One draft per row of ``probs`` [B, V], for the token after ``positions`` [B] int64; ``seeds`` [B] int64
    -> [B] int64."""
    return sample(probs, seeds ^ _DRAFT_STREAM, positions)


def count_accepted(
    target_probs: torch.Tensor, draft_probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """How many drafts are accepted, from the left, [B] int64 in 0..N-1.

    ``target_probs``, ``draft_probs`` [B, N - 1] float32: p and q of each draft; ``positions`` [B, N - 1] int64, of the
    token before each; ``seeds`` [B] int64.
    """
    num = draft_probs.shape[1]
    keys = (seeds ^ _ACCEPT_STREAM).repeat_interleave(num)
    zero = torch.zeros(1, dtype=torch.int64, device=seeds.device)
    uniform = torch.exp(-exponential_noise(keys, positions.reshape(-1), zero)).view(-1, num)
    # as a product, so that a draft with p >= q is accepted whatever the rounding
    accepted = uniform * draft_probs.clamp(max=1.0) <= target_probs
    return accepted.to(torch.int64).cumprod(dim=1).sum(dim=1)


def residual(target: torch.Tensor, draft: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """The positive part of p - q after a rejection, [B, V], not renormalised.

    ``target``, ``draft`` [B, V] float32, p and q; ``rejected`` [B] int64, which has no probability left. Where rounding
    leaves nothing, p without the rejected token stands in.
    """
    rest = (target - draft).clamp_(min=0.0).scatter_(1, rejected[:, None], 0.0)
    return torch.where(rest.sum(dim=1, keepdim=True) > 0, rest, target.scatter(1, rejected[:, None], 0.0))


def verify_drafts(
    target: torch.Tensor,
    draft: torch.Tensor,
    draft_tokens: torch.Tensor,
    num_accepted: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """The token after each row, [B, N] int64: accepted drafts, then the one drawn after them; further ones are 0.

    ``target`` [B, V]: p of the row after the last accepted draft; ``draft`` [B, V]: q of the first draft that was not
    (of any where all were); ``draft_tokens`` [B, N] int64, column 0 the newest token; ``num_accepted`` [B] int64;
    ``positions`` [B] int64, of that row; ``seeds`` [B] int64. The token drawn never equals the rejected draft, so
    ``accept_chain`` finds the same number.
    """
    width = draft_tokens.shape[1]
    drafts = torch.cat((draft_tokens[:, 1:], torch.zeros_like(draft_tokens[:, :1])), dim=1)
    at = num_accepted[:, None]
    rest = residual(target, draft, drafts.gather(1, at)[:, 0])
    token = sample(torch.where(at < width - 1, rest, target), seeds, positions)
    column = torch.arange(width, device=drafts.device)
    return torch.where(column == at, token[:, None], torch.where(column < at, drafts, 0))
