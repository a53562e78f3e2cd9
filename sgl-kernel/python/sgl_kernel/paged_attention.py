"""Attention over keys and values that lie in slots of a pool, for prompts, decode steps, verification and drafts.

Shapes: B requests, T query rows (consecutive per request), H query heads, KH KV heads, D head width. Scale is 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sgl_kernel.launch import triton_kernels

HEAD_DIMS = (16, 32, 64, 128, 256, 512)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_GROUP = 16
# more rows per request than this are a prompt
MAX_SPLIT_ROWS = 16


@dataclass(frozen=True, slots=True)
class PagedRows:
    """The query rows of a forward, and where their keys are.

    req_to_token: [R, max_len] int32, slot of each position; req_rows: [B] int64 rows of it; kv_lens: [B] int64;
    positions: [T] int64, those of a request start with its lowest and stay below that plus the number of its rows;
    q_lens: rows per request; max_kv_len: no ``kv_lens`` is larger; is_extend: the rows are parts of prompts, of any
    number; otherwise every request has the same number, at most ``MAX_SPLIT_ROWS``. tree_mask: [B, N, N] uint8 or bool
    or None: row i sees the key of row j, which is the N - j th from the end, where it is not 0. row_ends: [B] int64,
    the row behind each request's last, for prompts whose ``q_lens``, then empty, only the device knows; else None.
    """

    req_to_token: torch.Tensor
    req_rows: torch.Tensor
    kv_lens: torch.Tensor
    positions: torch.Tensor
    q_lens: tuple[int, ...]
    max_kv_len: int
    is_extend: bool
    tree_mask: torch.Tensor | None
    row_ends: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.row_ends is not None and (self.q_lens or not self.is_extend):
            raise ValueError(
                f"row ends on the device are for prompts of unknown lengths: {self.q_lens}, prompts: {self.is_extend}"
            )
        uniform = len(set(self.q_lens)) == 1 and self.q_lens[0] <= MAX_SPLIT_ROWS
        if not self.is_extend and not uniform:
            raise ValueError(
                f"rows per request must be equal and at most {MAX_SPLIT_ROWS} unless they are prompts: {self.q_lens}"
            )
        if self.tree_mask is not None:
            shape = (len(self.q_lens), self.q_lens[0], self.q_lens[0])
            if self.is_extend or self.tree_mask.shape != shape or not self.tree_mask.is_contiguous():
                raise ValueError(
                    f"a tree mask must be contiguous {list(shape)} for rows that are no prompts, "
                    f"got {list(self.tree_mask.shape)}, prompts: {self.is_extend}"
                )

    def read_q_lens(self) -> tuple[int, ...]:
        """Rows per request, from the device if they must be."""
        if self.row_ends is None:
            return self.q_lens
        return tuple(row_counts(self.row_ends).tolist())


def row_counts(row_ends: torch.Tensor) -> torch.Tensor:
    """Rows per request, [B], by the row behind each request's last."""
    return row_ends.diff(prepend=row_ends.new_zeros(1))


@dataclass(frozen=True, slots=True)
class HeadKind:
    """What distinguishes the layers of a model for attention. ``window``: a row sees that many positions, or None."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    window: int | None

    def __post_init__(self) -> None:
        if self.head_dim not in HEAD_DIMS:
            raise ValueError(f"paged attention: head width {self.head_dim} is not one of {HEAD_DIMS}")
        if self.dtype not in DTYPES:
            raise ValueError(f"paged attention: {self.dtype} is not one of {', '.join(map(str, DTYPES))}")
        if self.num_heads % self.num_kv_heads or self.num_heads > MAX_GROUP * self.num_kv_heads:
            raise ValueError(
                f"paged attention: {self.num_heads} query heads over {self.num_kv_heads} KV heads; "
                f"use a whole ratio of at most {MAX_GROUP}"
            )


# made by the Triton modules, which may not be imported without Triton
PagedWork = Any


def plan_paged_attention(rows: PagedRows, kind: HeadKind) -> PagedWork:
    """What the layers of one kind share in one forward; None on a CPU, where the reference needs nothing.

    Reads no lengths back, so it may be captured in a graph (prompts: with ``row_ends``; else their tiles come from the
    host).
    """
    if not rows.positions.is_cuda:
        return None
    if rows.is_extend:
        return triton_kernels("attention_extend").plan_extend(rows, kind)
    return triton_kernels("paged_attention").plan_decode(rows, kind)


def paged_attention(
    q: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: PagedRows,
    kind: HeadKind,
    work: PagedWork,
    *,
    planned_just_now: bool = True,
) -> torch.Tensor:
    """``q`` [T, H, D], each row contiguous; ``key``, ``value`` [slots, KH, D] contiguous -> [T, H, D].

    Row t of request b sees position k when k < kv_lens[b], k <= positions[t] and, with a window, k > positions[t] -
    window; a row that sees nothing gets zeros. A row's result depends bitwise on itself and its keys only. Softmax and
    sums are float32. ``work`` is ``plan_paged_attention(rows, kind)``; ``planned_just_now`` False promises that another
    kernel was launched since, so that this one may read the plan before the kernel before it has ended.
    """
    if not q.is_cuda:
        return paged_attention_torch(q, key, value, rows, kind.window)
    if rows.is_extend:
        return triton_kernels("attention_extend").attend_extend(q, key, value, rows, kind, work)
    return triton_kernels("paged_attention").attend_decode(
        q, key, value, rows, kind, work, planned_just_now=planned_just_now
    )


def paged_attention_torch(
    q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: PagedRows, window: int | None
) -> torch.Tensor:
    """The reference: one request after the other, scores and sums in float32 (float64 for float64 inputs)."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    exact = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // key.shape[1]
    kv_lens, first = rows.kv_lens.tolist(), 0
    for b, q_len in enumerate(rows.read_q_lens()):
        mine = slice(first, first + q_len)
        first += q_len
        slots = rows.req_to_token[rows.req_rows[b], : kv_lens[b]].long()
        keys, values = (x[slots].to(exact).repeat_interleave(group, dim=1) for x in (key, value))
        seen = _visible(rows, b, kv_lens[b], rows.positions[mine], window)
        scores = torch.einsum("nhd,khd->hnk", q[mine].to(exact), keys).masked_fill(~seen, float("-inf"))
        # a row without any key: softmax is nan, the result is 0
        weights = scores.softmax(-1).nan_to_num(0.0)
        out[mine] = torch.einsum("hnk,khd->nhd", weights, values).to(q.dtype)
    return out


def _visible(rows: PagedRows, b: int, kv_len: int, positions: torch.Tensor, window: int | None) -> torch.Tensor:
    """[N, kv_len] bool: what the rows of request ``b`` see."""
    keys = torch.arange(kv_len, device=positions.device)
    seen = keys <= positions[:, None]
    if window is not None:
        seen &= keys > positions[:, None] - window
    if rows.tree_mask is not None:
        seen[:, kv_len - len(positions) :] = rows.tree_mask[b] != 0
    return seen
