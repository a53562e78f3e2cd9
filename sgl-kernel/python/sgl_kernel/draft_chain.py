"""A whole chain of drafts in one call (compiled CPU operator): the steps of an assistant with a centroid head.

Its reference is the loop over forwards and ``centroid_argmax``. Only the clusters' scores are summed in another order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sgl_kernel.cpu_ops import cpu_ops
from sgl_kernel.decoder_layers import DecoderLayers, PagedRows, StepArguments, WeightArgument, weight_argument
from sgl_kernel.packed_linear import PackedWeight

_LONG, _POINTER = ctypes.c_long, ctypes.c_void_p


@dataclass(frozen=True, slots=True, eq=False)
class AssistantWeights:
    """What is before and behind an assistant's layers. Products in panels.

    ``embed`` [V, Dt] of the target, to be scaled; ``inv_freq`` [d / 2] of each kind of layer, at most two; ``head``
    [V, D] by clusters, each a multiple of 32 rows; ``ordering`` [C, V / C] int64: the token of each row.
    """

    embed: torch.Tensor
    embed_scale: float
    pre_projection: PackedWeight
    first_norm: torch.Tensor
    inv_freq: Sequence[torch.Tensor]
    post_projection: PackedWeight
    centroids: PackedWeight
    head: PackedWeight
    ordering: torch.Tensor
    top_k: int


class DraftChain:
    """An assistant made ready for the operator. Holds what it was made of."""

    def __init__(self, layers: DecoderLayers, weights: AssistantWeights) -> None:
        ops = cpu_ops()
        assert ops is not None and weights.embed.is_contiguous()
        self._run = ops.sgl_draft_chain
        self._layers, self._weights = layers, weights
        self._halves = [len(table) for table in weights.inv_freq]
        self._backbone = weights.embed.shape[1]
        self._num_scores = max(weights.centroids.num_rows, weights.ordering.shape[1])
        tables = (weights.inv_freq[0], weights.inv_freq[-1])
        self._described = _Assistant(
            weights.embed.data_ptr(), weights.first_norm.data_ptr(), tuple(table.data_ptr() for table in tables),
            *map(weight_argument, (weights.pre_projection, weights.post_projection, weights.centroids, weights.head)),
            weights.ordering.data_ptr(), self._backbone, tuple(map(len, tables)), weights.ordering.shape[1],
            weights.top_k, weights.embed_scale,
        )  # fmt: skip

    def __call__(self, tokens: torch.Tensor, hidden: torch.Tensor, num_steps: int, rows: PagedRows) -> torch.Tensor:
        """``tokens`` [B] int64: the newest of each request; ``hidden`` [B, Dt]: the state that predicted it; ``rows``:
        one a request -> [B, num_steps + 1] int64, ``tokens`` and the best draft after each.
        """
        batch = len(tokens)
        chain = torch.empty((batch, num_steps + 1), dtype=torch.int64)
        chain[:, 0] = tokens
        states = hidden.contiguous().clone()
        rope = [(torch.empty((batch, 2 * half)), torch.empty((batch, 2 * half))) for half in self._halves]
        x, normed = torch.empty((2, batch, self._layers.hidden_size))
        step = StepArguments(x, normed, None, rope, None, rows, self._layers.widest)
        beside = torch.empty((batch, 2 * self._backbone))
        scores, clusters = torch.empty(self._num_scores), torch.empty(self._weights.top_k, dtype=torch.int64)
        self._run(
            self._layers.described, len(self._layers.described), step.address, self._layers.widest, self._layers.eps,
            ctypes.byref(self._described), states.data_ptr(), chain.data_ptr(), num_steps, beside.data_ptr(),
            scores.data_ptr(), clusters.data_ptr(),
        )  # fmt: skip
        return chain


class _Assistant(ctypes.Structure):
    _fields_ = [
        ("embed", _POINTER),
        ("first_norm", _POINTER),
        ("inv_freq", _POINTER * 2),
        *((name, WeightArgument) for name in ("pre", "post", "centroids", "head")),
        ("ordering", _POINTER),
        ("backbone", _LONG),
        ("half", _LONG * 2),
        ("per", _LONG),
        ("top_k", _LONG),
        ("embed_scale", ctypes.c_float),
    ]
