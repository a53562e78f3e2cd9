"""Attention in plain torch: the CPU backend, and the oracle of every other one.

Shapes: B requests in a group, N query rows each, T = B * N, L keys, H query heads, KH key heads, G = H / KH, D width.
Requests with the same number of query rows form one group, which gathers its keys once per physical layer and runs one
padded product; layers that read the same KV (shared or borrowed layers, all steps of a draft) reuse that gather.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from sgl_kernel.attention_decode import MAX_ROWS, attend_paged, can_attend_paged
from sgl_kernel.decoder_layers import PagedRows
from sgl_kernel.paged_attention import row_counts
from sglang.srt.mem_cache.kv_pool import LayerKV
from sglang.srt.model_executor.forward_batch_info import AttnGeometry, HostLens

# Long prefills are cut so that mask and scores stay small: query rows x keys of one product.
_MAX_SCORES = 1 << 22


@dataclass(frozen=True, slots=True)
class _Span:
    """The keys one group sees on layers of one window. ``slots`` [B * L] int32; ``mask`` [B, 1, N * G, L] or None."""

    slots: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Group:
    """Requests with equal query counts. ``rows`` [T] picks their query rows (None: all rows, in order)."""

    rows: torch.Tensor | None
    req_rows: torch.Tensor
    kv_lens_device: torch.Tensor
    positions: torch.Tensor
    num_requests: int
    q_len: int
    kv_lens: tuple[int, ...]
    first_positions: tuple[int, ...]
    tree_mask: torch.Tensor | None = None


class TorchNativeAttnBackend:
    """``compiled=False`` keeps to torch where a compiled operator could serve: the form others are held to."""

    def __init__(self, req_to_token: torch.Tensor, *, compiled: bool = True) -> None:
        self._req_to_token = req_to_token
        self._compiled = compiled

    def init_forward_metadata(self, geometry: AttnGeometry) -> TorchNativePlan:
        return TorchNativePlan(_groups(geometry), self._req_to_token, self._compiled)


def _groups(g: AttnGeometry) -> list[_Group]:
    if g.row_ends is not None:
        g = _with_row_counts(g, g.row_ends)
    num = len(g.q_lens_cpu)
    host = g.host or _read_lens(g)
    lens = sorted(set(g.q_lens_cpu))
    if len(lens) == 1:
        return [
            _Group(
                None,
                g.req_pool_indices,
                g.kv_lens,
                g.positions,
                num,
                lens[0],
                host.kv_lens,
                host.first_positions,
                g.tree_mask,
            )
        ]
    assert g.tree_mask is None, f"a tree has the same number of rows for every request, got {g.q_lens_cpu}"
    starts = torch.tensor([0, *g.q_lens_cpu]).cumsum(0).tolist()
    groups = []
    for q_len in lens:
        members = [b for b, n in enumerate(g.q_lens_cpu) if n == q_len]
        rows = torch.cat([torch.arange(starts[b], starts[b] + q_len) for b in members]).to(g.positions.device)
        picked = torch.tensor(members, device=g.positions.device)
        groups.append(
            _Group(
                rows,
                g.req_pool_indices[picked],
                g.kv_lens[picked],
                g.positions[rows],
                len(members),
                q_len,
                tuple(host.kv_lens[b] for b in members),
                tuple(host.first_positions[b] for b in members),
            )
        )
    return groups


def _with_row_counts(g: AttnGeometry, row_ends: torch.Tensor) -> AttnGeometry:
    """``g`` without the requests that have no row, and with the number of rows of each on the host."""
    counts = row_counts(row_ends)
    there = counts.nonzero().view(-1)
    return replace(
        g,
        req_pool_indices=g.req_pool_indices[there],
        kv_lens=g.kv_lens[there],
        q_lens_cpu=tuple(counts[there].tolist()),
        row_ends=None,
    )


def _read_lens(g: AttnGeometry) -> HostLens:
    """This backend plans on the host; a geometry that lives on the device alone is read back."""
    firsts = torch.tensor([0, *g.q_lens_cpu[:-1]]).cumsum(0).to(g.positions.device)
    return HostLens(tuple(g.kv_lens.tolist()), tuple(g.positions[firsts].tolist()))


class TorchNativePlan:
    def __init__(self, groups: list[_Group], req_to_token: torch.Tensor, compiled: bool) -> None:
        self._groups = groups
        self._req_to_token = req_to_token
        self._compiled = compiled
        self._spans: dict[tuple[int, int | None, int], _Span] = {}
        self._gathered: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(self, q: torch.Tensor, kv: LayerKV) -> torch.Tensor:
        """``q`` [T, H, D] -> [T, H, D]; softmax in float32, scale 1."""
        if len(self._groups) == 1:
            return self._attend_group(0, q, kv)
        out = torch.empty_like(q)
        for index, group in enumerate(self._groups):
            assert group.rows is not None
            out[group.rows] = self._attend_group(index, q[group.rows], kv)
        return out

    def few_rows(self) -> PagedRows | None:
        group = self._groups[0]
        if not self._compiled or len(self._groups) > 1 or group.q_len > MAX_ROWS:
            return None
        return PagedRows(
            self._req_to_token,
            group.req_rows,
            group.kv_lens_device,
            group.positions,
            max(group.kv_lens),
            group.tree_mask,
        )

    def _attend_group(self, index: int, q: torch.Tensor, kv: LayerKV) -> torch.Tensor:
        group = self._groups[index]
        if group.q_len <= MAX_ROWS and self._compiled and can_attend_paged(q, kv.key, kv.value):
            return self._attend_paged(index, q, kv)
        batch, q_len = group.num_requests, group.q_len
        heads, width = q.shape[1], q.shape[2]
        kv_heads = kv.key.shape[1]
        ratio = heads // kv_heads
        span = self._span(index, kv.window, ratio)
        key, value = self._gather(index, kv, span)
        # all query heads of a KV head and all rows of a request share one product: [B, KH, N * G, D]
        folded = q.view(batch, q_len, kv_heads, ratio, width).permute(0, 2, 1, 3, 4)
        folded = folded.reshape(batch, kv_heads, q_len * ratio, width)
        out = _attention(folded, key, value, span.mask)
        out = out.view(batch, kv_heads, q_len, ratio, width).permute(0, 2, 1, 3, 4)
        return out.reshape(q.shape)

    def _attend_paged(self, index: int, q: torch.Tensor, kv: LayerKV) -> torch.Tensor:
        group = self._groups[index]
        return attend_paged(
            q,
            kv.key,
            kv.value,
            self._req_to_token,
            group.req_rows,
            group.kv_lens_device,
            group.positions,
            max(group.kv_lens),
            kv.window,
            group.tree_mask,
        )

    def _gather(self, index: int, kv: LayerKV, span: _Span) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the span, [B, KH, L, D] each."""
        found = self._gathered.get((index, kv.layer_id))
        if found is None:
            shape = (self._groups[index].num_requests, -1, *kv.key.shape[1:])
            found = (
                kv.key.index_select(0, span.slots).view(shape).transpose(1, 2),
                kv.value.index_select(0, span.slots).view(shape).transpose(1, 2),
            )
            self._gathered[index, kv.layer_id] = found
        return found

    def _span(self, index: int, window: int | None, ratio: int) -> _Span:
        span = self._spans.get((index, window, ratio))
        if span is None:
            span = _make_span(self._groups[index], self._req_to_token, window, ratio)
            self._spans[index, window, ratio] = span
        return span


