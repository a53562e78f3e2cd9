"""``config.json`` (and ``generation_config.json``) of a Gemma 4 checkpoint -> ``ModelConfig``.

The one place that knows the serialised forms: flat and composite files, targets and assistants, released files with
``global_head_dim`` / ``num_global_key_value_heads``, and files saved again with ``per_layer_config``, which wins.
A value that this engine cannot honour is a ``ValueError`` that names its key; nothing is ignored in silence that
would change the model's output.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from sglang.srt.configs.model_config import (
    DEFAULT_ROPE,
    FULL,
    SLIDING,
    AssistantConfig,
    KVLayout,
    LayerKVSpec,
    ModelConfig,
    MoEConfig,
    RopeConfig,
    TextConfig,
)

logger = logging.getLogger(__name__)

DTYPES = ("float32", "bfloat16", "float16")

# keys that belong to the text decoder: a composite file keeps them in its text_config
TEXT_CONFIG_KEYS = frozenset(
    "attention_bias attention_k_eq_v enable_moe_block final_logit_softcapping global_head_dim head_dim "
    "hidden_activation hidden_size hidden_size_per_layer_input intermediate_size layer_types max_position_embeddings "
    "moe_intermediate_size num_attention_heads num_experts num_global_key_value_heads num_hidden_layers "
    "num_key_value_heads num_kv_shared_layers per_layer_config rms_norm_eps rope_parameters sliding_window "
    "top_k_experts use_bidirectional_attention use_double_wide_mlp vocab_size vocab_size_per_layer_input".split()
)
TOP_CONFIG_KEYS = frozenset(
    "architectures audio_config audio_token_id backbone_hidden_size centroid_intermediate_top_k dtype eos_token_id "
    "image_token_id model_type num_centroids quantization_config text_config tie_word_embeddings torch_dtype "
    "use_ordered_embeddings video_token_id vision_config".split()
)

_MEDIA_TOKEN_IDS = MappingProxyType({"image": 258_880, "audio": 258_881, "video": 258_884})
_TOWERS = ("vision", "audio")


@dataclass(frozen=True, slots=True)
class _Family:
    """What follows from an architecture's name."""

    model_type: str
    nested: bool  # decoder keys are in text_config
    composite: bool  # text weights are under model.language_model.
    assistant: bool
    unified: bool

    @property
    def plain(self) -> bool:
        """Never has per-layer embeddings or experts."""
        return self.assistant or self.unified


_FAMILIES: Mapping[str, _Family] = MappingProxyType(
    {
        "Gemma4ForConditionalGeneration": _Family("gemma4", True, True, False, False),
        "Gemma4ForCausalLM": _Family("gemma4_text", False, False, False, False),
        "Gemma4UnifiedForConditionalGeneration": _Family("gemma4_unified", True, True, False, True),
        "Gemma4UnifiedForCausalLM": _Family("gemma4_unified_text", False, False, False, True),
        "Gemma4AssistantForCausalLM": _Family("gemma4_assistant", True, False, True, False),
        "Gemma4UnifiedAssistantForCausalLM": _Family("gemma4_unified_assistant", True, False, True, True),
    }
)
ASSISTANT_ARCHITECTURES = tuple(name for name, family in _FAMILIES.items() if family.assistant)


