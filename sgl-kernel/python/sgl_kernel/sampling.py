"""Choosing a token from a row of logits, with randomness keyed by (seed, position).

A token is drawn with the exponential race: argmax over v of p(v) / E(v), where the E(v) are independent standard
exponentials, selects v with probability exactly p(v). E is a hash of (seed, position, v) rather than the state of a
generator, so a row's draw depends on nothing else: not on the batch around it, not on how many rows a step verifies.
"""

from __future__ import annotations

import torch

from sgl_kernel.launch import triton_kernels

TOP_K_ALL = 1 << 30
_M1, _M2 = 0x7FEB352D, 0x846CA68B
_MASK = 0xFFFFFFFF


def _mix(h: torch.Tensor) -> torch.Tensor:
    """A 32-bit finaliser (xorshift-multiply with full avalanche) on int64 lanes that hold 32-bit values."""
    h = h ^ (h >> 16)
    h = (h * _M1) & _MASK
    h = h ^ (h >> 15)
    h = (h * _M2) & _MASK
    return h ^ (h >> 16)


def exponential_noise(seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard exponentials keyed by (seed, position, token).

    ``seeds``, ``positions`` [R] int64; ``token_ids`` [V] or [R, V] int64 -> [R, V] float32, all > 0.
    """
    key = _mix((seeds & _MASK) ^ 0x9E3779B9)
    key = _mix(key ^ ((seeds >> 32) & _MASK))
    key = _mix(key ^ (positions & _MASK))[:, None]
    h = _mix(_mix((token_ids + 0x632BE5AB) & _MASK) ^ key)
    # 23 random bits at the centres of equal cells, which 24 bits hold: never 0 and never 1, so no noise is 0
    uniform = ((h >> 9).to(torch.float32) + 0.5) * (1.0 / (1 << 23))
    return -torch.log(uniform)


def filtered_probs(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor | None,
    top_ps: torch.Tensor | None,
    min_ps: torch.Tensor | None,
) -> torch.Tensor:
    """Probabilities after temperature, then top-k, then top-p (over what top-k kept), then min-p. Not renormalised.

    ``logits`` [R, V]; controls [R] or None when no row uses them. Ties at a threshold are kept by lower token id.
    Returns [R, V] float32 with removed tokens at 0.
    """
    probs = torch.softmax(logits.float() / temperatures[:, None], dim=-1)
    if top_ks is None and top_ps is None:
        if min_ps is not None:
            probs = torch.where(probs < probs.amax(-1, keepdim=True) * min_ps[:, None], 0.0, probs)
        return probs
    ranked, order = probs.sort(dim=-1, descending=True, stable=True)
    if top_ks is not None:
        rank = torch.arange(ranked.shape[1], device=ranked.device)
        ranked = torch.where(rank[None, :] >= top_ks[:, None], 0.0, ranked)
    if top_ps is not None:
        before = ranked.cumsum(-1) - ranked
        # the best token always stays, also when top_p is smaller than any float step
        drop = before >= top_ps[:, None] * ranked.sum(-1, keepdim=True)
        drop[:, 0] = False
        ranked = torch.where(drop, 0.0, ranked)
    if min_ps is not None:
        ranked = torch.where(ranked < ranked[:, :1] * min_ps[:, None], 0.0, ranked)
    return torch.zeros_like(probs).scatter_(1, order, ranked)


def sample(probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One token per row of ``probs`` [R, V] (unnormalised is fine), [R] int64. See the module's text."""
    token_ids = torch.arange(probs.shape[1], device=probs.device)
    return (probs / exponential_noise(seeds, positions, token_ids)).argmax(dim=-1)


def choose_tokens(
    logits: torch.Tensor,
    greedy: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    top_ks: torch.Tensor | None,
    top_ps: torch.Tensor | None,
    min_ps: torch.Tensor | None,
) -> torch.Tensor:
    """The token of each row: the best one where ``greedy``, else one drawn after temperature and filters.

    ``logits`` [R, V]; ``positions`` [R] int64; the rest per request, [B], where R is a multiple of B and a request's
    rows lie together: ``greedy`` bool, ``temperatures`` float32 > 0, ``seeds`` and ``top_ks`` int64, ``top_ps`` and
    ``min_ps`` float32; a filter that nobody uses is None -> [R] int64. See ``filtered_probs`` and ``sample`` for what
    is drawn.

    On CUDA nothing is sorted and a row's token does not depend on the other rows. Probabilities differ from the
    reference's by rounding. Top-k and min-p keep the same tokens, given the same probabilities; top-p adds them up in
    another order, so a token within rounding of the limit may fall on the other side of it.
    """
    if logits.is_cuda:
        return triton_kernels("sampling").choose_tokens(
            logits, greedy, temperatures, seeds, positions, top_ks, top_ps, min_ps
        )
    return choose_tokens_torch(logits, greedy, temperatures, seeds, positions, top_ks, top_ps, min_ps)


def choose_tokens_torch(
    logits: torch.Tensor,
    greedy: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    top_ks: torch.Tensor | None,
    top_ps: torch.Tensor | None,
    min_ps: torch.Tensor | None,
) -> torch.Tensor:
    """The reference of ``choose_tokens``."""
    width = logits.shape[0] // greedy.shape[0]

    def rows(value: torch.Tensor | None) -> torch.Tensor | None:
        return value if value is None or width == 1 else value.repeat_interleave(width)

    row_temperatures, row_seeds, row_greedy = rows(temperatures), rows(seeds), rows(greedy)
    assert row_temperatures is not None and row_seeds is not None and row_greedy is not None
    probs = filtered_probs(logits, row_temperatures, rows(top_ks), rows(top_ps), rows(min_ps))
    return torch.where(row_greedy, logits.argmax(dim=-1), sample(probs, row_seeds, positions))
