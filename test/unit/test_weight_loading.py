"""Checkpoints that do not fit are one error that lists everything; full-size shapes build without memory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang.srt.configs.registries import MODELS, load_entry
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.weight_loader import load_weights
from sglang.srt.server_args_slices import LoadConfig
from sglang.srt.utils.device import make_device
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


def test_an_index_stays_in_its_folder(copy: Path) -> None:
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../other/model.safetensors"}}))
    with pytest.raises(ValueError, match="no file of its own folder"):
        load_weights(build(copy), copy)


def runner_of(path: Path) -> ModelRunner:
    load = LoadConfig(path, "auto", "float32", {}, trust_remote_code=False, revision=None, deterministic=False)
    config = load_model_config(path, overrides={}, trust_remote_code=False)
    return ModelRunner(config, load, make_device("cpu"))


def products(model) -> list[torch.Tensor]:
    """What every linear layer, packed or not, makes of the same input; then the embedding and the head."""
    linears = model.stack._linears
    results = [linear(torch.linspace(-1, 1, linear.weight.shape[1])[None]) for linear in linears]
    return [*results, model.embed_tokens(torch.arange(9)), model.compute_logits(torch.linspace(-1, 1, 64)[None])]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture
def other(copy: Path, tmp_path: Path) -> Path:
    """A checkpoint of the same shape with other values everywhere."""
    folder = Path(shutil.copytree(copy, tmp_path / "other"))
    rewrite(folder, lambda tensors: tensors.update({name: t * 1.5 + 0.1 for name, t in tensors.items()}))
    return folder


def test_other_weights_take_the_places_of_the_former(copy: Path, other: Path) -> None:
    runner = runner_of(copy)
    embedding = runner.model.embed_tokens.weight.data_ptr()
    before = products(runner.model)
    runner.check_update(other)
    runner.update_weights(other)
    assert same(products(runner.model), products(runner_of(other).model)) and not same(products(runner.model), before)
    assert runner.model.embed_tokens.weight.data_ptr() == embedding
    runner.update_weights(copy)
    assert same(products(runner.model), before)


def test_weights_of_another_shape_are_refused_before_anything_changes(
    copy: Path, tiny_checkpoints: Path, tmp_path: Path
) -> None:
    runner = runner_of(copy)
    before = products(runner.model)
    with pytest.raises(ValueError, match=r"is not of the shape that is served: .*num_layers is \d+, served is \d+"):
        runner.check_update(tiny_checkpoints / "dense")
    with pytest.raises(ValueError, match="has no config.json"):
        runner.check_update(tmp_path)
    untied = Path(shutil.copytree(copy, tmp_path / "untied"))
    rewrite(untied, lambda tensors: tensors.update({"lm_head.weight": torch.randn(512, 64)}))
    with pytest.raises(ValueError, match="it differs in lm_head.weight"):
        runner.check_update(untied)
    small = Path(shutil.copytree(copy, tmp_path / "small"))
    rewrite(small, lambda tensors: tensors.update({"model.language_model.norm.weight": torch.zeros(3)}))
    with pytest.raises(ValueError, match="1 misshapen"):
        runner.check_update(small)
    assert same(products(runner.model), before)


def test_weights_that_break_off_leave_the_former(copy: Path, other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of(copy)
    before = products(runner.model)
    finish = runner.model.finish_loading
    calls: list[int] = []

    def broken() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise OSError("the disk is gone")
        finish()

    monkeypatch.setattr(runner.model, "finish_loading", broken)
    with pytest.raises(ValueError, match="the former weights serve again: the disk is gone"):
        runner.update_weights(other)
    assert same(products(runner.model), before)
    monkeypatch.undo()
    runner.update_weights(other)
    assert not same(products(runner.model), before)
