"""Gemma 4's multi-token-prediction assistant: query-only layers over the target's frozen KV.

Shapes: B rows (one per request), Dt width of the target, D width of the assistant, V vocabulary, C clusters.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from sgl_kernel.centroid_head import centroid_argmax, centroid_candidates
from sgl_kernel.decoder_layers import DecoderLayers
from sgl_kernel.draft_chain import AssistantWeights, DraftChain
from sgl_kernel.packed_linear import PackedWeight, has_panels, pack_weight
from sglang.srt.configs.model_config import KVLayout, ModelConfig
from sglang.srt.distributed.parallel_state import TpGroup
from sglang.srt.distributed.sharding import shard
from sglang.srt.layers.lm_head import ParallelLMHead
from sglang.srt.layers.radix_attention import HeadGatheringAttention, RadixAttention
from sglang.srt.layers.vocab_embedding import ScaledEmbedding
from sglang.srt.mem_cache.kv_pool import KVReader
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.models.gemma4_causal import DecoderStack
from sglang.srt.models.gemma4_layers import Build, RopeTables, WeightSlots
from sglang.srt.models.interfaces import WeightPlan
from sglang.srt.speculative.frozen_kv_mtp_info import FrozenKVMTPContext


def build_frozen_kv_mtp_context(target: ModelConfig, assistant: ModelConfig, pool: KVReader) -> FrozenKVMTPContext:
    """Check the pair and map each assistant layer to the target layer it reads.

    ``ValueError`` lists every mismatch at once.
    """
    check_pair(target, assistant)
    return FrozenKVMTPContext(pool, _target_layers(target.text.kv_layout, assistant.text.kv_layout))


def check_pair(target: ModelConfig, assistant: ModelConfig) -> None:
    """``ValueError`` listing every dimension in which the assistant does not belong to the target."""
    assert assistant.assistant is not None, "not an assistant"
    wrong: list[str] = []

    def compare(what: str, of_target: object, of_assistant: object) -> None:
        if of_target != of_assistant:
            wrong.append(f"{what}: target {of_target}, assistant {of_assistant}")

    compare("hidden width (backbone_hidden_size)", target.text.hidden_size, assistant.assistant.backbone_hidden_size)
    compare("vocab_size", target.text.vocab_size, assistant.text.vocab_size)
    for kind in sorted({spec.kind for spec in assistant.text.kv_layout.layers}):
        readers = {(s.head_dim, s.num_kv_heads, s.window) for s in assistant.text.kv_layout.layers if s.kind == kind}
        source = next((s for s in reversed(target.text.kv_layout.owners) if s.kind == kind), None)
        if source is None:
            wrong.append(f"{kind}: the target has no such layer that owns KV")
            continue
        for head_dim, kv_heads, window in sorted(readers, key=str):
            compare(f"{kind} head_dim", source.head_dim, head_dim)
            compare(f"{kind} KV heads", source.num_kv_heads, kv_heads)
            compare(f"{kind} window", source.window, window)
    if wrong:
        raise ValueError(
            "--speculative-draft-model-path is not the assistant of this target: "
            + "; ".join(wrong)
            + "; use the assistant published for the target's size"
        )


def _target_layers(target: KVLayout, assistant: KVLayout) -> tuple[int, ...]:
    return tuple(target.last_owner(spec.kind).layer_id for spec in assistant.layers)


def _log_probs(logits: torch.Tensor) -> torch.Tensor:
    """Never above 0, also where rounding would have them there."""
    return torch.log_softmax(logits.float(), dim=-1).clamp_(max=0.0)


class PlainHead:
    """The assistant's own embedding table, over the whole vocabulary. It is most of the assistant and read by every
    draft, so it is the one thing of it that ranks share."""

    def __init__(self, build: Build, group: TpGroup) -> None:
        self.vocab_size, self.ids = build.text.vocab_size, group.part(build.text.vocab_size)
        self.weight = build.empty(len(self.ids), build.text.hidden_size)
        self._head = ParallelLMHead(self.weight, group, row_invariant=True)

    def argmax(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden`` [B, D] -> [B] int64."""
        return self._head.best(hidden, None)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden`` [B, D] -> [B, V]."""
        return self._head(hidden)

    def topk(self, hidden: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``hidden`` [B, D] -> the ``k`` best tokens, best first, and their log-probabilities, [B, k] each."""
        best, ids = _log_probs(self.logits(hidden)).topk(k, dim=-1)
        return ids, best

    def weight_slots(self) -> WeightSlots:
        return {"model.embed_tokens.weight": shard(self.weight, 0, self.ids.start, self.vocab_size)}

    def finish_loading(self) -> None:
        """Nothing is derived."""


