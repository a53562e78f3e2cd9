"""Configurations of real checkpoints, in every serialised form, against written-down facts and transformers."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
from transformers import AutoConfig

from sglang.srt.configs.model_config import FULL, SLIDING, KVLayout, ModelConfig, RopeConfig, TextConfig
from sglang.srt.configs.model_config_parser import parse_model_config
from sglang.srt.configs.registries import MODELS

GENERATION = {"eos_token_id": [1, 106, 50], "pad_token_id": 0}
NO_SHARING: dict[str, Any] = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}


def text_dict(pattern: list[str], repeats: int, **values: Any) -> dict[str, Any]:
    return {
        "model_type": "gemma4_text",
        "vocab_size": 262144,
        "num_hidden_layers": len(pattern) * repeats,
        "layer_types": pattern * repeats,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_global_key_value_heads": None,
        "attention_k_eq_v": False,
        "use_double_wide_mlp": False,
        "enable_moe_block": False,
        "final_logit_softcapping": 30.0,
        "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh",
        "vocab_size_per_layer_input": 262144,
        "use_bidirectional_attention": None,
        "eos_token_id": 1,
        "tie_word_embeddings": True,
        **values,
    }


def composite(text: dict[str, Any], *, unified: bool = False, audio: bool = True) -> dict[str, Any]:
    prefix = "Gemma4Unified" if unified else "Gemma4"
    if unified:
        text = {**text, "model_type": "gemma4_unified_text"}
    return {
        "architectures": [f"{prefix}ForConditionalGeneration"],
        "model_type": "gemma4_unified" if unified else "gemma4",
        "dtype": "bfloat16",
        "text_config": text,
        "vision_config": {"model_type": "gemma4_unified_vision" if unified else "gemma4_vision"},
        "audio_config": {"model_type": "gemma4_unified_audio" if unified else "gemma4_audio"} if audio else None,
        "eos_token_id": [1, 106],
        "image_token_id": 258880,
        "audio_token_id": 258881,
        "video_token_id": 258884,
        "tie_word_embeddings": True,
    }


S4, S5 = [SLIDING] * 4 + [FULL], [SLIDING] * 5 + [FULL]
TARGETS = {
    "E2B": composite(
        text_dict(
            S4,
            7,
            hidden_size=1536,
            num_attention_heads=8,
            num_key_value_heads=1,
            intermediate_size=6144,
            use_double_wide_mlp=True,
            num_kv_shared_layers=20,
            hidden_size_per_layer_input=256,
            sliding_window=512,
            max_position_embeddings=131072,
        )
    ),
    "E4B": composite(
        text_dict(
            S5,
            7,
            hidden_size=2560,
            num_attention_heads=8,
            num_key_value_heads=2,
            intermediate_size=10240,
            num_kv_shared_layers=18,
            hidden_size_per_layer_input=256,
            sliding_window=512,
            max_position_embeddings=131072,
        )
    ),
    "12B": composite(
        text_dict(
            S5,
            8,
            hidden_size=3840,
            num_attention_heads=16,
            num_key_value_heads=8,
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            intermediate_size=15360,
            sliding_window=1024,
            max_position_embeddings=262144,
            use_bidirectional_attention="vision",
            **NO_SHARING,
        ),
        unified=True,
    ),
    "26B-A4B": composite(
        text_dict(
            S5,
            5,
            hidden_size=2816,
            num_attention_heads=16,
            num_key_value_heads=8,
            num_global_key_value_heads=2,
            attention_k_eq_v=True,
            intermediate_size=2112,
            enable_moe_block=True,
            num_experts=128,
            top_k_experts=8,
            moe_intermediate_size=704,
            sliding_window=1024,
            max_position_embeddings=262144,
            use_bidirectional_attention="vision",
            **NO_SHARING,
        ),
        audio=False,
    ),
    "31B": composite(
        text_dict(
            S5,
            10,
            hidden_size=5376,
            num_attention_heads=32,
            num_key_value_heads=16,
            num_global_key_value_heads=4,
            attention_k_eq_v=True,
            intermediate_size=21504,
            sliding_window=1024,
            max_position_embeddings=262144,
            use_bidirectional_attention="vision",
            **NO_SHARING,
        ),
        audio=False,
    ),
}


def assistant_dict(target: str, hidden: int, intermediate: int, heads: int, *, ordered: bool) -> dict[str, Any]:
    backbone = TARGETS[target]["text_config"]
    unified = target == "12B"
    text = text_dict([SLIDING] * 3 + [FULL], 1, hidden_size=hidden, intermediate_size=intermediate)
    text.update(
        num_attention_heads=heads,
        num_kv_shared_layers=4,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        final_logit_softcapping=None,
    )
    for key in ("num_key_value_heads", "num_global_key_value_heads", "attention_k_eq_v", "sliding_window"):
        text[key] = backbone[key]
    if unified:
        text["model_type"] = "gemma4_unified_text"
    prefix = "Gemma4Unified" if unified else "Gemma4"
    return {
        "architectures": [f"{prefix}AssistantForCausalLM"],
        "model_type": "gemma4_unified_assistant" if unified else "gemma4_assistant",
        "torch_dtype": "bfloat16",
        "backbone_hidden_size": backbone["hidden_size"],
        "text_config": text,
        "use_ordered_embeddings": ordered,
        "num_centroids": 2048,
        "centroid_intermediate_top_k": 32,
    }


ASSISTANTS = {
    "E2B": assistant_dict("E2B", 256, 2048, 4, ordered=True),
    "E4B": assistant_dict("E4B", 256, 2048, 4, ordered=True),
    "12B": assistant_dict("12B", 1024, 8192, 16, ordered=False),
    "26B-A4B": assistant_dict("26B-A4B", 1024, 8192, 16, ordered=False),
    "31B": assistant_dict("31B", 1024, 8192, 32, ordered=False),
}

# name: (layer that sliding / full assistant layers read, (sliding owners, full owners), KV heads on each)
STORE_AND_KV = {
    "E2B": (13, 14, 12, 3, 1, 1),
    "E4B": (22, 23, 20, 4, 2, 2),
    "12B": (46, 47, 40, 8, 8, 1),
    "26B-A4B": (28, 29, 25, 5, 8, 2),
    "31B": (58, 59, 50, 10, 16, 4),
}


def parse(raw: dict[str, Any]) -> ModelConfig:
    return parse_model_config(raw, GENERATION)


def changed(raw: dict[str, Any], **values: Any) -> dict[str, Any]:
    """``raw`` with other values in its decoder; the value ``...`` deletes the key."""
    raw = copy.deepcopy(raw)
    text = raw["text_config"]
    for key, value in values.items():
        text.pop(key, None)
        if value is not ...:
            text[key] = value
    return raw


def decoder_parameters(text: TextConfig) -> int:
    """Number of weights of a tied decoder, counted from the geometry alone."""
    hidden, total = text.hidden_size, text.vocab_size * text.hidden_size + text.hidden_size
    for spec in text.kv_layout.layers:
        query = text.num_heads * spec.head_dim
        total += 2 * query * hidden + spec.head_dim + 3 * hidden * text.mlp_width(spec.layer_id) + 4 * hidden + 1
        if spec.owns_kv:
            projections = 1 if text.attention_k_eq_v and spec.kind == FULL else 2
            total += projections * spec.num_kv_heads * spec.head_dim * hidden + spec.head_dim
        if text.per_layer_input_size:
            total += 2 * hidden * text.per_layer_input_size + hidden
        if text.moe:
            total += text.moe.num_experts * (hidden + 1 + 3 * hidden * text.moe.intermediate_size) + 4 * hidden
    width = text.num_layers * text.per_layer_input_size
    return total + width * (text.per_layer_vocab_size + hidden) + text.per_layer_input_size


@pytest.mark.parametrize("name", TARGETS)
def test_layers_that_own_kv_of_the_real_targets(name: str) -> None:
    config = parse(TARGETS[name])
    layout = config.text.kv_layout
    store_sliding, store_full, num_sliding, num_full, heads_sliding, heads_full = STORE_AND_KV[name]
    assert layout.last_owner(SLIDING).layer_id == store_sliding
    assert layout.last_owner(FULL).layer_id == store_full
    assert [spec.kind for spec in layout.owners].count(SLIDING) == num_sliding
    assert [spec.kind for spec in layout.owners].count(FULL) == num_full
    expected = num_sliding * 2 * heads_sliding * 256 + num_full * 2 * heads_full * 512
    assert layout.elements_per_token == expected
    for spec in layout.layers:
        assert spec.window == (config.text.sliding_window if spec.kind == SLIDING else None)
        if not spec.owns_kv:
            assert spec.owner == layout.last_owner(spec.kind).layer_id
    assert not config.is_assistant and config.composite and config.dtype == "bfloat16"


def test_facts_of_the_real_targets() -> None:
    configs = {name: parse(raw) for name, raw in TARGETS.items()}
    assert {name: config.text.num_layers for name, config in configs.items()} == {
        "E2B": 35,
        "E4B": 42,
        "12B": 48,
        "26B-A4B": 30,
        "31B": 60,
    }
    assert [configs["E2B"].text.mlp_width(layer) for layer in (14, 15, 34)] == [6144, 12288, 12288]
    assert configs["E4B"].text.mlp_width(41) == 10240
    assert configs["E2B"].text.per_layer_input_size == 256 and configs["E2B"].text.per_layer_vocab_size == 262144
    # the released 12B names a vocabulary for embeddings it does not have
    assert configs["12B"].text.per_layer_vocab_size == 0
    moe = configs["26B-A4B"].text.moe
    assert moe is not None and (moe.num_experts, moe.top_k, moe.intermediate_size) == (128, 8, 704)
    assert configs["E2B"].multimodal == ("vision", "audio") and configs["31B"].multimodal == ("vision",)
    assert configs["12B"].media_token_ids == (("image", 258880), ("audio", 258881), ("video", 258884))
    assert configs["12B"].context_length == 262144
    for config in configs.values():
        assert config.eos_token_ids == (1, 50, 106)
        assert config.text.rope(SLIDING) == RopeConfig(10_000.0, False, 1.0, 1.0)
        assert config.text.rope(FULL) == RopeConfig(1_000_000.0, True, 0.25, 1.0)
        assert config.text.final_logit_softcapping == 30.0


@pytest.mark.parametrize(("name", "billions"), [("26B-A4B", 25.2), ("31B", 30.7)])
def test_number_of_text_parameters_of_real_targets(name: str, billions: float) -> None:
    assert decoder_parameters(parse(TARGETS[name]).text) / 1e9 == pytest.approx(billions, abs=0.05)


@pytest.mark.parametrize(
    ("name", "millions"), [("E2B", 77.99), ("E4B", 78.78), ("12B", 422.86), ("26B-A4B", 419.71), ("31B", 469.52)]
)
def test_real_assistants(name: str, millions: float) -> None:
    config, target = parse(ASSISTANTS[name]), parse(TARGETS[name])
    assert config.assistant is not None and config.is_assistant and not config.composite
    assert config.assistant.backbone_hidden_size == target.text.hidden_size
    assert config.assistant.num_centroids == (2048 if name in ("E2B", "E4B") else 0)
    assert all(spec.owner == -1 for spec in config.text.kv_layout.layers)
    assert config.text.kv_layout.elements_per_token == 0
    for spec in config.text.kv_layout.layers:
        store = target.text.kv_layout.last_owner(spec.kind)
        assert (spec.num_kv_heads, spec.head_dim, spec.window) == (store.num_kv_heads, store.head_dim, store.window)
    hidden = config.text.hidden_size
    total = decoder_parameters(config.text) + 3 * hidden * config.assistant.backbone_hidden_size
    # the table of cluster members is counted with the weights
    total += config.assistant.num_centroids * hidden + (262144 if config.assistant.num_centroids else 0)
    assert total / 1e6 == pytest.approx(millions, abs=0.3)


@pytest.mark.parametrize("name", [*TARGETS, *(f"{name}-assistant" for name in ASSISTANTS)])
def test_a_file_saved_again_means_the_same(name: str) -> None:
    raw = ASSISTANTS[name.removesuffix("-assistant")] if name.endswith("-assistant") else TARGETS[name]
    library = AutoConfig.for_model(**copy.deepcopy(raw))
    saved = library.to_dict()
    assert "per_layer_config" in saved["text_config"] and "global_head_dim" not in saved["text_config"]
    # string keys, as in a file
    saved["text_config"]["per_layer_config"] = {
        str(layer): dict(values) for layer, values in saved["text_config"]["per_layer_config"].items()
    }
    assert parse(saved).text == parse(raw).text
    layers = parse(raw).text.kv_layout.layers
    for spec, layer in zip(layers, library.text_config.per_layer_config, strict=True):
        assert (spec.head_dim, spec.num_kv_heads) == (layer.head_dim, layer.num_key_value_heads)
    # transformers before 5.24 does not say which layers share; the facts of the real models are checked elsewhere too
    if not name.endswith("-assistant") and hasattr(library.text_config, "kv_sharing_modes"):
        modes = library.text_config.kv_sharing_modes
        assert [spec.owns_kv for spec in layers] == [mode != "reuse" for mode in modes]
        stores = {parse(raw).text.kv_layout.last_owner(kind).layer_id for kind in (SLIDING, FULL)}
        assert stores == {i for i, mode in enumerate(modes) if mode == "store"}


def test_flat_file_means_the_same_as_its_composite() -> None:
    flat = {**TARGETS["E2B"]["text_config"], "architectures": ["Gemma4ForCausalLM"], "dtype": "float32"}
    config = parse(flat)
    assert config.text == parse(TARGETS["E2B"]).text
    assert not config.composite and config.multimodal == () and config.media_token_ids == ()
    assert config.dtype == "float32"
    unified = {**TARGETS["12B"]["text_config"], "architectures": ["Gemma4UnifiedForCausalLM"]}
    assert parse(unified).text == parse(TARGETS["12B"]).text


def test_model_type_stands_in_for_missing_architectures() -> None:
    raw = copy.deepcopy(TARGETS["E2B"])
    del raw["architectures"]
    assert parse(raw).architecture == "Gemma4ForConditionalGeneration"


@pytest.mark.parametrize("architecture", MODELS)
def test_every_registered_model_has_a_translation(architecture: str) -> None:
    raw = {"architectures": [architecture]}
    with pytest.raises(ValueError, match="is missing|nests the decoder in text_config"):
        parse(raw)


def test_defaults_of_missing_keys(caplog: pytest.LogCaptureFixture) -> None:
    raw = changed(
        TARGETS["31B"],
        layer_types=...,
        global_head_dim=...,
        rope_parameters=...,
        num_kv_shared_layers=...,
        attention_k_eq_v=...,
        final_logit_softcapping=...,
        hidden_size_per_layer_input=...,
    )
    text = parse(raw).text
    assert [spec.kind for spec in text.kv_layout.layers] == S5 * 10
    assert text.kv_layout.layers[5].head_dim == 512
    assert text.kv_layout.layers[5].num_kv_heads == 16, "the global count needs attention_k_eq_v"
    assert text.first_kv_shared_layer == 60 and text.final_logit_softcapping is None
    assert text.per_layer_input_size == 256
    assert parse(changed(TARGETS["12B"], hidden_size_per_layer_input=...)).text.per_layer_input_size == 0
    assert not caplog.records


def test_the_global_head_width_defaults_to_512_even_for_narrow_heads() -> None:
    assert parse(changed(TARGETS["E2B"], head_dim=64, global_head_dim=...)).text.kv_layout.layers[4].head_dim == 512


def test_the_last_layer_is_full_attention_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    kinds = (S5 * 10)[:-1] + [SLIDING]
    with caplog.at_level(logging.WARNING):
        layout = parse(changed(TARGETS["31B"], layer_types=kinds)).text.kv_layout
    assert layout.layers[-1].kind == FULL and layout.layers[-1].head_dim == 512 and layout.layers[-1].window is None
    assert "layer_types" in caplog.text


def test_per_layer_config_wins_over_the_released_keys() -> None:
    raw = changed(TARGETS["31B"], per_layer_config={"5": {"head_dim": 384, "num_key_value_heads": 2}})
    layers = parse(raw).text.kv_layout.layers
    assert (layers[5].head_dim, layers[5].num_kv_heads) == (384, 2)
    assert (layers[11].head_dim, layers[11].num_kv_heads) == (256, 16), "a layer not listed has the common shape"


def test_an_assistant_without_a_sharing_count_shares_everything() -> None:
    for value in (0, ..., None):
        config = parse(changed(ASSISTANTS["E2B"], num_kv_shared_layers=value))
        assert config.text.first_kv_shared_layer == 0
        assert not config.text.kv_layout.owners


def test_stop_ids_come_from_both_files_and_both_levels() -> None:
    raw = changed(TARGETS["E2B"], eos_token_id=[7])
    assert parse_model_config({**raw, "eos_token_id": 106}, {"eos_token_id": 50}).eos_token_ids == (7, 50, 106)
    assert parse_model_config({**raw, "eos_token_id": None}, None).eos_token_ids == (7,)
    raw = changed(TARGETS["E2B"], eos_token_id=...)
    assert parse_model_config({**raw, "eos_token_id": None}, None).eos_token_ids == (1,)


def test_an_empty_layout_has_nothing_to_borrow() -> None:
    with pytest.raises(ValueError, match=FULL):
        KVLayout(()).last_owner(FULL)


BAD_TEXT = [
    ({"num_kv_shared_layers": 31}, "num_kv_shared_layers makes layer 4 .full_attention. share"),
    ({"num_kv_shared_layers": 35}, "num_kv_shared_layers"),
    ({"num_kv_shared_layers": -1}, "num_kv_shared_layers"),
    ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
    ({"hidden_size": ...}, "text_config.hidden_size is missing"),
    ({"hidden_size": "1536"}, "text_config.hidden_size"),
    ({"hidden_size": True}, "text_config.hidden_size"),
    ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ({"num_hidden_layers": 34}, "layer_types must be a list of num_hidden_layers = 34"),
    ({"layer_types": ["linear_attention"] * 35}, "linear_attention"),
    ({"layer_types": "full_attention"}, "layer_types"),
    ({"num_attention_heads": 7, "num_key_value_heads": 2}, "num_attention_heads"),
    ({"head_dim": 33}, "head_dim of layer 0 must be even"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ({"hidden_activation": "silu"}, "hidden_activation"),
    ({"attention_bias": True}, "attention_bias"),
    ({"attention_k_eq_v": "yes"}, "attention_k_eq_v"),
    ({"rope_parameters": {FULL: {"rope_type": "yarn", "rope_theta": 1e6}}}, "rope_parameters.full_attention.rope_type"),
    ({"rope_parameters": {FULL: {"rope_type": "default"}}}, "rope_theta is missing"),
    ({"rope_parameters": {FULL: 3}}, "rope_parameters"),
    ({"rope_parameters": {SLIDING: {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}}, "partial_rotary_factor"),
    ({"rope_parameters": {SLIDING: {"rope_theta": 1e4, "factor": 8.0}}}, "sliding_attention.factor"),
    ({"per_layer_config": {"99": {"head_dim": 512}}}, "per_layer_config"),
    ({"per_layer_config": {"4": {"intermediate_size": 5}}}, "intermediate_size"),
    ({"per_layer_config": [1]}, "per_layer_config"),
    ({"enable_moe_block": True}, "num_experts is missing"),
    ({"enable_moe_block": True, "num_experts": 2, "top_k_experts": 3, "moe_intermediate_size": 8}, "top_k_experts"),
    ({"eos_token_id": [262144]}, "eos_token_id"),
    ({"eos_token_id": "1"}, "eos_token_id"),
]


@pytest.mark.parametrize(
    ("values", "message"), BAD_TEXT, ids=[f"{i}-{next(iter(v))}" for i, (v, _) in enumerate(BAD_TEXT)]
)
def test_a_bad_decoder_key_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(changed(TARGETS["E2B"], **values))


BAD_TOP: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM.*Gemma4ForCausalLM"),
    ({"architectures": []}, "architectures"),
    ({"architectures": "Gemma4ForCausalLM"}, "architectures"),
    ({"architectures": None, "model_type": "llama"}, "llama"),
    ({"architectures": ["Gemma4ForCausalLM"]}, "has no text_config"),
    ({"text_config": None}, "nests the decoder"),
    ({"text_config": [1]}, "text_config must be an object"),
    ({"dtype": "int8"}, "dtype must be one of float32"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ({"image_token_id": -1}, "image_token_id"),
]


@pytest.mark.parametrize(("values", "message"), BAD_TOP)
def test_a_bad_top_level_key_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse({**TARGETS["E2B"], **values})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers"),
        ({"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input"),
        ({"use_double_wide_mlp": True}, "use_double_wide_mlp"),
        ({"enable_moe_block": True}, "enable_moe_block"),
        ({"vocab_size": 262143}, "num_centroids"),
    ],
)
def test_a_bad_assistant_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(changed(ASSISTANTS["E2B"], **values))


def test_an_assistant_needs_its_backbone_and_sane_centroids() -> None:
    raw = {key: value for key, value in ASSISTANTS["E2B"].items() if key != "backbone_hidden_size"}
    with pytest.raises(ValueError, match="backbone_hidden_size is missing"):
        parse(raw)
    with pytest.raises(ValueError, match="centroid_intermediate_top_k"):
        parse({**ASSISTANTS["E2B"], "centroid_intermediate_top_k": 4096})


def test_unified_models_have_no_per_layer_embeddings() -> None:
    with pytest.raises(ValueError, match="hidden_size_per_layer_input"):
        parse(changed(TARGETS["12B"], hidden_size_per_layer_input=256))
