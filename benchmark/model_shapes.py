"""The five published Gemma 4 sizes and their assistants as shapes: checkpoint folders without weights, bytes and FLOPs.

A folder made by ``write_checkpoint`` holds configuration and a small tokenizer; with ``--load-format dummy`` an engine
runs it at full size on random weights. The counts say what a pass *must* move through memory, once per reader: layer
weights, the head, the experts that the rows pick (as many as uniform routing would on average), table rows of tokens,
keys and values by every layer that attends to them, and the new keys and values.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sglang.srt.configs.model_config import DEFAULT_ROPE, FULL, SLIDING, ModelConfig, TextConfig
from sglang.srt.configs.model_config_parser import parse_model_config
from sglang.srt.utils.embedded import EMBEDDED_MODELS

VOCAB = 262144
ASSISTANT_LAYERS = [SLIDING] * 3 + [FULL]
GENERATION = {"bos_token_id": 2, "pad_token_id": 0, "eos_token_id": [1, 106, 50]}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True, slots=True)
class Shape:
    """One size. ``pattern``: sliding layers before each full one, and how often.

    ``assistant``: what the assistant's text differs in. ``num_steps``: drafts per round that are the engine's default.
    """

    text: Mapping[str, Any]
    pattern: tuple[int, int]
    assistant: Mapping[str, Any]
    num_steps: int
    unified: bool = False

    @property
    def layer_types(self) -> list[str]:
        sliding, times = self.pattern
        return ([SLIDING] * sliding + [FULL]) * times


def _text(hidden: int, width: int, heads: int, kv_heads: int, global_kv: int | None, **more: Any) -> dict[str, Any]:
    """Where full layers have KV heads of their own, they also project K and V once (and the window is wider)."""
    window = 512 if global_kv is None else 1024
    return {
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_global_key_value_heads": global_kv,
        "attention_k_eq_v": global_kv is not None,
        "sliding_window": window,
        "max_position_embeddings": window * 256,
        "use_bidirectional_attention": None if global_kv is None else "vision",
        **more,
    }


def _ple(num_kv_shared_layers: int, double_wide: bool) -> dict[str, Any]:
    return {
        "hidden_size_per_layer_input": 256,
        "num_kv_shared_layers": num_kv_shared_layers,
        "use_double_wide_mlp": double_wide,
    }


_SMALL_DRAFT = {"hidden_size": 256, "intermediate_size": 2048, "num_attention_heads": 4}
_DRAFT = {"hidden_size": 1024, "intermediate_size": 8192}
_EXPERTS = {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}

SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        "e2b": Shape(_text(1536, 6144, 8, 1, None, **_ple(20, True)), (4, 7), _SMALL_DRAFT, 2),
        "e4b": Shape(_text(2560, 10240, 8, 2, None, **_ple(18, False)), (5, 7), _SMALL_DRAFT, 3),
        "12b": Shape(_text(3840, 15360, 16, 8, 1), (5, 8), _DRAFT, 4, unified=True),
        "26b-a4b": Shape(_text(2816, 2112, 16, 8, 2, **_EXPERTS), (5, 5), _DRAFT, 3),
        "31b": Shape(_text(5376, 21504, 32, 16, 4), (5, 10), _DRAFT, 5),
    }
)
# the shipped pair: its files are there, with its own vocabulary; quick enough for a CPU
TINY = "tiny-gemma4"
MODELS = (*SHAPES, TINY)


def _text_config(shape: Shape, layer_types: list[str], **changes: Any) -> dict[str, Any]:
    return {
        "model_type": "gemma4_unified_text" if shape.unified else "gemma4_text",
        "vocab_size": VOCAB,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "enable_moe_block": False,
        "num_experts": None,
        "top_k_experts": None,
        "moe_intermediate_size": None,
        "head_dim": 256,
        "global_head_dim": 512,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {kind: dict(values) for kind, values in DEFAULT_ROPE.items()},
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
        **shape.text,
        "num_hidden_layers": len(layer_types),
        "layer_types": layer_types,
        **changes,
    }


def target_config(name: str) -> dict[str, Any]:
    """``config.json`` of a target, without towers."""
    shape = SHAPES[name]
    return {
        "model_type": "gemma4_unified" if shape.unified else "gemma4",
        "architectures": [f"Gemma4{'Unified' if shape.unified else ''}ForConditionalGeneration"],
        "dtype": "bfloat16",
        "text_config": _text_config(shape, shape.layer_types),
        "vision_config": None,
        "audio_config": None,
        "tie_word_embeddings": True,
        "eos_token_id": [1, 106],
    }


def assistant_config(name: str) -> dict[str, Any]:
    """``config.json`` of the assistant of a target. Where it has the small width, it has the centroid head."""
    shape = SHAPES[name]
    plain: dict[str, Any] = {
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "use_double_wide_mlp": False,
    }
    plain |= {"enable_moe_block": False, "num_experts": None, "top_k_experts": None, "moe_intermediate_size": None}
    plain |= {"final_logit_softcapping": None, "num_kv_shared_layers": len(ASSISTANT_LAYERS)}
    return {
        "model_type": "gemma4_unified_assistant" if shape.unified else "gemma4_assistant",
        "architectures": [f"Gemma4{'Unified' if shape.unified else ''}AssistantForCausalLM"],
        "dtype": "bfloat16",
        "text_config": _text_config(shape, ASSISTANT_LAYERS, **plain, **shape.assistant),
        "backbone_hidden_size": shape.text["hidden_size"],
        "use_ordered_embeddings": shape.assistant is _SMALL_DRAFT,
        "num_centroids": 2048,
        "centroid_intermediate_top_k": 32,
        "tie_word_embeddings": True,
    }


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and its assistant: where they are, and what their files say."""

    name: str
    target_path: Path
    assistant_path: Path
    target: ModelConfig
    assistant: ModelConfig
    num_steps: int