def _make_span(group: _Group, req_to_token: torch.Tensor, window: int | None, ratio: int) -> _Span:
    """Each request's keys are ``starts[b] .. starts[b] + L``, L the longest span of the group."""
    firsts = group.first_positions if window is not None else (0,) * group.num_requests
    starts = [max(0, first - window + 1) if window is not None else 0 for first in firsts]
    lens = [kv_len - start for kv_len, start in zip(group.kv_lens, starts, strict=True)]
    longest = max(lens)
    device = req_to_token.device
    if group.num_requests == 1:
        slots = req_to_token[group.req_rows[0], starts[0] : starts[0] + longest]
        key_pos = torch.arange(starts[0], starts[0] + longest, device=device)[None, :]
        kv_lens = None
    else:
        offsets = torch.arange(longest, device=device)
        key_pos = torch.tensor(starts, device=device)[:, None] + offsets
        kv_lens = group.kv_lens_device
        # rows past a request's end read its last slot and are masked out
        slots = req_to_token[group.req_rows[:, None], torch.minimum(key_pos, kv_lens[:, None] - 1)].reshape(-1)
    uniform = min(lens) == longest
    if (
        group.q_len == 1
        and uniform
        and all(k <= f + 1 for k, f in zip(group.kv_lens, group.first_positions, strict=True))
    ):
        return _Span(slots, None)  # one query after (or at) the last key, window cut exactly: everything is visible
    q_pos = group.positions.view(group.num_requests, group.q_len, 1)
    keys = key_pos[:, None, :]
    visible = keys <= q_pos
    if window is not None:
        visible &= keys > q_pos - window
    if kv_lens is not None:
        visible &= keys < kv_lens[:, None, None]
    if group.tree_mask is not None:
        visible = _with_tree(visible, key_pos, group.kv_lens_device, group.tree_mask)
    mask = torch.zeros(visible.shape, device=device).masked_fill_(~visible, float("-inf"))
    return _Span(slots, mask.repeat_interleave(ratio, dim=1)[:, None])


def _with_tree(
    visible: torch.Tensor, key_pos: torch.Tensor, kv_lens: torch.Tensor, tree_mask: torch.Tensor
) -> torch.Tensor:
    """``visible`` [B, N, L], with the last N of ``kv_lens`` keys [B] as ``tree_mask`` [B, N, N] has them."""
    num = tree_mask.shape[1]
    node = key_pos - (kv_lens[:, None] - num)
    is_node = (node >= 0) & (node < num)
    seen = tree_mask.bool().gather(2, node.clamp(0, num - 1)[:, None, :].expand(*visible.shape))
    return torch.where(is_node[:, None, :], seen, visible)


def _attention(q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """``q`` [B, KH, M, D], ``key``/``value`` [B, KH, L, D], ``mask`` [B, 1, M, L] -> [B, KH, M, D]."""
    if mask is not None:
        mask = mask.to(q.dtype)
    rows = max(1, _MAX_SCORES // (key.shape[0] * key.shape[2]))
    if q.shape[2] <= rows:
        return F.scaled_dot_product_attention(q, key, value, attn_mask=mask, scale=1.0)
    parts = []
    for start in range(0, q.shape[2], rows):
        part_mask = None if mask is None else mask[:, :, start : start + rows]
        part = q[:, :, start : start + rows]
        parts.append(F.scaled_dot_product_attention(part, key, value, attn_mask=part_mask, scale=1.0))
    return torch.cat(parts, dim=2)
