"""The frame of a decode step: where its rows stand, and how they move on. One launch each.

Shapes: B requests, N rows each (a newest token, then drafts), H hidden width of the target.
"""

from __future__ import annotations

import torch

from sgl_kernel.cpu_ops import address, cpu_ops, usable
from sgl_kernel.launch import triton_kernels
from sgl_kernel.spec_tree import accept_and_gather_torch, accept_chain


def place_rows(
    req_to_token: torch.Tensor, req_rows: torch.Tensor, committed_lens: torch.Tensor, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Positions and slots of the N = ``num_rows`` rows behind each request's committed tokens.

    ``req_to_token`` [R, max_len] int32; ``req_rows``, ``committed_lens`` [B] int64
    -> positions [B * N], slots [B * N], and tokens in the pool per request with these rows [B], all int64.
    """
    if req_to_token.is_cuda:
        return triton_kernels("decode_step").place_rows(req_to_token, req_rows, committed_lens, num_rows)
    return place_rows_torch(req_to_token, req_rows, committed_lens, num_rows)


def place_rows_torch(
    req_to_token: torch.Tensor, req_rows: torch.Tensor, committed_lens: torch.Tensor, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The reference of ``place_rows``."""
    if num_rows == 1:  # every step of plain decode on a CPU: one flat index costs half of a pair of them
        slots = req_to_token.view(-1).index_select(0, req_rows * req_to_token.shape[1] + committed_lens)
        return committed_lens.clone(), slots.to(torch.int64), committed_lens + 1
    positions = committed_lens[:, None] + torch.arange(num_rows, device=committed_lens.device)
    slots = req_to_token[req_rows[:, None], positions].to(torch.int64)
    return positions.view(-1), slots.view(-1), committed_lens + num_rows


def advance_rows(
    draft_tokens: torch.Tensor,
    target_tokens: torch.Tensor,
    live: torch.Tensor,
    forced_accept_lens: torch.Tensor | None,
    max_drafts: torch.Tensor | None,
    committed_lens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    result: torch.Tensor,
    hidden: torch.Tensor | None = None,
    hidden_states: torch.Tensor | None = None,
) -> None:
    """Accept a verified chain and move every request on; plain decode is the case N = 1.

    ``draft_tokens``, ``target_tokens`` [B, N] int64; ``live`` [B] int64, 0 for rows that stay where they are;
    ``forced_accept_lens`` [B] int64 as in ``accept_and_gather``; ``max_drafts`` [B] int64: drafts of a request beyond
    these are not accepted (None: no limit); ``hidden`` [B * N, H], the target's state at each row,
    or None together with ``hidden_states``.
    Mutated: ``committed_lens`` [B] int64 grows by the accepted lengths; ``bonus_tokens`` [B] int64 and
    ``hidden_states`` [B, H] are those after the last accepted row; ``result`` [B, N + 1] int64 is the target's tokens
    and then the accepted length.
    """
    if result.is_cuda:
        triton_kernels("decode_step").advance_rows(
            draft_tokens, target_tokens, live, forced_accept_lens, max_drafts, committed_lens, bonus_tokens, result,
            hidden, hidden_states,
        )  # fmt: skip
        return
    rows_are_plain = draft_tokens.stride(1) == result.stride(1) == 1 and target_tokens.is_contiguous()
    if hidden is not None and hidden_states is not None and rows_are_plain and usable(hidden, hidden_states):
        ops = cpu_ops()
        assert ops is not None
        assert all(given is None or given.is_contiguous() for given in (forced_accept_lens, max_drafts))
        batch, num_rows = target_tokens.shape
        ops.sgl_accept_chain(
            draft_tokens.data_ptr(), target_tokens.data_ptr(), live.data_ptr(), address(forced_accept_lens),
            address(max_drafts), committed_lens.data_ptr(), bonus_tokens.data_ptr(), result.data_ptr(),
            hidden.data_ptr(), hidden_states.data_ptr(), batch, num_rows, hidden.shape[1], draft_tokens.stride(0),
            result.stride(0),
        )  # fmt: skip
        return
    advance_rows_torch(
        draft_tokens, target_tokens, live, forced_accept_lens, max_drafts, committed_lens, bonus_tokens, result, hidden,
        hidden_states,
    )  # fmt: skip


def advance_rows_torch(
    draft_tokens: torch.Tensor,
    target_tokens: torch.Tensor,
    live: torch.Tensor,
    forced_accept_lens: torch.Tensor | None,
    max_drafts: torch.Tensor | None,
    committed_lens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    result: torch.Tensor,
    hidden: torch.Tensor | None = None,
    hidden_states: torch.Tensor | None = None,
) -> None:
    """The reference of ``advance_rows``. A CPU runs it at every step, so plain decode is spared the comparing."""
    if target_tokens.shape[1] == 1 and hidden is None:
        bonus_tokens.copy_(target_tokens[:, 0])
        result[:, 0].copy_(target_tokens[:, 0])
        result[:, 1].fill_(1)
        committed_lens.add_(live)
        return
    states, lens = target_tokens.reshape(-1, 1) if hidden is None else hidden, forced_accept_lens
    if max_drafts is not None:
        found = accept_chain(draft_tokens, target_tokens) if lens is None else lens
        lens = torch.minimum(found, max_drafts + 1)
    accept_lens, bonus, state = accept_and_gather_torch(draft_tokens, target_tokens, states, lens)
    torch.cat((target_tokens, accept_lens[:, None]), dim=1, out=result)
    bonus_tokens.copy_(bonus)
    if hidden_states is not None:
        hidden_states.copy_(state)
    committed_lens.addcmul_(accept_lens, live)
