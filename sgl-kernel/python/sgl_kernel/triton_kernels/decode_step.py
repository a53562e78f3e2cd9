"""Where the rows of a decode step stand, and how they move on."""

import torch
import triton
import triton.language as tl

from sgl_kernel.triton_kernels.common import cdiv, next_power_of_2, options, release_dependents, wait_for_inputs
from sgl_kernel.triton_kernels.spec_tree import chain_accept_len

_BLOCK_H = 1024


@triton.jit
def place_kernel(
    table_ptr, req_rows_ptr, committed_ptr, positions_ptr, slots_ptr, kv_lens_ptr, N, table_stride,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid: (B,)."""
    b = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK_N)
    wait_for_inputs()
    row, committed = tl.load(req_rows_ptr + b), tl.load(committed_ptr + b)
    slots = tl.load(table_ptr + row * table_stride + committed + j, mask=j < N, other=0)
    release_dependents()
    tl.store(positions_ptr + b * N + j, committed + j, mask=j < N)
    tl.store(slots_ptr + b * N + j, slots.to(tl.int64), mask=j < N)
    tl.store(kv_lens_ptr + b, committed + N)


def place_rows(req_to_token, req_rows, committed_lens, num_rows):
    """See ``sgl_kernel.decode_step.place_rows``."""
    batch, device = req_rows.shape[0], req_to_token.device
    if req_to_token.dtype is not torch.int32 or req_to_token.dim() != 2 or req_to_token.stride(1) != 1:
        raise ValueError(f"req_to_token must be [R, max_len] int32 with dense rows, got {req_to_token.dtype}")
    _check(device, batch, req_rows=req_rows, committed_lens=committed_lens)
    positions, slots = (torch.empty(batch * num_rows, dtype=torch.int64, device=device) for _ in range(2))
    kv_lens = torch.empty(batch, dtype=torch.int64, device=device)
    place_kernel[(batch,)](
        req_to_token, req_rows, committed_lens, positions, slots, kv_lens, num_rows, req_to_token.stride(0),
        BLOCK_N=next_power_of_2(num_rows), **options(1),
    )  # fmt: skip
    return positions, slots, kv_lens


@triton.jit
def advance_kernel(
    draft_ptr, target_ptr, live_ptr, forced_ptr, caps_ptr, committed_ptr, bonus_ptr, result_ptr, hidden_ptr, states_ptr,
    N, H, draft_stride, HAS_FORCED: tl.constexpr, HAS_CAPS: tl.constexpr, HAS_HIDDEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Each program of a request finds the length by itself and copies BLOCK_H columns; the first also does the rest.
    No program reads what another one changes. Grid: (column blocks, B)."""
    b = tl.program_id(1).to(tl.int64)
    j = tl.arange(0, BLOCK_N)
    wait_for_inputs()
    target = tl.load(target_ptr + b * N + j, mask=j < N, other=-1)
    accept_len = chain_accept_len(draft_ptr, forced_ptr, b, target, N, draft_stride, HAS_FORCED, BLOCK_N)
    if HAS_CAPS:
        accept_len = tl.minimum(accept_len, tl.load(caps_ptr + b) + 1).to(tl.int32)
    release_dependents()
    if HAS_HIDDEN:
        h = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
        state = tl.load(hidden_ptr + (b * N + accept_len - 1) * H + h, mask=h < H)
        tl.store(states_ptr + b * H + h, state, mask=h < H)
    if tl.program_id(0) == 0:
        gained = accept_len.to(tl.int64)
        tl.store(result_ptr + b * (N + 1) + j, target, mask=j < N)
        tl.store(result_ptr + b * (N + 1) + N, gained)
        tl.store(bonus_ptr + b, tl.sum(tl.where(j == accept_len - 1, target, 0), axis=0))
        tl.store(committed_ptr + b, tl.load(committed_ptr + b) + gained * tl.load(live_ptr + b))


def advance_rows(
    draft_tokens, target_tokens, live, forced_accept_lens, max_drafts, committed_lens, bonus_tokens, result, hidden,
    hidden_states,
):  # fmt: skip
    """See ``sgl_kernel.decode_step.advance_rows``."""
    batch, num_rows = target_tokens.shape
    device, width = result.device, 1 if hidden is None else hidden.shape[1]
    _check(device, batch, live=live, committed_lens=committed_lens, bonus_tokens=bonus_tokens)
    limits = {"forced_accept_lens": forced_accept_lens, "max_drafts": max_drafts}
    _check(device, batch, **{name: lens for name, lens in limits.items() if lens is not None})
    for name, tensor, shape in (
        ("draft_tokens", draft_tokens, (batch, num_rows)),
        ("target_tokens", target_tokens, (batch, num_rows)),
        ("result", result, (batch, num_rows + 1)),
    ):
        if tensor.shape != shape or tensor.dtype is not torch.int64 or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous {list(shape)} int64, got {list(tensor.shape)} {tensor.dtype}")
    if (hidden is None) != (hidden_states is None):
        raise ValueError("hidden and hidden_states come together")
    if hidden is not None and (
        hidden.shape != (batch * num_rows, width)
        or hidden_states.shape != (batch, width)
        or hidden.dtype is not hidden_states.dtype
        or not (hidden.is_contiguous() and hidden_states.is_contiguous())
    ):
        raise ValueError(
            f"hidden [{batch * num_rows}, H] and hidden_states [{batch}, H] must be contiguous and of one dtype, got "
            f"{list(hidden.shape)} {hidden.dtype} and {list(hidden_states.shape)} {hidden_states.dtype}"
        )
    # a pointer that is not used still has to be one
    advance_kernel[(cdiv(width, _BLOCK_H), batch)](
        draft_tokens, target_tokens, live, live if forced_accept_lens is None else forced_accept_lens,
        live if max_drafts is None else max_drafts, committed_lens, bonus_tokens, result,
        live if hidden is None else hidden, live if hidden is None else hidden_states, num_rows, width, num_rows,
        HAS_FORCED=forced_accept_lens is not None, HAS_CAPS=max_drafts is not None, HAS_HIDDEN=hidden is not None,
        BLOCK_N=next_power_of_2(num_rows), BLOCK_H=_BLOCK_H, **options(4),
    )  # fmt: skip


def _check(device, batch, **tensors):
    for name, tensor in tensors.items():
        if tensor.shape != (batch,) or tensor.dtype is not torch.int64 or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous [{batch}] int64, got {list(tensor.shape)} {tensor.dtype}")
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, the rest on {device}")
