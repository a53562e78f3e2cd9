"""Paged attention in Triton: the backend of CUDA devices.

Planning happens on the device, once per kind of layer, the first time a layer of that kind attends; nothing is read
back, so forwards of equal row counts can be captured in a graph.
"""

from __future__ import annotations

import torch

from sgl_kernel.paged_attention import (
    MAX_SPLIT_ROWS,
    HeadKind,
    PagedRows,
    PagedWork,
    paged_attention,
    plan_paged_attention,
)
from sglang.srt.mem_cache.kv_pool import LayerKV
from sglang.srt.model_executor.forward_batch_info import AttnGeometry


class TritonAttnBackend:
    """Serves the target and its assistant alike: what differs between layers is found out from q and the KV."""

    def __init__(self, req_to_token: torch.Tensor) -> None:
        self._req_to_token = req_to_token

    def init_forward_metadata(self, geometry: AttnGeometry) -> TritonAttnPlan:
        q_lens = geometry.q_lens_cpu
        # rows that only the host can tell apart go the way of prompts
        uniform = len(set(q_lens)) == 1 and q_lens[0] <= MAX_SPLIT_ROWS
        return TritonAttnPlan(
            PagedRows(
                self._req_to_token,
                geometry.req_pool_indices,
                geometry.kv_lens,
                geometry.positions,
                q_lens,
                geometry.max_kv_len,
                geometry.is_extend or not uniform,
                geometry.tree_mask,
                geometry.row_ends,
            )
        )


class TritonAttnPlan:
    """One geometry; ``attend`` prepares each kind of layer once."""

    def __init__(self, rows: PagedRows) -> None:
        self._rows = rows
        self._work: dict[HeadKind, PagedWork] = {}

    def attend(self, q: torch.Tensor, kv: LayerKV) -> torch.Tensor:
        """``q`` [T, H, D] -> [T, H, D]; softmax in float32, scale 1."""
        kind = HeadKind(q.shape[1], kv.key.shape[1], q.shape[2], q.dtype, kv.window)
        work = self._work.get(kind)
        if work is None:
            planned = self._work[kind] = plan_paged_attention(self._rows, kind)
            return paged_attention(q, kv.key, kv.value, self._rows, kind, planned)
        return paged_attention(q, kv.key, kv.value, self._rows, kind, work, planned_just_now=False)

    def few_rows(self) -> None:
        """Operators on a GPU attend by this plan."""
