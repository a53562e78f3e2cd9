"""Finding a model's files, reading its configuration and tokenizer; one sentence for everything that is wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from sglang.srt.utils.embedded import EmbeddedModel
from sglang.srt.utils.hf_transformers.config import (
    apply_overrides,
    load_architecture,
    load_generation_config,
    load_model_config,
    load_raw_config,
)
from sglang.srt.utils.hf_transformers.hub import embedded_assistant, resolve_model_path
from sglang.srt.utils.hf_transformers.tokenizer import has_chat_template, load_tokenizer

KINDS = ("dense", "dense_keqv", "eseries", "moe", "mm", "unified")


def load(path: Path, trust_remote_code: bool = False, **overrides: Any) -> Any:
    return load_model_config(path, overrides=overrides, trust_remote_code=trust_remote_code)


@pytest.fixture
def copied(trained_pair: EmbeddedModel, tmp_path: Path) -> Path:
    """The shipped target's small files, to be damaged."""
    for file in trained_pair.target.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, tmp_path)
    return tmp_path


def test_the_shipped_pair_is_found_by_name(trained_pair: EmbeddedModel) -> None:
    assert resolve_model_path("tiny-gemma4", None, role="model") == trained_pair.target.resolve()
    assert resolve_model_path("tiny-gemma4", None, role="tokenizer") == trained_pair.target.resolve()
    assert resolve_model_path("tiny-gemma4", None, role="draft") == trained_pair.assistant.resolve()


def test_the_assistant_of_a_shipped_target_is_known_by_name_and_by_directory(
    trained_pair: EmbeddedModel, tmp_path: Path
) -> None:
    assert embedded_assistant("tiny-gemma4") == trained_pair.assistant.resolve()
    assert embedded_assistant(str(trained_pair.target)) == trained_pair.assistant.resolve()
    assert embedded_assistant(str(tmp_path)) is None


def test_a_directory_wins_over_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_model_path("org/name", None, role="model") == (tmp_path / "org" / "name").resolve()


