"""One forward pass as tensors. Built complete, never edited.

Shapes: B requests, T query rows in this forward, R rows whose logits are wanted.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

import torch

from sgl_kernel.decoder_layers import PagedRows
from sglang.srt.mem_cache.kv_pool import KVCache, KVReader, LayerKV


class ForwardMode(Enum):
    EXTEND = auto()
    DECODE = auto()
    TARGET_VERIFY = auto()
    DRAFT = auto()


class CaptureHiddenMode(Enum):
    """Which rows of the final hidden state a forward returns beside the logits."""

    NULL = auto()
    LAST = auto()
    FULL = auto()


@dataclass(frozen=True, slots=True)
class HostLens:
    """Per request, what the host knows of a geometry: tokens in the pool, and the position of its first query row."""

    kv_lens: tuple[int, ...]
    first_positions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AttnGeometry:
    """All that attention planning may know; no speculative field can leak into a plan.

    Row ``t`` of request ``b`` sees key position ``k`` when ``k < kv_lens[b]`` and ``k <= positions[t]``, and on sliding
    layers also ``k > positions[t] - window``.

    req_pool_indices: [B] int64 rows of ``req_to_token``; kv_lens: [B] int64, tokens in the pool per request, counting
    those this forward writes; positions: [T] int64; q_lens_cpu: query rows per request, consecutive in the batch;
    max_kv_len: no request's ``kv_lens`` is larger; host: the lengths as the host has them, None in a captured forward,
    whose lengths are known on the device only; is_extend: rows of prompts, which are computed alike however many of
    them a request has in this forward; tree_mask: [B, N, N] uint8 or bool, for N rows per request whose keys are the
    last N: row i sees row j's key where it is set (None: by position); row_ends: [B] int64, the row behind each
    request's last, in a captured forward of prompts, whose ``q_lens_cpu`` is empty. A request may have no row there.
    """

    req_pool_indices: torch.Tensor
    kv_lens: torch.Tensor
    positions: torch.Tensor
    q_lens_cpu: tuple[int, ...]
    max_kv_len: int
    host: HostLens | None
    is_extend: bool = False
    tree_mask: torch.Tensor | None = None
    row_ends: torch.Tensor | None = None

    @classmethod
    def from_host(
        cls,
        req_pool_indices: torch.Tensor,
        positions: torch.Tensor,
        q_lens: tuple[int, ...],
        host: HostLens,
        *,
        is_extend: bool = False,
    ) -> AttnGeometry:
        """A geometry whose lengths the host knows."""
        kv_lens = torch.tensor(host.kv_lens, dtype=torch.int64, device=positions.device)
        return cls(req_pool_indices, kv_lens, positions, q_lens, max(host.kv_lens), host, is_extend)


@dataclass(frozen=True, slots=True)
class TreeRows:
    """The N rows of each request as nodes of a tree, where they are not one after the other.

    ``parents`` [B, N] int64: the node each one follows, the root (node 0) itself; ``depths`` [B, N] int64, 0 at the
    root; ``mask`` [B, N, N] bool: row i is set at node i and its ancestors.
    """

    parents: torch.Tensor
    depths: torch.Tensor
    mask: torch.Tensor


class AttnPlan(Protocol):
    """A geometry planned by one backend for one set of KV contents (one forward, or one draft round)."""

    def attend(self, q: torch.Tensor, kv: LayerKV) -> torch.Tensor:
        """``q`` [T, H, D] -> [T, H, D]; scale is exactly 1."""
        ...

    def few_rows(self) -> PagedRows | None:
        """The geometry for an operator that attends by itself, as some do over few rows; None where none may."""
        ...


@dataclass(frozen=True, slots=True)
class TailBatch:
    """The rows of an extend that layers without KV of their own still have to compute.

    Nothing reads keys or values of KV-sharing layers, so during prefill only rows whose logits are wanted go on.
    ``rows`` [R] int64 picks them; ``batch`` is the same forward restricted to them, with a read-only pool.
    """

    rows: torch.Tensor
    batch: ForwardBatch


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Tensors of one forward.

    input_ids, positions: [T] int64. A pool that can be written and ``out_cache_loc`` ([T] int64 slots) come together or
    not at all. ``logits_rows`` [R] int64 (None: every row). ``tail`` is set for an extend of a model that shares KV.
    """

    mode: ForwardMode
    input_ids: torch.Tensor
    positions: torch.Tensor
    token_to_kv_pool: KVReader
    out_cache_loc: torch.Tensor | None
    attn: AttnPlan
    capture_hidden_mode: CaptureHiddenMode
    logits_rows: torch.Tensor | None
    tail: TailBatch | None

    def __post_init__(self) -> None:
        writes = isinstance(self.token_to_kv_pool, KVCache)
        assert writes == (self.out_cache_loc is not None), (
            f"a writable KV pool and a write location come together: pool {type(self.token_to_kv_pool).__name__}, "
            f"out_cache_loc {'given' if self.out_cache_loc is not None else 'missing'}"
        )
