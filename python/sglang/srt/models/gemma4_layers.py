"""The decoder layers of Gemma 4: dense, K = V, per-layer embeddings with KV sharing, mixture of experts.

Shapes: T rows, D hidden width, H / K query / KV heads, d head width (by layer kind), P per-layer-embedding width.
Layer objects are plain Python with tensors as attributes: there is no autograd and nothing to hook.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from sgl_kernel.head_norm_rope import query_norm_rope
from sgl_kernel.moe import add_experts
from sglang.srt.configs.model_config import FULL, LayerKVSpec, TextConfig
from sglang.srt.distributed.parallel_state import TpGroup
from sglang.srt.distributed.sharding import WeightSlot, shard, shard_pair
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import Linear, RowParallelLinear
from sglang.srt.layers.moe import MoE
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

RopeTables = dict[str, tuple[torch.Tensor, torch.Tensor]]
WeightSlots = dict[str, WeightSlot]


@dataclass(frozen=True, slots=True)
class Build:
    """What every layer needs to be made. ``group``: the ranks that share its weights."""

    text: TextConfig
    dtype: torch.dtype
    device: torch.device
    row_invariant: bool = False
    group: TpGroup = field(default_factory=TpGroup)
    linears: list[Linear] = field(default_factory=list)  # all that were made, to be finished after loading

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=self.dtype, device=self.device)

    def norm(self, width: int) -> RMSNorm:
        return RMSNorm(width, self.text.rms_norm_eps, self.dtype, self.device)

    def linear(self, in_features: int, *widths: int) -> Linear:
        product = Linear(in_features, widths, self.dtype, self.device, row_invariant=self.row_invariant)
        self.linears.append(product)
        return product

    def row_linear(self, in_features: int, out_features: int) -> RowParallelLinear:
        """``in_features``: of this rank."""
        product = RowParallelLinear(
            in_features, out_features, self.dtype, self.device, self.group, row_invariant=self.row_invariant
        )
        self.linears.append(product)
        return product


class Gemma4Attention:
    """Attention of one layer. A layer that does not own KV has a query projection only. A rank has a part of the query
    heads, and the KV heads that they read.

    Where K = V, the value is the raw key projection, normed without weight and not rotated.
    """

    def __init__(self, build: Build, spec: LayerKVSpec) -> None:
        text, group = build.text, build.group
        self.spec, self.head_dim, self.kind = spec, spec.head_dim, spec.kind
        self.total_heads, self.heads, self.kv_heads = (
            text.num_heads,
            group.part(text.num_heads),
            group.kv_heads(spec.num_kv_heads),
        )
        self.num_heads = len(self.heads)
        self.owns_kv = spec.owns_kv
        self.num_kv_heads = len(self.kv_heads) if self.owns_kv else 0
        self.k_is_v = text.attention_k_eq_v and spec.kind == FULL
        self.eps = text.rms_norm_eps
        q_width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        widths = (
            [q_width] if not self.owns_kv else [q_width, kv_width] if self.k_is_v else [q_width, kv_width, kv_width]
        )
        self.qkv_proj = build.linear(text.hidden_size, *widths)
        self.o_proj = build.row_linear(q_width, text.hidden_size)
        self.q_norm = build.empty(self.head_dim)
        self.k_norm = build.empty(self.head_dim) if self.owns_kv else None
        self.head_weights = build.empty(self.num_heads + self.num_kv_heads, self.head_dim)
        self.attn = RadixAttention(spec.owner)

    def __call__(self, x: torch.Tensor, rope: RopeTables, fb: ForwardBatch) -> torch.Tensor:
        """``x`` [T, D] -> [T, D] or parts."""
        cos, sin = rope[self.kind]
        merged = self.qkv_proj.parts(x)
        heads = merged.view(*merged.shape[:-1], -1, self.head_dim)
        if self.owns_kv:
            queries = self.attn.store(heads, self.head_weights, cos, sin, self.eps, fb)
        else:
            queries = query_norm_rope(heads, self.head_weights, cos, sin, self.eps)
        return self.o_proj.parts(self.attn.attend(queries, fb).flatten(1))

    def weight_slots(self, prefix: str) -> WeightSlots:
        first, total = self.heads.start * self.head_dim, self.total_heads * self.head_dim
        slots: WeightSlots = {
            prefix + "q_proj.weight": shard(self.qkv_proj.part(0), 0, first, total),
            prefix + "o_proj.weight": shard(self.o_proj.weight, 1, first, total),
            prefix + "q_norm.weight": self.q_norm,
        }
        if self.k_norm is not None:
            first, total = self.kv_heads.start * self.head_dim, self.spec.num_kv_heads * self.head_dim
            slots[prefix + "k_proj.weight"] = shard(self.qkv_proj.part(1), 0, first, total)
            slots[prefix + "k_norm.weight"] = self.k_norm
            if not self.k_is_v:
                slots[prefix + "v_proj.weight"] = shard(self.qkv_proj.part(2), 0, first, total)
        return slots

    def finish_loading(self) -> None:
        self.head_weights[: self.num_heads] = self.q_norm
        if self.k_norm is not None:
            self.head_weights[self.num_heads :] = self.k_norm


class Gemma4MLP:
    """A rank has a part of the width."""

    def __init__(self, build: Build, width: int) -> None:
        self.total_width, self.width = width, build.group.part(width)
        self.gate_up_proj = build.linear(build.text.hidden_size, len(self.width), len(self.width))
        self.down_proj = build.row_linear(len(self.width), build.text.hidden_size)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, D] -> [T, D] or parts."""
        return self.down_proj.parts(self.gate_up_proj.gated_gelu(x))

    def here(self, x: torch.Tensor) -> torch.Tensor:
        """What this rank has of the result."""
        return self.down_proj.parts_here(self.gate_up_proj.gated_gelu(x))

    def weight_slots(self, prefix: str) -> WeightSlots:
        first, total = self.width.start, self.total_width
        return {
            prefix + "gate_proj.weight": shard(self.gate_up_proj.part(0), 0, first, total),
            prefix + "up_proj.weight": shard(self.gate_up_proj.part(1), 0, first, total),
            prefix + "down_proj.weight": shard(self.down_proj.weight, 1, first, total),
        }


