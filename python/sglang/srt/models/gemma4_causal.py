"""Gemma 4 text decoder: dense, K = V, per-layer embeddings with KV sharing, mixture of experts.

Shapes: T rows, D hidden width, H / K query / KV heads, d head width (by layer kind), P per-layer-embedding width,
n layers. Layer objects are plain Python with tensors as attributes: there is no autograd and nothing to hook.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch

from sgl_kernel.embedding import per_layer_inputs
from sgl_kernel.head_norm_rope import query_norm_rope
from sgl_kernel.moe import add_experts
from sgl_kernel.norm import sum_norm
from sglang.srt.configs.model_config import FULL, SLIDING, LayerKVSpec, ModelConfig, TextConfig
from sglang.srt.distributed.parallel_state import TpGroup
from sglang.srt.distributed.sharding import WeightSlot, shard, shard_pair
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import Linear, RowParallelLinear
from sglang.srt.layers.lm_head import ParallelLMHead
from sglang.srt.layers.logits_processor import LogitsProcessor, LogitsProcessorOutput
from sglang.srt.layers.moe import MoE
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary import RotaryEmbedding
from sglang.srt.layers.vocab_embedding import ScaledEmbedding, VocabParallelEmbedding
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.models.interfaces import WeightPlan

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


class DecoderStack:
    """Layers, final norm and rope: what target and assistant have in common."""

    def __init__(self, build: Build) -> None:
        text = build.text
        self.dtype = build.dtype
        self._linears = build.linears
        self.layers = [Gemma4DecoderLayer(build, i) for i in range(text.num_layers)]
        self.norm = build.norm(text.hidden_size)
        widths = {spec.kind: spec.head_dim for spec in text.kv_layout.layers}
        self.rotary = {
            kind: RotaryEmbedding(widths[kind], text.rope(kind), build.device)
            for kind in (SLIDING, FULL)
            if kind in widths
        }

    def start(self, x: torch.Tensor) -> Stream:
        """``x`` [T, D] or parts, the input of layer 0."""
        norm = self.layers[0].input_norm
        return Stream(*sum_norm(x, norm.weight, norm.eps))

    def following(self, layer_id: int) -> RMSNorm:
        """The norm behind a layer."""
        return self.norm if layer_id + 1 == len(self.layers) else self.layers[layer_id + 1].input_norm

    def rope_tables(self, positions: torch.Tensor) -> RopeTables:
        return {kind: rotary.tables(positions, self.dtype) for kind, rotary in self.rotary.items()}

    def weight_slots(self, prefix: str) -> WeightSlots:
        slots: WeightSlots = {prefix + "norm.weight": self.norm.weight}
        for i, layer in enumerate(self.layers):
            slots |= layer.weight_slots(f"{prefix}layers.{i}.")
        return slots

    def finish_loading(self) -> None:
        for layer in self.layers:
            layer.self_attn.finish_loading()
        for product in self._linears:
            product.finish_loading()


class PerLayerEmbedding:
    """The token- and context-dependent input of every layer, computed once per forward.

    The table is the largest tensor of a small model, so a rank has a part of its rows.
    """

    def __init__(self, build: Build) -> None:
        text = build.text
        width = text.per_layer_input_size
        total = text.num_layers * width
        self.vocab_size = text.per_layer_vocab_size
        self.embed = VocabParallelEmbedding(self.vocab_size, total, width**0.5, build.dtype, build.device, build.group)
        self.projection = build.linear(text.hidden_size, total)
        self.projection_gain = text.hidden_size**-0.5
        self.norm = build.norm(width)

    def __call__(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """``ids`` [T], ``x`` [T, D] (the scaled embedding) -> [n, T, P]."""
        (table, rows), context = self.embed.rows(ids), self.projection.parts(x)
        return per_layer_inputs(
            rows, table, self.embed.scale, context, self.projection_gain, self.norm.weight, self.norm.eps
        )

    def weight_slots(self, prefix: str) -> WeightSlots:
        return {
            prefix + "embed_tokens_per_layer.weight": shard(
                self.embed.weight, 0, self.embed.ids.start, self.vocab_size
            ),
            prefix + "per_layer_model_projection.weight": self.projection.weight,
            prefix + "per_layer_projection_norm.weight": self.norm.weight,
        }


class Gemma4ForCausalLM:
    """A flat text checkpoint. ``weight_prefix`` is where the decoder's tensors live in the file."""

    weight_prefix = "model."

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        row_invariant: bool = False,
        group: TpGroup | None = None,
    ) -> None:
        """``row_invariant``: no row's result may depend on the rows computed with it; ``group``: the ranks that share
        the model, None for the only one.

        Every rank has the whole embedding: its rows are needed by every draft, one after the other, and an exchange in
        each of them takes longer than it is worth.
        """
        text = config.text
        build = Build(text, dtype, device, row_invariant, group or TpGroup())
        self.text = text
        self.kv_layout = text.kv_layout
        self.embed_tokens = ScaledEmbedding(text.vocab_size, text.hidden_size, text.hidden_size**0.5, dtype, device)
        self.stack = DecoderStack(build)
        self.per_layer = PerLayerEmbedding(build) if text.per_layer_input_size else None
        self._ids = build.group.part(text.vocab_size)
        tied = self.embed_tokens.weight[self._ids.start : self._ids.stop]
        self.lm_head = ParallelLMHead(tied, build.group, row_invariant=row_invariant)
        self._is_tied = True
        self.logits_processor = LogitsProcessor(text.final_logit_softcapping)

    def forward(self, fb: ForwardBatch) -> LogitsProcessorOutput:
        """One pass over the rows of ``fb``; see ``ForwardBatch`` for shapes."""
        hidden, fb = self._hidden(fb)
        return self.logits_processor(hidden, self.lm_head, fb)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden`` [R, D] after the final norm -> [R, V]."""
        return self.logits_processor.logits(hidden, self.lm_head)

    def greedy_tokens(self, fb: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The most likely token after each row whose logits are wanted, [R] int64; and the hidden states [T, D] after
        the final norm."""
        hidden, fb = self._hidden(fb)
        rows = hidden if fb.logits_rows is None else hidden[fb.logits_rows]
        return self.lm_head.best(rows, self.text.final_logit_softcapping), hidden

    def _hidden(self, fb: ForwardBatch) -> tuple[torch.Tensor, ForwardBatch]:
        """Hidden states after the final norm, and the batch whose rows they are."""
        x = self.embed_tokens(fb.input_ids)
        ple = None if self.per_layer is None else self.per_layer(fb.input_ids, x)
        rope = self.stack.rope_tables(fb.positions)
        stream = self.stack.start(x)
        for i, layer in enumerate(self.stack.layers):
            if i == self.text.first_kv_shared_layer and fb.tail is not None:
                stream, ple, rope, fb = self._keep_tail(stream, ple, fb)
            stream = layer(stream, None if ple is None else ple[i], rope, fb, self.stack.following(i))
        return stream.normed, fb

    def _keep_tail(
        self, stream: Stream, ple: torch.Tensor | None, fb: ForwardBatch
    ) -> tuple[Stream, torch.Tensor | None, RopeTables, ForwardBatch]:
        """Drop the rows nobody reads any more: from here on no layer writes KV."""
        assert fb.tail is not None
        rows, tail = fb.tail.rows, fb.tail.batch
        return (
            stream.rows(rows),
            None if ple is None else ple[:, rows].contiguous(),
            self.stack.rope_tables(tail.positions),
            tail,
        )

    def get_embed_and_head(self) -> tuple[ScaledEmbedding, torch.Tensor]:
        """The scaled embedding, and this rank's rows of the head, [V / ranks, D]."""
        return self.embed_tokens, self.lm_head.weight

    def weight_plan(self, available: Collection[str]) -> WeightPlan:
        prefix = self.weight_prefix
        slots = self.stack.weight_slots(prefix) | {prefix + "embed_tokens.weight": self.embed_tokens.weight}
        if self.per_layer is not None:
            slots |= self.per_layer.weight_slots(prefix)
        if "lm_head.weight" in available or not self.text.tie_word_embeddings:
            if self._is_tied:
                self.lm_head.weight, self._is_tied = torch.empty_like(self.lm_head.weight), False
            slots["lm_head.weight"] = shard(self.lm_head.weight, 0, self._ids.start, self.text.vocab_size)
        return WeightPlan(slots, frozenset(name for name in available if self._is_ignored(name)))

    def _is_ignored(self, name: str) -> bool:
        """Some checkpoints keep the key and value tensors of layers that share another layer's KV."""
        return any(
            name.startswith(f"{self.weight_prefix}layers.{spec.layer_id}.self_attn.{part}_")
            for spec in self.kv_layout.layers
            if not spec.owns_kv
            for part in ("k", "v")
        )

    def finish_loading(self) -> None:
        self.stack.finish_loading()
        self.lm_head.pack()
