"""Checkpoints that do not fit are one error that lists everything; full-size shapes build without memory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang.srt.configs.registries import MODELS, load_entry
from sglang.srt.model_executor.weight_loader import load_weights
from sglang.srt.utils.hf_transformers.config import load_model_config


def build(path: Path):
    config = load_model_config(path, overrides={}, trust_remote_code=False)
    return load_entry(MODELS, config.architecture)(config, torch.float32, torch.device("cpu"))


@pytest.fixture
def copy(tiny_checkpoints: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoints / "eseries", tmp_path / "copy"))


def rewrite(path: Path, change) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def test_every_problem_is_listed_at_once(copy: Path) -> None:
    prefix = "model.language_model."

    def change(tensors):
        del tensors[prefix + "norm.weight"]
        tensors[prefix + "layers.0.bogus.weight"] = torch.zeros(2)
        tensors[prefix + "layers.1.layer_scalar"] = torch.zeros(3)

    rewrite(copy, change)
    with pytest.raises(ValueError) as error:
        load_weights(build(copy), copy)
    text = str(error.value)
    assert "1 missing: model.language_model.norm.weight" in text
    assert "1 unexpected: model.language_model.layers.0.bogus.weight" in text
    assert "1 misshapen: model.language_model.layers.1.layer_scalar is [3], the configuration says [1]" in text


def test_leftover_tensors_of_sharing_layers_are_ignored(copy: Path) -> None:
    def change(tensors):
        tensors["model.language_model.layers.7.self_attn.k_proj.weight"] = torch.zeros(16, 64)
        tensors["model.language_model.layers.7.self_attn.v_norm.weight"] = torch.zeros(16)

    rewrite(copy, change)
    load_weights(build(copy), copy)


def test_an_untied_head_is_used(copy: Path) -> None:
    head = torch.randn(512, 64)
    rewrite(copy, lambda tensors: tensors.update({"lm_head.weight": head}))
    model = build(copy)
    load_weights(model, copy)
    assert torch.equal(model.get_embed_and_head()[1], head)
    assert not torch.equal(model.embed_tokens.weight, head)


@pytest.mark.parametrize("size", [0, 4, 100, -1000])
def test_truncated_file(copy: Path, size: int) -> None:
    file = copy / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:size])
    with pytest.raises(ValueError, match="not a complete safetensors file"):
        load_weights(build(copy), copy)


def test_absent_files(copy: Path) -> None:
    model = build(copy)
    (copy / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="no .safetensors file"):
        load_weights(model, copy)
    index = copy / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(ValueError, match="lacks model-00001-of-00002.safetensors"):
        load_weights(model, copy)
    index.write_text("{")
    with pytest.raises(ValueError, match="not a safetensors index"):
        load_weights(model, copy)
