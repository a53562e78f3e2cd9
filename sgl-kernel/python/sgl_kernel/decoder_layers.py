"""All decoder layers over the few rows of a decode step in one call (compiled CPU operator).

A step of a small model is some hundred operators of microseconds each, so that calling them from Python costs as much
as what they do. This is the same operators in the same order: results are the same to the bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sgl_kernel.cpu_ops import address, cpu_ops
from sgl_kernel.packed_linear import PackedWeight

_LONG, _POINTER = ctypes.c_long, ctypes.c_void_p


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One layer: dense, with or without per-layer input. All float32 on a CPU; products in panels.

    ``head_weights`` [query and key heads, d]; norms [D]; ``scale`` [1]; ``key``, ``value`` [slots, KH, d], which it
    writes if ``owns_kv``; ``window`` in tokens or None; ``rope``: which of the step's tables it takes.
    """

    qkv: PackedWeight
    o: PackedWeight
    gate_up: PackedWeight
    down: PackedWeight
    ple: tuple[PackedWeight, PackedWeight] | None
    head_weights: torch.Tensor
    post_attention_norm: torch.Tensor
    pre_mlp_norm: torch.Tensor
    post_mlp_norm: torch.Tensor
    post_ple_norm: torch.Tensor | None
    next_norm: torch.Tensor
    scale: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    owns_kv: bool
    window: int | None
    rope: int


@dataclass(frozen=True, slots=True, eq=False)
class PagedRows:
    """Where the rows of a forward stand; tensors as in ``sgl_kernel.attention_decode.attend_paged``."""

    req_to_token: torch.Tensor
    req_rows: torch.Tensor
    kv_lens: torch.Tensor
    positions: torch.Tensor
    max_kv_len: int
    tree_mask: torch.Tensor | None


class DecoderLayers:
    """Layers made ready for the operator, which must exist (``cpu_ops``). They hold what they were made of."""

    def __init__(self, layers: Sequence[LayerWeights], hidden_size: int, eps: float) -> None:
        ops = cpu_ops()
        assert ops is not None
        self._run = ops.sgl_decoder_layers
        self._layers = tuple(layers)
        self.hidden_size, self.eps = hidden_size, eps
        described = [_describe(layer) for layer in layers]
        self.described = (_Layer * len(described))(*described)
        self.widest = max(_widest(layer) for layer in described)

    def run(self, step: StepArguments) -> torch.Tensor:
        """``normed`` of ``step``: the last layer's output through the norm behind it, [T, D]."""
        self._run(self.described, len(self.described), step.address, self.widest, self.eps)
        return step.normed


class StepArguments:
    """What a step brings, as the operators take it; holds the memory that it points to."""

    def __init__(
        self,
        x: torch.Tensor,
        normed: torch.Tensor,
        ple: torch.Tensor | None,
        rope: Sequence[tuple[torch.Tensor, torch.Tensor]],
        out_cache_loc: torch.Tensor | None,
        rows: PagedRows,
        widest: int,
    ) -> None:
        """``x`` [T, D]: the input of the first layer; ``normed`` [T, D]: the same through its first norm. Both become
        the last layer's output, the second through the norm behind it. ``ple`` [layers, T, P]; ``rope``: cos and signed
        sin [T, 1, d] of each kind of layer, at most two; ``out_cache_loc`` [T] int64 for layers that own KV;
        ``widest``: of the layers.
        """
        assert x.is_contiguous() and normed.is_contiguous(), f"{x.shape=} {normed.shape=}"
        self.normed = normed
        num_rows, hidden = x.shape
        tree = rows.tree_mask
        assert ple is None or ple.stride(2) == 1
        ple_strides = (0, 0) if ple is None else ple.stride()[:2]
        scratch = torch.empty(2 * num_rows * (widest + hidden))
        attention_scratch = torch.empty(4 * rows.max_kv_len)
        seen = torch.empty(0 if tree is None else rows.max_kv_len, dtype=torch.int32)
        self._held = (x, ple, rope, out_cache_loc, rows, scratch, attention_scratch, seen)
        (cos, sin), (other_cos, other_sin) = rope[0], rope[-1]
        self._step = _Step(
            x.data_ptr(), normed.data_ptr(), address(ple), (cos.data_ptr(), other_cos.data_ptr()),
            (sin.data_ptr(), other_sin.data_ptr()), address(out_cache_loc), rows.req_rows.data_ptr(),
            rows.kv_lens.data_ptr(), rows.positions.data_ptr(), rows.req_to_token.data_ptr(), address(tree),
            scratch.data_ptr(), attention_scratch.data_ptr(), seen.data_ptr(), *ple_strides, num_rows,
            len(rows.req_rows), hidden, rows.req_to_token.stride(0),
        )  # fmt: skip
        self.address = ctypes.byref(self._step)


class WeightArgument(ctypes.Structure):
    _fields_ = [("panels", _POINTER), ("n", _LONG), ("k", _LONG), ("narrow", _LONG)]


_WEIGHTS = ("qkv", "o", "gate_up", "down", "ple_gate", "ple_projection")
_VECTORS = (
    "head_weights",
    "post_attention_norm",
    "pre_mlp_norm",
    "post_mlp_norm",
    "post_ple_norm",
    "next_norm",
    "scale",
)
_NUMBERS = ("heads", "heads_in", "rotated", "values", "kv_heads", "d", "window", "rope")


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, WeightArgument) for name in _WEIGHTS),
        *((name, _POINTER) for name in (*_VECTORS, "key", "value")),
        *((name, _LONG) for name in _NUMBERS),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, _POINTER) for name in ("x", "normed", "ple")),
        ("cos", _POINTER * 2),
        ("sin", _POINTER * 2),
        *((name, _POINTER) for name in ("locs", "req_rows", "lens", "positions", "req_to_token", "tree")),
        *((name, _POINTER) for name in ("scratch", "attention_scratch", "seen")),
        *((name, _LONG) for name in ("ple_layer", "ple_row", "rows", "batch", "hidden", "row_len")),
    ]


def _describe(layer: LayerWeights) -> _Layer:
    width = layer.key.shape[2]
    kv_heads = layer.key.shape[1]
    rotated = len(layer.head_weights)
    queries = rotated - (kv_heads if layer.owns_kv else 0)
    gate, projection = layer.ple or (None, None)
    weights = (layer.qkv, layer.o, layer.gate_up, layer.down, gate, projection)
    described = _Layer(*(weight_argument(weight) for weight in weights))
    for name in (*_VECTORS, "key", "value"):
        setattr(described, name, address(getattr(layer, name)))
    described.heads, described.heads_in, described.rotated = queries, layer.qkv.num_rows // width, rotated
    described.values, described.kv_heads, described.d = kv_heads if layer.owns_kv else 0, kv_heads, width
    described.window, described.rope = layer.window or 0, layer.rope
    return described


def weight_argument(weight: PackedWeight | None) -> WeightArgument:
    if weight is None:
        return WeightArgument()
    assert weight.panels is not None
    panels = weight.panels
    return WeightArgument(panels.data_ptr(), weight.num_rows, panels.shape[1], panels.dtype is torch.bfloat16)


def _widest(layer: _Layer) -> int:
    """Floats per row of the largest intermediate result."""
    heads = max(layer.heads_in, layer.rotated + layer.values)
    return max(heads * layer.d, *(getattr(layer, name).n for name in _WEIGHTS))
