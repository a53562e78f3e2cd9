"""Acceptance of a drafted chain, with the hidden state of the last accepted row."""

import torch
import triton
import triton.language as tl

from sgl_kernel.triton_kernels.common import cdiv, next_power_of_2, options, release_dependents, wait_for_inputs

_BLOCK_H = 1024


@triton.jit
def chain_accept_len(
    draft_ptr, forced_ptr, b, target, N, draft_stride, HAS_FORCED: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Length of request ``b``'s accepted run, int32 in 1..N. ``target`` [BLOCK_N]: the target's choice at each node."""
    j = tl.arange(0, BLOCK_N)
    if HAS_FORCED:
        accept_len = tl.minimum(tl.maximum(tl.load(forced_ptr + b), 1), N).to(tl.int32)
    else:
        draft = tl.load(draft_ptr + b * draft_stride + j + 1, mask=j < N - 1, other=-1)
        agree = (j < N - 1) & (draft == target)
        accept_len = 1 + tl.min(tl.where(agree, BLOCK_N, j), axis=0)
    return accept_len


@triton.jit
def accept_kernel(
    draft_ptr, target_ptr, hidden_ptr, forced_ptr, lens_ptr, bonus_ptr, out_ptr, N, H, draft_stride, target_stride,
    HAS_FORCED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Each program of a request finds the length by itself and copies BLOCK_H columns. Grid: (column blocks, B)."""
    b = tl.program_id(1).to(tl.int64)
    j = tl.arange(0, BLOCK_N)
    h = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    wait_for_inputs()
    target = tl.load(target_ptr + b * target_stride + j, mask=j < N, other=-1)
    accept_len = chain_accept_len(draft_ptr, forced_ptr, b, target, N, draft_stride, HAS_FORCED, BLOCK_N)
    state = tl.load(hidden_ptr + (b * N + accept_len - 1) * H + h, mask=h < H)
    release_dependents()
    tl.store(out_ptr + b * H + h, state, mask=h < H)
    if tl.program_id(0) == 0:
        tl.store(lens_ptr + b, accept_len.to(tl.int64))
        tl.store(bonus_ptr + b, tl.sum(tl.where(j == accept_len - 1, target, 0), axis=0))


def accept_and_gather(draft_tokens, target_tokens, hidden, forced_accept_lens):
    """See ``sgl_kernel.spec_tree.accept_and_gather``."""
    _check(draft_tokens, target_tokens, hidden, forced_accept_lens)
    batch, num_nodes = draft_tokens.shape
    width, device = hidden.shape[1], hidden.device
    accept_lens, bonus_tokens = (torch.empty(batch, dtype=torch.int64, device=device) for _ in range(2))
    states = torch.empty((batch, width), dtype=hidden.dtype, device=device)
    accept_kernel[(cdiv(width, _BLOCK_H), batch)](
        draft_tokens, target_tokens, hidden, accept_lens if forced_accept_lens is None else forced_accept_lens,
        accept_lens, bonus_tokens, states, num_nodes, width, draft_tokens.stride(0), target_tokens.stride(0),
        HAS_FORCED=forced_accept_lens is not None, BLOCK_N=next_power_of_2(num_nodes), BLOCK_H=_BLOCK_H, **options(4),
    )  # fmt: skip
    return accept_lens, bonus_tokens, states


def _check(draft_tokens, target_tokens, hidden, forced_accept_lens):
    batch, num_nodes = draft_tokens.shape
    if target_tokens.shape != draft_tokens.shape or batch == 0 or hidden.dim() != 2:
        raise ValueError(
            f"accept needs draft_tokens and target_tokens [B, N] and hidden [B * N, H], got "
            f"{list(draft_tokens.shape)}, {list(target_tokens.shape)} and {list(hidden.shape)}"
        )
    if hidden.shape[0] != batch * num_nodes or not hidden.is_contiguous():
        raise ValueError(f"hidden must be contiguous [{batch * num_nodes}, H], got {list(hidden.shape)}")
    named = {"draft_tokens": draft_tokens, "target_tokens": target_tokens, "forced_accept_lens": forced_accept_lens}
    for name, tensor in named.items():
        if tensor is None:
            continue
        if tensor.dtype is not torch.int64 or tensor.stride(-1) != 1 or tensor.device != hidden.device:
            raise ValueError(f"{name} must be int64 on {hidden.device}, its last axis dense, got {tensor.dtype}")
    if forced_accept_lens is not None and list(forced_accept_lens.shape) != [batch]:
        raise ValueError(f"forced_accept_lens must be [{batch}], got {list(forced_accept_lens.shape)}")