@pytest.mark.parametrize("value", ["/no/such/directory", "./nowhere", "nowhere", "a/b/c", "-/x", "org/"])
def test_what_is_no_directory_and_no_id_never_reaches_the_hub(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    with pytest.raises(ValueError, match="--model-path .* is not a directory.*tiny-gemma4"):
        resolve_model_path(value, None, role="model")


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(ValueError, match="--tokenizer-path .* is a file"):
        resolve_model_path(str(file), None, role="tokenizer")


def test_a_download_takes_only_the_files_that_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def download(repo_id: str, **options: Any) -> str:
        calls.append({"repo_id": repo_id, **options})
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model_path("google/gemma-4-E2B-it", "abc", role="model") == tmp_path
    resolve_model_path("google/gemma-4-E2B-it", None, role="model", weights=False)
    assert calls[0]["repo_id"] == "google/gemma-4-E2B-it" and calls[0]["revision"] == "abc"
    assert 0 < calls[0]["etag_timeout"] <= 10
    assert "*.safetensors" in calls[0]["allow_patterns"] and "*.json" in calls[0]["allow_patterns"]
    assert not any("safetensors" in pattern for pattern in calls[1]["allow_patterns"])


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (LocalEntryNotFoundError("no connection\nmore"), "could not be downloaded .*no connection"),
        (HFValidationError("bad id"), "not a valid Hugging Face id: bad id"),
        (OSError("disk full"), "disk full"),
    ],
)
def test_a_failed_download_is_one_sentence(error: Exception, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*args: Any, **options: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(
        ValueError, match="--speculative-draft-model-path 'org/name' at revision 'v1' .*" + message
    ) as info:
        resolve_model_path("org/name", "v1", role="draft")
    assert "\n" not in str(info.value)


def test_offline_mode_is_honoured_without_waiting(tmp_path: Path) -> None:
    code = (
        "from sglang.srt.utils.hf_transformers.hub import resolve_model_path\n"
        "try:\n    resolve_model_path('google/gemma-4-E2B-it', None, role='model')\n"
        "except ValueError as err:\n    print(err)\n"
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("--model-path 'google/gemma-4-E2B-it' is not a local directory")
    assert done.stdout.count("\n") == 1


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_checkpoint_is_understood(kind: str, tiny_checkpoints: Path, tiny_checkpoints_flat: Path) -> None:
    target, assistant = load(tiny_checkpoints / kind), load(tiny_checkpoints / f"{kind}-assistant")
    assert target.composite and not target.is_assistant and assistant.is_assistant
    assert assistant.assistant.backbone_hidden_size == target.text.hidden_size
    assert assistant.assistant.num_centroids == (32 if kind in ("eseries", "mm") else 0)
    assert target.eos_token_ids == (1, 50, 106)
    assert target.media_token_ids == (("image", 500), ("audio", 501), ("video", 502))
    flat = tiny_checkpoints_flat / kind
    if not load(flat).composite:
        assert load(flat).text == target.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "config.json is not valid JSON"),
        (b"\xff\xfe{}", "config.json is not valid JSON"),
        (b"[" * 200_000, "config.json is not valid JSON"),
        (b"[1]", "must hold a JSON object, got list"),
        (b"", "config.json is not valid JSON"),
    ],
)
def test_a_damaged_config_is_one_sentence(copied: Path, content: bytes, message: str) -> None:
    (copied / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load(copied)
    assert load_generation_config(copied) is not None
    (copied / "generation_config.json").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_generation_config(copied)


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no config.json"):
        load_raw_config(tmp_path)
    assert load_generation_config(tmp_path) is None


def test_an_error_in_a_config_names_the_file(copied: Path) -> None:
    with pytest.raises(ValueError, match="config.json with --json-model-override-args: hidden_size must be"):
        load(copied, hidden_size=-1)


def test_a_checkpoint_with_its_own_code_needs_the_flag(copied: Path) -> None:
    raw = load_raw_config(copied)
    (copied / "config.json").write_text(json.dumps({**raw, "auto_map": {"AutoModel": "evil.Model"}}))
    (copied / "evil.py").write_text("raise SystemExit('this ran')")
    with pytest.raises(ValueError, match="--trust-remote-code"):
        load(copied)
    with pytest.raises(ValueError, match="--trust-remote-code"):
        load_architecture(copied, trust_remote_code=False)
    assert load(copied, trust_remote_code=True).architecture == "Gemma4ForCausalLM"
    assert load_architecture(copied, trust_remote_code=True) == "Gemma4ForCausalLM"


def test_overrides_reach_the_decoder_of_both_layouts(tiny_checkpoints: Path, copied: Path) -> None:
    assert load(copied, sliding_window=32).text.sliding_window == 32
    assert load(tiny_checkpoints / "dense", sliding_window=4).text.sliding_window == 4
    assert load(tiny_checkpoints / "dense", text_config={"sliding_window": 4}).text.sliding_window == 4
    # a key that the file leaves out is known to belong to the decoder
    raw = {"text_config": {"hidden_size": 1}, "dtype": "float32"}
    assert apply_overrides(raw, {"num_experts": 4, "dtype": "float16"}) == {
        "text_config": {"hidden_size": 1, "num_experts": 4},
        "dtype": "float16",
    }
    assert raw == {"text_config": {"hidden_size": 1}, "dtype": "float32"}, "the original stays as it was"


def test_overrides_merge_objects_key_by_key() -> None:
    raw = {"rope_parameters": {"a": {"x": 1, "y": 2}, "b": 3}}
    assert apply_overrides(raw, {"rope_parameters": {"a": {"x": 9}}}) == {
        "rope_parameters": {"a": {"x": 9, "y": 2}, "b": 3}
    }


def test_an_override_without_effect_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown key 'num_hiden_layers': did you mean 'num_hidden_layers'"):
        apply_overrides({}, {"num_hiden_layers": 3})


def test_the_shipped_tokenizer_is_whole(trained_pair: EmbeddedModel) -> None:
    tokenizer = load_tokenizer(trained_pair.target, trust_remote_code=False)
    text = "Count from 3 to 7: déjà vu, 数"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert has_chat_template(tokenizer)


def test_a_tokenizer_without_template_says_so(copied: Path) -> None:
    (copied / "chat_template.jinja").unlink()
    assert not has_chat_template(load_tokenizer(copied, trust_remote_code=False))


@pytest.mark.parametrize("damage", ["missing", "truncated", "empty"])
def test_a_damaged_tokenizer_is_one_sentence(copied: Path, damage: str) -> None:
    file = copied / "tokenizer.json"
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[: 1000 if damage == "truncated" else 0])
    with pytest.raises(ValueError, match="--tokenizer-path") as info:
        load_tokenizer(copied, trust_remote_code=False)
    assert str(copied) in str(info.value) and "\n" not in str(info.value)
