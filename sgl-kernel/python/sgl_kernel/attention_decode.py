"""Paged attention of a few query rows per request, read straight from the KV buffers (compiled CPU operator).

Its torch reference is the padded product of the ``torch_native`` backend.
"""

from __future__ import annotations

import torch

from sgl_kernel.cpu_ops import usable

MAX_ROWS = 16


def can_attend_paged(q: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether ``attend_paged`` takes these tensors: float32 on a CPU with a compiler, D a multiple of 16."""
    return q.shape[2] % 16 == 0 and q.dtype is torch.float32 and usable(key, value) is not None


def attend_paged(
    q: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    req_to_token: torch.Tensor,
    req_rows: torch.Tensor,
    kv_lens: torch.Tensor,
    positions: torch.Tensor,
    max_kv_len: int,
    window: int | None,
    tree_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """``q`` [B * N, H, D], heads contiguous; ``key``, ``value`` [slots, KH, D]; ``req_to_token`` [R, max_len] int32;
    ``req_rows``, ``kv_lens`` [B], ``positions`` [B * N] int64; ``max_kv_len`` the largest of ``kv_lens``; ``tree_mask``
    [B, N, N] bool or uint8, contiguous, or None.

    A row at position p sees positions up to p that are below ``kv_lens``, and on a sliding layer only those above
    p - window; of the last N positions, with a tree mask, those set in its row, whatever the window. It must see at
    least one. -> [B * N, H, D]. A row is computed alike whatever the batch around it, and in a tree as if what it sees
    had consecutive positions.
    """
    ops = usable(key, value)
    assert ops is not None and q.stride(2) == 1 and q.stride(1) == q.shape[2], f"{q.shape=} {q.stride()=}"
    batch = req_rows.shape[0]
    out, scratch = torch.empty(q.shape), torch.empty(4 * max_kv_len)
    tree, seen = 0, torch.empty(0 if tree_mask is None else max_kv_len, dtype=torch.int32)
    if tree_mask is not None:
        assert tree_mask.is_contiguous() and tree_mask.itemsize == 1, f"{tree_mask.shape=} {tree_mask.dtype=}"
        tree = tree_mask.data_ptr()
    ops.sgl_attention(
        q.data_ptr(), key.data_ptr(), value.data_ptr(), req_to_token.data_ptr(), req_rows.data_ptr(),
        kv_lens.data_ptr(), positions.data_ptr(), tree, out.data_ptr(), scratch.data_ptr(), seen.data_ptr(), batch,
        q.shape[0] // batch, q.shape[1], key.shape[1], q.shape[2], q.stride(0), req_to_token.stride(0), window or 0,
    )  # fmt: skip
    return out
