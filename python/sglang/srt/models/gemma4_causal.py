"""Gemma 4 text decoder: embeddings, the stack of layers, and the head.

Shapes: T rows, D hidden width, P per-layer-embedding width, n layers.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from sgl_kernel.decoder_layers import DecoderLayers, PagedRows, StepArguments
from sgl_kernel.embedding import per_layer_inputs
from sgl_kernel.norm import sum_norm
from sglang.srt.configs.model_config import FULL, SLIDING, ModelConfig
from sglang.srt.distributed.parallel_state import TpGroup
from sglang.srt.distributed.sharding import shard
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.lm_head import ParallelLMHead
from sglang.srt.layers.logits_processor import LogitsProcessor, LogitsProcessorOutput
from sglang.srt.layers.rotary import RotaryEmbedding
from sglang.srt.layers.vocab_embedding import ScaledEmbedding, VocabParallelEmbedding
from sglang.srt.mem_cache.kv_pool import KVReader
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.models.gemma4_fused import fuse_layers
from sglang.srt.models.gemma4_layers import Build, Gemma4DecoderLayer, RopeTables, Stream, WeightSlots
from sglang.srt.models.interfaces import WeightPlan


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
        self._fused: tuple[KVReader, DecoderLayers | None] | None = None

    def start(self, x: torch.Tensor) -> Stream:
        """``x`` [T, D] or parts, the input of layer 0."""
        norm = self.layers[0].input_norm
        return Stream(*sum_norm(x, norm.weight, norm.eps))

    def fused(self, fb: ForwardBatch) -> tuple[DecoderLayers, PagedRows] | None:
        """All layers as one compiled call, and where its rows stand; None where a layer or ``fb`` does not allow it."""
        rows = None if fb.tail is not None else fb.attn.few_rows()
        if rows is None:
            return None
        if self._fused is None or self._fused[0] is not fb.token_to_kv_pool:
            following = [self.following(i) for i in range(len(self.layers))]
            layers = fuse_layers(self.layers, following, list(self.rotary), fb.token_to_kv_pool)
            self._fused = fb.token_to_kv_pool, layers
        layers = self._fused[1]
        return None if layers is None else (layers, rows)

    def run_few(
        self, stream: Stream, ple: torch.Tensor | None, rope: RopeTables, fb: ForwardBatch
    ) -> torch.Tensor | None:
        """The normed output [T, D] of ``fused`` layers, with ``stream`` used up; None where there are none."""
        fused = self.fused(fb)
        if fused is None:
            return None
        layers, rows = fused
        tables = list(rope.values())
        step = StepArguments(stream.x, stream.normed, ple, tables, fb.out_cache_loc, rows, layers.widest)
        return layers.run(step)

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
        self._fused = None


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
        normed = self.stack.run_few(stream, ple, rope, fb)
        if normed is not None:
            return normed, fb
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