class CentroidHead:
    """Scores C cluster centroids, then only the tokens of the best clusters."""

    def __init__(self, build: Build, num_centroids: int, top_k: int) -> None:
        vocab, width = build.text.vocab_size, build.text.hidden_size
        self.top_k = top_k
        self._packed: PackedWeight | None = None
        self.centroids = build.empty(num_centroids, width)
        self.token_ordering = torch.empty(vocab, dtype=torch.int64, device=build.device)
        self.weight = build.empty(vocab, width)
        self.clustered = self.weight.view(num_centroids, vocab // num_centroids, width)

    def argmax(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden`` [B, D] -> [B] int64."""
        return centroid_argmax(hidden, self.centroids, self.clustered, self.token_ordering, self.top_k, self._packed)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden`` [B, D] -> [B, V], minus infinity for tokens of all but the best clusters."""
        scores, tokens = self._candidates(hidden)
        return scores.new_full((len(scores), len(self.weight)), float("-inf")).scatter_(1, tokens, scores)

    def topk(self, hidden: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``PlainHead.topk``; other tokens than those of the best clusters have no probability."""
        scores, tokens = self._candidates(hidden)
        best, at = _log_probs(scores).topk(k, dim=-1)
        return tokens.gather(1, at), best

    def _candidates(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and ids of the tokens in each row's best clusters, [B, top_k * V / C] each."""
        scores, clusters = centroid_candidates(hidden, self.centroids, self.clustered, self.top_k, self._packed)
        return scores, self.token_ordering.view(len(self.clustered), -1)[clusters].flatten(1)

    def packed(self) -> tuple[PackedWeight, PackedWeight] | None:
        """Centroids and clustered rows for a compiled operator, which reads whole panels of either."""
        per_cluster = self.clustered.shape[1]
        if self._packed is None or per_cluster % 32 or not has_panels(self.centroids):
            return None
        centroids = pack_weight(self.centroids)
        assert centroids is not None
        return centroids, self._packed

    def weight_slots(self) -> WeightSlots:
        return {
            "model.embed_tokens.weight": self.weight,
            "masked_embedding.centroids.weight": self.centroids,
            "masked_embedding.token_ordering": self.token_ordering,
        }

    def finish_loading(self) -> None:
        """Rows on disk are in natural order; grouped by cluster, the rows of a cluster are one contiguous block."""
        if self.weight.is_meta:
            return
        self.weight.copy_(self.weight[self.token_ordering])
        if has_panels(self.weight):
            self._packed = pack_weight(self.weight)


class Gemma4AssistantForCausalLM:
    """Drafts one token per forward, from the newest token and a hidden state. Owns no KV and writes none.

    Every rank has all of it but for a plain head: the rest is so small that an exchange takes longer than what it
    would save. Attention needs one all the same where a rank has only some of the target's KV heads. What is exchanged
    there is the outputs of heads, which are not rounded, and not sums behind the output projection: so a draft is what
    it is on one rank, as far as the target's KV and hidden states are.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        row_invariant: bool = False,
        group: TpGroup | None = None,
    ) -> None:
        assistant = config.assistant
        assert assistant is not None, f"{config.architecture} is not an assistant"
        build = Build(config.text, dtype, device, row_invariant)
        hidden, backbone = config.text.hidden_size, assistant.backbone_hidden_size
        self.pre_projection = build.linear(2 * backbone, hidden)
        self.stack = DecoderStack(build)
        self.post_projection = build.linear(hidden, backbone)
        self._group = group or TpGroup()
        self.head: PlainHead | CentroidHead
        if assistant.num_centroids:
            self.head = CentroidHead(build, assistant.num_centroids, assistant.centroid_top_k)
        else:
            self.head = PlainHead(build, self._group)
        self._chain: tuple[DecoderLayers, DraftChain | None] | None = None
        self._context: FrozenKVMTPContext | None = None
        self._embed: ScaledEmbedding | None = None

    def bind_frozen_kv_context(self, context: FrozenKVMTPContext, embed: ScaledEmbedding) -> None:
        """Borrow the target's KV and its (scaled) embedding. Once: a second, different context is an error."""
        if self._context is not None and self._context != context:
            raise RuntimeError("the assistant is bound to a target already")
        self._context, self._embed = context, embed
        for layer, target_layer_id in zip(self.stack.layers, context.target_layer_ids, strict=True):
            layer.self_attn.attn = self._attention(target_layer_id, layer.self_attn.spec.num_kv_heads, context)

    def _attention(self, target_layer_id: int, num_kv_heads: int, context: FrozenKVMTPContext) -> RadixAttention:
        """``num_kv_heads``: of the target on all ranks together."""
        if context.target_token_to_kv_pool.get_key_buffer(target_layer_id).shape[1] == num_kv_heads:
            return RadixAttention(target_layer_id)
        return HeadGatheringAttention(target_layer_id, num_kv_heads, self._group)

    def get_embed_and_head(self) -> tuple[ScaledEmbedding, torch.Tensor]:
        """The borrowed embedding, and the assistant's own head [V, D] (grouped by cluster for a centroid head; this
        rank's rows of a plain one)."""
        if self._embed is None:
            raise RuntimeError("bind_frozen_kv_context must come before get_embed_and_head")
        return self._embed, self.head.weight

    def rope_tables(self, positions: torch.Tensor) -> RopeTables:
        """For ``forward``: ``positions`` [B] int64, which are the same in all steps of a round."""
        return self.stack.rope_tables(positions)

    def forward(
        self, fb: ForwardBatch, hidden_states: torch.Tensor, rope: RopeTables
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One draft step.

        ``fb.input_ids`` [B]: newest token of each row; ``hidden_states`` [B, Dt]: target state that predicted it, or
        the second result of the step before; ``rope``: of ``fb.positions``. Returns the normed state [B, D] for
        ``draft_argmax`` and the next hidden state [B, Dt].
        """
        if self._embed is None:
            raise RuntimeError("bind_frozen_kv_context must come before forward")
        x = self.pre_projection.parts(self._embed.beside(fb.input_ids, hidden_states))
        stream = self.stack.start(x)
        normed = self.stack.run_few(stream, None, rope, fb)
        if normed is None:
            for i, layer in enumerate(self.stack.layers):
                stream = layer(stream, None, rope, fb, self.stack.following(i))
            normed = stream.normed
        return normed, self.post_projection(normed)

    def draft_chain(self, fb: ForwardBatch, hidden_states: torch.Tensor, num_steps: int) -> torch.Tensor | None:
        """``num_steps`` times ``forward`` and ``draft_argmax`` in one compiled call, [B, num_steps + 1] int64 with
        ``fb.input_ids`` first; None where there is none for this assistant or ``fb``."""
        fused = self.stack.fused(fb)
        if fused is None:
            return None
        layers, rows = fused
        if self._chain is None or self._chain[0] is not layers:
            self._chain = layers, self._make_chain(layers)
        chain = self._chain[1]
        return None if chain is None else chain(fb.input_ids, hidden_states, num_steps, rows)

    def _make_chain(self, layers: DecoderLayers) -> DraftChain | None:
        assert self._embed is not None
        if not isinstance(self.head, CentroidHead):
            return None
        before, behind, clusters = (
            self.pre_projection.whole_panels,
            self.post_projection.whole_panels,
            self.head.packed(),
        )
        if before is None or behind is None or clusters is None:
            return None
        centroids, head = clusters
        weights = AssistantWeights(
            embed=self._embed.weight,
            embed_scale=self._embed.scale,
            pre_projection=before,
            first_norm=self.stack.layers[0].input_norm.weight,
            inv_freq=[rotary.inv_freq for rotary in self.stack.rotary.values()],
            post_projection=behind,
            centroids=centroids,
            head=head,
            ordering=self.head.token_ordering.view(len(self.head.centroids), -1),
            top_k=self.head.top_k,
        )
        return DraftChain(layers, weights)

    def draft_argmax(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden`` [B, D] from ``forward`` -> drafted token ids [B] int64."""
        return self.head.argmax(hidden)

    def draft_topk(self, hidden: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``hidden`` as in ``draft_argmax`` -> the ``k`` best tokens and their log-probabilities, [B, k] each."""
        return self.head.topk(hidden, k)

    def draft_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden`` as in ``draft_argmax`` -> [B, V], minus infinity for tokens that are not considered."""
        return self.head.logits(hidden)

    def weight_plan(self, available: Collection[str]) -> WeightPlan:
        slots = self.stack.weight_slots("model.") | self.head.weight_slots()
        slots["pre_projection.weight"] = self.pre_projection.weight
        slots["post_projection.weight"] = self.post_projection.weight
        return WeightPlan(slots, frozenset())

    def finish_loading(self) -> None:
        self.stack.finish_loading()
        self.head.finish_loading()