def make_pair(name: str, folder: Path) -> Pair:
    """The pair called ``name``, its files written under ``folder`` (the shipped one is used where it is)."""
    if name == TINY:
        shipped = EMBEDDED_MODELS[TINY]
        return _pair(name, shipped.target, shipped.assistant, 4)
    if name not in SHAPES:
        raise ValueError(f"--model {name!r} is not a known size: use one of {', '.join(MODELS)}")
    target, assistant = folder / name, folder / f"{name}-assistant"
    write_checkpoint(target, target_config(name))
    write_checkpoint(assistant, assistant_config(name))
    return _pair(name, target, assistant, SHAPES[name].num_steps)


def _pair(name: str, target: Path, assistant: Path, num_steps: int) -> Pair:
    configs = [parse_model_config(json.loads((path / "config.json").read_text()), None) for path in (target, assistant)]
    return Pair(name, target, assistant, configs[0], configs[1], num_steps)


def write_checkpoint(folder: Path, config: Mapping[str, Any]) -> None:
    """A checkpoint that lacks only its weights. The tokenizer is the shipped one, of which larger ids mean no text."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, values in (("config.json", config), ("generation_config.json", GENERATION)):
        (folder / name).write_text(json.dumps(values, indent=2) + "\n")
    for name in _TOKENIZER_FILES:
        shutil.copy(EMBEDDED_MODELS[TINY].target / name, folder / name)


# ---------------------------------------------------------------------------------------------------------------- bytes


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that must move, by what they belong to."""

    weights: float = 0.0
    head: float = 0.0
    tables: float = 0.0
    kv_read: float = 0.0
    kv_write: float = 0.0

    @property
    def total(self) -> float:
        return self.weights + self.head + self.tables + self.kv_read + self.kv_write

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(getattr(self, name) + getattr(other, name) for name in Traffic.__slots__))

    def times(self, factor: float) -> Traffic:
        return Traffic(*(getattr(self, name) * factor for name in Traffic.__slots__))


def expected_distinct(num: int, picked: int, rows: int) -> float:
    """Expected number of different things among ``num`` when each of ``rows`` picks ``picked`` of them at random."""
    return num * (1.0 - (1.0 - picked / num) ** rows)


def attention_weights(text: TextConfig, layer_id: int) -> int:
    spec = text.kv_layout.layers[layer_id]
    q_width, kv_width = text.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    projections = 0 if not spec.owns_kv else 1 if text.attention_k_eq_v and spec.kind == FULL else 2
    norms = spec.head_dim * (2 if spec.owns_kv else 1)
    return text.hidden_size * (2 * q_width + projections * kv_width) + norms


def layer_weights(text: TextConfig, layer_id: int, num_experts: float) -> float:
    """Elements of one layer, with ``num_experts`` of its experts."""
    hidden, ple = text.hidden_size, text.per_layer_input_size
    total: float = attention_weights(text, layer_id) + 3 * hidden * text.mlp_width(layer_id) + 4 * hidden + 1
    if ple:
        total += 2 * hidden * ple + hidden
    if text.moe is not None:
        total += text.moe.num_experts * (hidden + 1) + hidden + 3 * hidden  # router, and three norms
        total += num_experts * 3 * hidden * text.moe.intermediate_size
    return total


