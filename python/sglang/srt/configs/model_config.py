"""What a checkpoint's ``config.json`` means, as frozen values.

Everything below reads these types; nothing else interprets the Hugging Face dictionary, which
``model_config_parser.parse_model_config`` translates once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

SLIDING, FULL = "sliding_attention", "full_attention"

DEFAULT_ROPE: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        FULL: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
    }
)


@dataclass(frozen=True, slots=True)
class LayerKVSpec:
    """KV geometry of one decoder layer. ``owner`` is the layer whose KV it reads (itself when it owns KV).

    Every layer of an assistant has ``owner == -1``: it reads KV borrowed from another model, with the geometry given.
    """

    layer_id: int
    kind: str
    num_kv_heads: int
    head_dim: int
    window: int | None
    owner: int

    @property
    def owns_kv(self) -> bool:
        return self.owner == self.layer_id


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Which layer owns KV, and its shape. Layers that share another layer's KV allocate nothing."""

    layers: tuple[LayerKVSpec, ...]

    @property
    def owners(self) -> tuple[LayerKVSpec, ...]:
        return tuple(spec for spec in self.layers if spec.owns_kv)

    @property
    def elements_per_token(self) -> int:
        """K and V elements one token occupies over all owning layers."""
        return sum(2 * spec.num_kv_heads * spec.head_dim for spec in self.owners)

    def last_owner(self, kind: str) -> LayerKVSpec:
        """The layer an assistant layer of this kind reads: the last one of that kind that owns its KV."""
        for spec in reversed(self.owners):
            if spec.kind == kind:
                return spec
        raise ValueError(
            f"the target has no {kind} layer that owns KV, so an assistant layer of that kind has nothing to read"
        )


@dataclass(frozen=True, slots=True)
class RopeConfig:
    theta: float
    proportional: bool
    partial_rotary_factor: float
    factor: float


@dataclass(frozen=True, slots=True)
class MoEConfig:
    num_experts: int
    top_k: int
    intermediate_size: int


@dataclass(frozen=True, slots=True)
class TextConfig:
    """A Gemma 4 text decoder (target or assistant)."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    vocab_size: int
    rms_norm_eps: float
    sliding_window: int
    max_position_embeddings: int
    final_logit_softcapping: float | None
    attention_k_eq_v: bool
    double_wide_mlp: bool
    first_kv_shared_layer: int
    per_layer_input_size: int
    per_layer_vocab_size: int
    tie_word_embeddings: bool
    moe: MoEConfig | None
    rope_sliding: RopeConfig
    rope_full: RopeConfig
    kv_layout: KVLayout

    @property
    def shares_kv(self) -> bool:
        """Whether the last layers read the KV of earlier ones and have none of their own."""
        return self.first_kv_shared_layer < self.num_layers

    def mlp_width(self, layer_id: int) -> int:
        wide = self.double_wide_mlp and layer_id >= self.first_kv_shared_layer
        return self.intermediate_size * (2 if wide else 1)

    def rope(self, kind: str) -> RopeConfig:
        return self.rope_full if kind == FULL else self.rope_sliding


@dataclass(frozen=True, slots=True)
class AssistantConfig:
    """What an MTP assistant has beyond its text decoder. ``num_centroids`` is 0 for the plain head."""

    backbone_hidden_size: int
    num_centroids: int
    centroid_top_k: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One checkpoint. ``assistant`` is set for an MTP drafter; ``multimodal`` names the towers that are skipped."""

    architecture: str
    model_type: str
    composite: bool
    text: TextConfig
    assistant: AssistantConfig | None
    multimodal: tuple[str, ...]
    dtype: str
    eos_token_ids: tuple[int, ...]
    media_token_ids: tuple[tuple[str, int], ...]

    @property
    def is_assistant(self) -> bool:
        return self.assistant is not None

    @property
    def context_length(self) -> int:
        return self.text.max_position_embeddings