class Gemma4SparseBlock:
    """The experts that run beside the dense MLP, with their three norms."""

    def __init__(self, build: Build) -> None:
        text = build.text
        assert text.moe is not None
        self.moe = MoE(text.hidden_size, text.moe, text.rms_norm_eps, build.dtype, build.device, build.group)
        self.total_width = text.moe.intermediate_size
        self.post_norm_1 = build.norm(text.hidden_size)
        self.post_norm_2 = build.norm(text.hidden_size)
        self.pre_norm_2 = build.norm(text.hidden_size)

    def __call__(
        self,
        dense: torch.Tensor,
        residual: torch.Tensor,
        normed: torch.Tensor,
        norm: RMSNorm,
        scale: torch.Tensor,
        following: RMSNorm,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rest of the layer: the new stream, and the same through ``following``.

        ``dense``: what this rank has of the dense MLP's output, [T, D] or parts; ``residual``: what both branches
        started from; ``normed``: the same through ``pre_norm_2``; ``norm``: the norm of the branches' sum; ``scale``
        [1].
        """
        dense, pairs, weights = self.moe.over_ranks(dense, *self.moe.pairs(residual, normed))
        norms = (self.post_norm_1.weight, self.post_norm_2.weight, norm.weight)
        return add_experts(dense, pairs, weights, residual, norms, norm.eps, scale, following.weight)

    def weight_slots(self, prefix: str) -> WeightSlots:
        first = self.moe.width.start
        return {
            prefix + "router.proj.weight": self.moe.router_proj,
            prefix + "router.scale": self.moe.router_scale,
            prefix + "router.per_expert_scale": self.moe.per_expert_scale,
            prefix + "experts.gate_up_proj": shard_pair(self.moe.gate_up, 1, first, self.total_width),
            prefix + "experts.down_proj": shard(self.moe.down, 2, first, self.total_width),
            prefix + "post_feedforward_layernorm_1.weight": self.post_norm_1.weight,
            prefix + "post_feedforward_layernorm_2.weight": self.post_norm_2.weight,
            prefix + "pre_feedforward_layernorm_2.weight": self.pre_norm_2.weight,
        }


class Gemma4PerLayerInput:
    """Adds one layer's share of the per-layer embedding to the residual stream. Small, so every rank has all of it."""

    def __init__(self, build: Build) -> None:
        width, hidden = build.text.per_layer_input_size, build.text.hidden_size
        self.gate = build.linear(hidden, width)
        self.projection = build.linear(width, hidden)
        self.post_norm = build.norm(hidden)

    def __call__(self, x: torch.Tensor, ple: torch.Tensor) -> torch.Tensor:
        """``x`` [T, D], ``ple`` [T, P] -> what is normed and added to ``x``, [T, D] or parts."""
        return self.projection.of_gated(self.gate.parts(x), ple)

    def weight_slots(self, prefix: str) -> WeightSlots:
        return {
            prefix + "per_layer_input_gate.weight": self.gate.weight,
            prefix + "per_layer_projection.weight": self.projection.weight,
            prefix + "post_per_layer_input_norm.weight": self.post_norm.weight,
        }


@dataclass(frozen=True, slots=True)
class Stream:
    """Between layers: the residual stream ``x`` [T, D], and the same through the norm that comes next."""

    x: torch.Tensor
    normed: torch.Tensor

    def rows(self, rows: torch.Tensor) -> Stream:
        return Stream(self.x[rows], self.normed[rows])


class Gemma4DecoderLayer:
    def __init__(self, build: Build, layer_id: int) -> None:
        text = build.text
        self.self_attn = Gemma4Attention(build, text.kv_layout.layers[layer_id])
        self.mlp = Gemma4MLP(build, text.mlp_width(layer_id))
        self.sparse = Gemma4SparseBlock(build) if text.moe is not None else None
        self.per_layer_input = Gemma4PerLayerInput(build) if text.per_layer_input_size else None
        self.input_norm = build.norm(text.hidden_size)
        self.post_attention_norm = build.norm(text.hidden_size)
        self.pre_feedforward_norm = build.norm(text.hidden_size)
        self.post_feedforward_norm = build.norm(text.hidden_size)
        self.layer_scalar = build.empty(1)

    def __call__(
        self, stream: Stream, ple: torch.Tensor | None, rope: RopeTables, fb: ForwardBatch, following: RMSNorm
    ) -> Stream:
        """``ple`` [T, P] or None; ``following``: the norm that comes after this layer."""
        out = self.self_attn(stream.normed, rope, fb)
        norm = self.post_feedforward_norm
        if self.sparse is not None:
            before = (self.pre_feedforward_norm, self.sparse.pre_norm_2)
            x, (normed, for_experts) = self.post_attention_norm.add_then_norm(stream.x, out, before)
            out = self.mlp.here(normed)
            return Stream(*self.sparse(out, x, for_experts, norm, self.layer_scalar, following))
        x, (normed,) = self.post_attention_norm.add_then_norm(stream.x, out, (self.pre_feedforward_norm,))
        out = self.mlp(normed)
        if self.per_layer_input is not None:
            assert ple is not None
            x, _ = norm.add_then_norm(x, out, ())
            norm, out = self.per_layer_input.post_norm, self.per_layer_input(x, ple)
        x, (normed,) = norm.add_then_norm(x, out, (following,), self.layer_scalar)
        return Stream(x, normed)

    def weight_slots(self, prefix: str) -> WeightSlots:
        slots = self.self_attn.weight_slots(prefix + "self_attn.") | self.mlp.weight_slots(prefix + "mlp.")
        for block in (self.sparse, self.per_layer_input):
            if block is not None:
                slots |= block.weight_slots(prefix)
        return slots | {
            prefix + "input_layernorm.weight": self.input_norm.weight,
            prefix + "post_attention_layernorm.weight": self.post_attention_norm.weight,
            prefix + "pre_feedforward_layernorm.weight": self.pre_feedforward_norm.weight,
            prefix + "post_feedforward_layernorm.weight": self.post_feedforward_norm.weight,
            prefix + "layer_scalar": self.layer_scalar,
        }
