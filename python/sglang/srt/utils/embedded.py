"""Models that ship inside the package, so that a first run needs no download."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """Checkpoint folders of one target and of the assistant trained for it."""

    target: Path
    assistant: Path


def _installed(folder: str) -> EmbeddedModel:
    # a wheel is unpacked when it is installed, so its data are plain folders that a memory map can open
    root = Path(str(resources.files("sglang.srt") / "models_data" / folder))
    return EmbeddedModel(target=root / "target", assistant=root / "assistant")


EMBEDDED_MODELS: Mapping[str, EmbeddedModel] = MappingProxyType({"tiny-gemma4": _installed("tiny_gemma4")})


def embedded_model(name: str) -> EmbeddedModel | None:
    """The shipped pair that ``--model-path NAME`` means, or None when no shipped model has this name."""
    return EMBEDDED_MODELS.get(name)
