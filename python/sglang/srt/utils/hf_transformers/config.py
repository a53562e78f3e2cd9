"""The only reader of ``config.json`` and ``generation_config.json``."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.model_config_parser import TEXT_CONFIG_KEYS, TOP_CONFIG_KEYS, parse_model_config

_OVERRIDE_FLAG = "--json-model-override-args"


def load_raw_config(path: Path) -> dict[str, Any]:
    """``config.json`` of the checkpoint directory ``path``, unchanged.

    Raises ``ValueError`` in one sentence when it is missing, unreadable, malformed or not an object.
    """
    file = path / "config.json"
    if not file.is_file():
        raise ValueError(f"{path} has no config.json: give the directory of a complete checkpoint")
    return _read_object(file)


def load_generation_config(path: Path) -> dict[str, Any] | None:
    """``generation_config.json`` of the directory, None when there is none; ``ValueError`` when it is malformed."""
    file = path / "generation_config.json"
    return _read_object(file) if file.is_file() else None


def load_model_config(path: Path, *, overrides: Mapping[str, Any], trust_remote_code: bool) -> ModelConfig:
    """Read and translate the configuration of the checkpoint directory ``path``.

    ``overrides`` is the object given as ``--json-model-override-args``; in a file that nests its decoder, keys of the
    decoder go there. Code that a checkpoint brings along is never run: with ``trust_remote_code`` such a checkpoint is
    loaded by our own classes, without it is refused. Raises ``ValueError`` naming the file and the key.
    """
    merged = apply_overrides(_load_trusted(path, trust_remote_code), overrides)
    try:
        return parse_model_config(merged, load_generation_config(path))
    except ValueError as err:
        changed = f" with {_OVERRIDE_FLAG}" if overrides else ""
        raise ValueError(f"{path / 'config.json'}{changed}: {err}") from err


def load_architecture(path: Path, *, trust_remote_code: bool) -> str:
    """First architecture that the checkpoint in ``path`` names, supported here or not; "" when it names none."""
    names = _load_trusted(path, trust_remote_code).get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def apply_overrides(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of ``raw`` in which ``overrides`` replace values; objects are merged key by key.

    ``ValueError`` for a key that neither the file nor this engine knows, because it would have no effect.
    """
    merged = dict(raw)
    text = raw.get("text_config")
    for key, value in overrides.items():
        in_text = isinstance(text, Mapping) and key not in raw and (key in TEXT_CONFIG_KEYS or key in text)
        if in_text:
            merged["text_config"] = _merge(merged["text_config"], {key: value})
        elif key in raw or key in TOP_CONFIG_KEYS or key in TEXT_CONFIG_KEYS:
            merged = _merge(merged, {key: value})
        else:
            close = difflib.get_close_matches(key, sorted(TEXT_CONFIG_KEYS | TOP_CONFIG_KEYS), n=1)
            hint = f"did you mean {close[0]!r}?" if close else "leave it out"
            raise ValueError(f"{_OVERRIDE_FLAG} has an unknown key {key!r:.100}: {hint}")
    return merged


def _load_trusted(path: Path, trust_remote_code: bool) -> dict[str, Any]:
    raw = load_raw_config(path)
    if raw.get("auto_map") and not trust_remote_code:
        raise ValueError(
            f"{path / 'config.json'} has auto_map, so the checkpoint expects its own code: pass --trust-remote-code to "
            "load it with the built-in classes (its code is not run)"
        )
    return raw


def _merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _read_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as err:
        raise ValueError(f"{file} cannot be read: {err.strerror or err}") from err
    except (ValueError, RecursionError) as err:  # malformed JSON, invalid UTF-8, or nested without end
        raise ValueError(f"{file} is not valid JSON: {str(err) or type(err).__name__}") from err
    if not isinstance(value, dict):
        raise ValueError(f"{file} must hold a JSON object, got {type(value).__name__}")
    return value