def stack_weights(text: TextConfig, rows: int | None) -> float:
    """Elements of all layers, the final norm and the projection of per-layer embeddings.

    Of the experts, those that ``rows`` rows are expected to pick; None: all.
    """
    num_experts = 0.0
    if text.moe is not None:
        every = float(text.moe.num_experts)
        num_experts = every if rows is None else expected_distinct(text.moe.num_experts, text.moe.top_k, rows)
    ple = text.num_layers * text.per_layer_input_size
    shared = text.hidden_size * ple + (text.per_layer_input_size if ple else 0)
    return sum(layer_weights(text, i, num_experts) for i in range(text.num_layers)) + text.hidden_size + shared


def parameter_count(config: ModelConfig) -> int:
    """Elements of every tensor of the checkpoint's text part (a tied head counted once)."""
    text, assistant = config.text, config.assistant
    total = stack_weights(text, None) + text.vocab_size * text.hidden_size
    total += text.per_layer_vocab_size * text.num_layers * text.per_layer_input_size
    if assistant is not None:
        total += 3 * assistant.backbone_hidden_size * text.hidden_size
        if assistant.num_centroids:
            total += assistant.num_centroids * text.hidden_size + text.vocab_size  # centroids, and the order of tokens
    return round(total)


def kv_read_elements(text: TextConfig, kv_len: int, rows: int) -> int:
    """K and V elements that ``rows`` query rows at the end of ``kv_len`` tokens read, over all layers."""
    total = 0
    for spec in text.kv_layout.layers:
        visible = kv_len if spec.window is None else min(kv_len, spec.window + rows - 1)
        total += 2 * spec.num_kv_heads * spec.head_dim * visible
    return total


def pass_traffic(config: ModelConfig, batch: int, rows: int, context: int, itemsize: int) -> Traffic:
    """One target pass: ``rows`` new tokens for each of ``batch`` requests that have ``context`` tokens committed."""
    text, total_rows = config.text, batch * rows
    table_rows = total_rows * (text.hidden_size + text.num_layers * text.per_layer_input_size)
    return Traffic(
        weights=stack_weights(text, total_rows) * itemsize,
        head=text.vocab_size * text.hidden_size * itemsize,
        tables=table_rows * itemsize,
        kv_read=batch * kv_read_elements(text, context + rows, rows) * itemsize,
        kv_write=total_rows * text.kv_layout.elements_per_token * itemsize,
    )


def draft_traffic(pair: Pair, batch: int, context: int, itemsize: int) -> Traffic:
    """One draft step of ``batch`` requests over ``context`` committed tokens."""
    text, assistant = pair.assistant.text, pair.assistant.assistant
    assert assistant is not None
    head: float = text.vocab_size
    if assistant.num_centroids:
        picked = expected_distinct(assistant.num_centroids, assistant.centroid_top_k, batch)
        head = assistant.num_centroids + picked * text.vocab_size / assistant.num_centroids
    projections = 3 * assistant.backbone_hidden_size * text.hidden_size
    return Traffic(
        weights=(stack_weights(text, batch) + projections) * itemsize,
        head=head * text.hidden_size * itemsize,
        tables=batch * assistant.backbone_hidden_size * itemsize,
        kv_read=batch * kv_read_elements(text, context, 1) * itemsize,
    )


def round_traffic(pair: Pair, num_steps: int, batch: int, context: int, itemsize: int) -> Traffic:
    """``num_steps`` draft steps, and the target pass that verifies them."""
    drafts = draft_traffic(pair, batch, context, itemsize).times(num_steps)
    return drafts + pass_traffic(pair.target, batch, num_steps + 1, context, itemsize)


# ---------------------------------------------------------------------------------------------------------------- FLOPs


def prefill_flops(text: TextConfig, tokens: int, *, skip_sharing: bool = True) -> float:
    """Multiplications and additions of a prompt of ``tokens``, logits of its last token included.

    ``skip_sharing``: layers without KV of their own compute the last token only.
    """
    total = 2.0 * text.vocab_size * text.hidden_size
    total += 2.0 * tokens * text.hidden_size * text.num_layers * text.per_layer_input_size
    active = 0 if text.moe is None else text.moe.top_k
    for spec in text.kv_layout.layers:
        last_only = skip_sharing and not spec.owns_kv
        span = tokens if spec.window is None else min(tokens, spec.window)
        pairs = span if last_only else span * (span + 1) / 2 + (tokens - span) * span
        total += 2.0 * (1 if last_only else tokens) * layer_weights(text, spec.layer_id, active)
        total += 4.0 * text.num_heads * spec.head_dim * pairs
    return total
