"""The shipped pair is whole and is what the built package contains."""

from __future__ import annotations

import fnmatch
import json
from pathlib import Path

import pytest
from safetensors import safe_open

from fixtures.source_tree import ROOT
from sglang.srt.utils.embedded import EMBEDDED_MODELS, embedded_model


def tensors(folder: Path) -> set[str]:
    names: set[str] = set()
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            names |= set(opened.keys())
    return names


def test_names() -> None:
    assert embedded_model("tiny-gemma4") == EMBEDDED_MODELS["tiny-gemma4"]
    assert embedded_model("tiny_gemma4") is None


@pytest.mark.parametrize("part", ["target", "assistant"])
def test_checkpoint_is_whole(trained_pair, part) -> None:
    folder = {"target": trained_pair.target, "assistant": trained_pair.assistant}[part]
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == {"target": "gemma4_text", "assistant": "gemma4_assistant"}[part]
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= {p.name for p in folder.iterdir()}
    index = folder / "model.safetensors.index.json"
    if index.exists():
        assert tensors(folder) == set(json.loads(index.read_text())["weight_map"])
    assert tensors(folder)


def test_package_data_pattern_covers_every_file(trained_pair) -> None:
    (line,) = (line for line in (ROOT / "pyproject.toml").read_text().splitlines() if "models_data" in line)
    (pattern,) = (pattern for pattern in line.split('"') if pattern.startswith("models_data"))
    package = ROOT / "python" / "sglang" / "srt"
    files = [p for p in (package / "models_data").rglob("*") if p.is_file()]
    assert files
    # fnmatch lets * cross folders, setuptools does not: the depth has to agree too
    for file in files:
        inside = file.relative_to(package).as_posix()
        assert fnmatch.fnmatch(inside, pattern) and inside.count("/") == pattern.count("/"), inside