class _Keys:
    """Typed look-ups in one JSON object; errors name the key as the user finds it. JSON null counts as missing."""

    def __init__(self, values: Mapping[str, Any], prefix: str) -> None:
        self.values = values
        self.prefix = prefix

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def raw(self, key: str) -> Any:
        return self.values.get(key)

    def bad(self, key: str, want: str) -> ValueError:
        if not self.has(key):
            return ValueError(f"{self.prefix}{key} is missing: it must be {want}")
        return ValueError(f"{self.prefix}{key} must be {want}, got {self.values[key]!r:.200}")

    def integer(self, key: str, default: int | None = None, low: int = 1) -> int:
        value = self.values[key] if self.has(key) else default
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise self.bad(key, f"an integer of at least {low}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above zero."""
        value = self.values[key] if self.has(key) else default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
            raise self.bad(key, "a finite number above 0")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.values[key] if self.has(key) else default
        if not isinstance(value, bool):
            raise self.bad(key, "true or false")
        return value

    def choice(self, key: str, default: str | None, allowed: Sequence[str]) -> str:
        value = self.values[key] if self.has(key) else default
        if not isinstance(value, str) or value not in allowed:
            raise self.bad(key, "one of " + ", ".join(allowed))
        return value

    def table(self, key: str) -> Mapping[str, Any]:
        value = self.values.get(key)
        if not isinstance(value, Mapping):
            raise self.bad(key, "an object")
        return value


def parse_model_config(raw: Mapping[str, Any], generation: Mapping[str, Any] | None) -> ModelConfig:
    """Translate one checkpoint's dictionaries.

    ``raw`` is ``config.json``; ``generation`` is ``generation_config.json`` or None when there is none. Raises
    ``ValueError`` with one sentence that names the key, its value and what is possible.
    """
    top = _Keys(raw, "")
    architecture = _architecture(top)
    family = _FAMILIES[architecture]
    if top.has("quantization_config"):
        raise ValueError(
            "quantization_config is set, but quantized checkpoints are not supported: use an unquantized one"
        )
    if family.nested != top.has("text_config"):
        shape = "nests the decoder in text_config" if family.nested else "has no text_config"
        raise ValueError(f"architectures names {architecture}, whose config {shape}, but this one does not fit that")
    keys = _Keys(top.table("text_config"), "text_config.") if family.nested else top
    text = _text_config(keys, top, family)
    return ModelConfig(
        architecture=architecture,
        model_type=family.model_type,
        composite=family.composite,
        text=text,
        assistant=_assistant_config(top, text) if family.assistant else None,
        multimodal=tuple(tower for tower in _TOWERS if family.composite and top.has(f"{tower}_config")),
        dtype=_dtype(top, keys),
        eos_token_ids=_eos_token_ids(top, keys, generation, text.vocab_size),
        media_token_ids=_media_token_ids(top, text.vocab_size) if family.composite else (),
    )


def _architecture(top: _Keys) -> str:
    if not top.has("architectures"):
        # files written by hand may lack it; the model type says the same
        for name, family in _FAMILIES.items():
            if top.raw("model_type") == family.model_type:
                return name
        raise ValueError(
            f"neither architectures nor model_type ({top.raw('model_type')!r:.100}) names a supported model: "
            f"supported architectures are {', '.join(_FAMILIES)}"
        )
    names = top.raw("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise top.bad("architectures", "a list of one name")
    if names[0] not in _FAMILIES:
        raise ValueError(
            f"architectures names {names[0]!r:.100}, which is not supported: use one of {', '.join(_FAMILIES)}"
        )
    return names[0]


def _text_config(keys: _Keys, top: _Keys, family: _Family) -> TextConfig:
    _refuse_unsupported(keys)
    kinds = _layer_kinds(keys)
    num_layers = len(kinds)
    window = keys.integer("sliding_window", 1024 if family.unified else 512)
    first_shared = _first_kv_shared_layer(keys, num_layers, family)
    per_layer_input_size, per_layer_vocab_size = _per_layer_input(keys, family)
    double_wide = keys.flag("use_double_wide_mlp")
    if double_wide and family.assistant:
        raise keys.bad("use_double_wide_mlp", f"false in a {family.model_type} model")
    moe = _moe_config(keys, family)
    return TextConfig(
        hidden_size=keys.integer("hidden_size"),
        intermediate_size=keys.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=keys.integer("num_attention_heads"),
        vocab_size=keys.integer("vocab_size"),
        rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
        sliding_window=window,
        max_position_embeddings=keys.integer("max_position_embeddings", 262_144 if family.unified else 131_072),
        final_logit_softcapping=(
            keys.number("final_logit_softcapping") if keys.has("final_logit_softcapping") else None
        ),
        attention_k_eq_v=keys.flag("attention_k_eq_v"),
        double_wide_mlp=double_wide,
        first_kv_shared_layer=first_shared,
        per_layer_input_size=per_layer_input_size,
        per_layer_vocab_size=per_layer_vocab_size,
        tie_word_embeddings=(top if top.has("tie_word_embeddings") else keys).flag("tie_word_embeddings", True),
        moe=moe,
        rope_sliding=_rope_config(keys, SLIDING),
        rope_full=_rope_config(keys, FULL),
        kv_layout=_kv_layout(keys, kinds, window, first_shared),
    )


def _refuse_unsupported(keys: _Keys) -> None:
    keys.choice("hidden_activation", "gelu_pytorch_tanh", ("gelu_pytorch_tanh",))
    if keys.flag("attention_bias"):
        raise keys.bad("attention_bias", "false, because projections with a bias are not supported")
    # "vision" lets tokens of one image see each other, which says nothing about text; "all" would change generation
    if keys.has("use_bidirectional_attention") and keys.raw("use_bidirectional_attention") != "vision":
        raise keys.bad("use_bidirectional_attention", 'null or "vision", because only causal generation is supported')


def _layer_kinds(keys: _Keys) -> tuple[str, ...]:
    """Kind of every layer. The last one is full attention, whatever the list says."""
    num_layers = keys.integer("num_hidden_layers")
    kinds = keys.raw("layer_types")
    if kinds is None:
        kinds = [FULL if (i + 1) % 6 == 0 else SLIDING for i in range(num_layers)]
    elif not isinstance(kinds, list) or len(kinds) != num_layers:
        raise keys.bad("layer_types", f"a list of num_hidden_layers = {num_layers} names")
    for kind in kinds:
        if kind not in (SLIDING, FULL):
            raise ValueError(f"{keys.prefix}layer_types may hold {SLIDING} and {FULL}, got {kind!r:.100}")
    if kinds[-1] != FULL:
        logger.warning("%slayer_types ends with %s: the last layer always uses %s", keys.prefix, kinds[-1], FULL)
    return (*kinds[:-1], FULL)


def _first_kv_shared_layer(keys: _Keys, num_layers: int, family: _Family) -> int:
    """First layer without KV of its own: 0 in an assistant, ``num_layers`` when nothing is shared."""
    num_shared = keys.integer("num_kv_shared_layers", 0, low=0)
    if family.assistant:
        if num_shared not in (0, num_layers):
            raise keys.bad("num_kv_shared_layers", f"0 or num_hidden_layers = {num_layers} in an assistant")
        return 0
    if num_shared >= num_layers:
        raise keys.bad("num_kv_shared_layers", f"below num_hidden_layers = {num_layers}, so that some layer owns KV")
    return num_layers - num_shared


def _kv_layout(keys: _Keys, kinds: tuple[str, ...], window: int, first_shared: int) -> KVLayout:
    num_heads = keys.integer("num_attention_heads")
    overrides = _head_overrides(keys, kinds)
    last_of_kind: dict[str, int] = {}
    specs = []
    for layer_id, kind in enumerate(kinds):
        if layer_id < first_shared:
            owner = last_of_kind[kind] = layer_id
        elif first_shared == 0:
            owner = -1
        elif kind in last_of_kind:
            owner = last_of_kind[kind]
        else:
            raise ValueError(
                f"{keys.prefix}num_kv_shared_layers makes layer {layer_id} ({kind}) share KV, but no layer below "
                f"{first_shared} is of that type: correct layer_types or num_kv_shared_layers"
            )
        head_dim, num_kv_heads = overrides[layer_id]
        if num_heads % num_kv_heads:
            raise ValueError(
                f"{keys.prefix}num_attention_heads ({num_heads}) must be a multiple of the {num_kv_heads} KV heads "
                f"of layer {layer_id}"
            )
        if head_dim % 2:
            raise ValueError(
                f"{keys.prefix}head_dim of layer {layer_id} must be even for rotary embedding, got {head_dim}"
            )
        specs.append(LayerKVSpec(layer_id, kind, num_kv_heads, head_dim, window if kind == SLIDING else None, owner))
    return KVLayout(tuple(specs))


def _head_overrides(keys: _Keys, kinds: tuple[str, ...]) -> list[tuple[int, int]]:
    """(head_dim, num_key_value_heads) of every layer."""
    head_dim = keys.integer("head_dim", 256)
    num_kv_heads = keys.integer("num_key_value_heads")
    if not keys.has("per_layer_config"):
        full_dim = keys.integer("global_head_dim", 512)
        # released files carry the global count only for models whose full layers project K and V once
        full_heads = (
            keys.integer("num_global_key_value_heads", num_kv_heads) if keys.flag("attention_k_eq_v") else num_kv_heads
        )
        return [(full_dim, full_heads) if kind == FULL else (head_dim, num_kv_heads) for kind in kinds]
    shapes = [(head_dim, num_kv_heads)] * len(kinds)
    for name, values in keys.table("per_layer_config").items():
        where = f"{keys.prefix}per_layer_config[{name!r}]"
        if not str(name).isdecimal() or int(name) >= len(kinds):
            raise ValueError(f"{where} must be keyed by a layer from 0 to {len(kinds) - 1}")
        if not isinstance(values, Mapping) or not set(values) <= {"head_dim", "num_key_value_heads"}:
            raise ValueError(f"{where} may hold head_dim and num_key_value_heads, got {values!r:.200}")
        layer = _Keys(values, where + ".")
        shapes[int(name)] = (layer.integer("head_dim", head_dim), layer.integer("num_key_value_heads", num_kv_heads))
    return shapes


def _per_layer_input(keys: _Keys, family: _Family) -> tuple[int, int]:
    """(width, vocabulary) of the per-layer embeddings, (0, 0) when there are none."""
    size = keys.integer("hidden_size_per_layer_input", 0 if family.plain else 256, low=0)
    if size == 0:
        return 0, 0
    if family.plain:
        raise keys.bad("hidden_size_per_layer_input", f"0 in a {family.model_type} model")
    return size, keys.integer("vocab_size_per_layer_input", 262_144)


def _moe_config(keys: _Keys, family: _Family) -> MoEConfig | None:
    if not keys.flag("enable_moe_block"):
        return None
    if family.plain:
        raise keys.bad("enable_moe_block", f"false in a {family.model_type} model")
    moe = MoEConfig(keys.integer("num_experts"), keys.integer("top_k_experts"), keys.integer("moe_intermediate_size"))
    if moe.top_k > moe.num_experts:
        raise keys.bad("top_k_experts", f"at most num_experts = {moe.num_experts}")
    return moe


def _rope_config(keys: _Keys, kind: str) -> RopeConfig:
    per_kind = keys.table("rope_parameters") if keys.has("rope_parameters") else DEFAULT_ROPE
    values = per_kind.get(kind, DEFAULT_ROPE[kind])
    if not isinstance(values, Mapping):
        raise keys.bad("rope_parameters", f"an object of objects, one for {kind}")
    rope = _Keys(values, f"{keys.prefix}rope_parameters.{kind}.")
    proportional = rope.choice("rope_type", "default", ("default", "proportional")) == "proportional"
    partial = rope.number("partial_rotary_factor", 1.0)
    if partial > 1.0 or (partial != 1.0 and not proportional):
        raise rope.bad("partial_rotary_factor", "at most 1, and 1 unless rope_type is proportional")
    factor = rope.number("factor", 1.0)
    if factor != 1.0 and not proportional:
        raise rope.bad("factor", "1 unless rope_type is proportional")
    return RopeConfig(rope.number("rope_theta"), proportional, partial, factor)


def _assistant_config(top: _Keys, text: TextConfig) -> AssistantConfig:
    backbone_hidden_size = top.integer("backbone_hidden_size")
    # centroid counts appear in every assistant's file; only this flag says that the head exists
    if not top.flag("use_ordered_embeddings"):
        return AssistantConfig(backbone_hidden_size, 0, 0)
    num_centroids = top.integer("num_centroids", 2048)
    if text.vocab_size % num_centroids:
        raise top.bad("num_centroids", f"a divisor of vocab_size = {text.vocab_size}")
    top_k = top.integer("centroid_intermediate_top_k", 32)
    if top_k > num_centroids:
        raise top.bad("centroid_intermediate_top_k", f"at most num_centroids = {num_centroids}")
    return AssistantConfig(backbone_hidden_size, num_centroids, top_k)


def _dtype(top: _Keys, text: _Keys) -> str:
    """Type of the stored weights; files without one are taken as bfloat16, like every released checkpoint."""
    for keys in (top, text):
        for key in ("dtype", "torch_dtype"):
            if keys.has(key):
                return keys.choice(key, None, DTYPES)
    return "bfloat16"


def _eos_token_ids(top: _Keys, text: _Keys, generation: Mapping[str, Any] | None, vocab_size: int) -> tuple[int, ...]:
    """Union over both files and both levels: each can name a stop token that the others lack."""
    found: set[int] = set()
    for keys in (top, text, _Keys(generation or {}, "generation_config.json: ")):
        value = keys.raw("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for token in ids:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
                raise keys.bad("eos_token_id", f"token ids below vocab_size = {vocab_size}")
            found.add(token)
    return tuple(sorted(found)) or (1,)


def _media_token_ids(top: _Keys, vocab_size: int) -> tuple[tuple[str, int], ...]:
    """(medium, placeholder token id) of every medium whose placeholder the vocabulary has."""
    ids = ((name, top.integer(f"{name}_token_id", default, low=0)) for name, default in _MEDIA_TOKEN_IDS.items())
    return tuple((name, token) for name, token in ids if token < vocab_size)
