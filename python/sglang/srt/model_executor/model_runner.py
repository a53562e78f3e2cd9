"""One loaded model. No policy: it loads, and it runs what it is given."""

from __future__ import annotations

import logging
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from sglang.srt.configs.model_config import KVLayout, ModelConfig
from sglang.srt.configs.registries import MODELS, load_entry
from sglang.srt.distributed.parallel_state import TpGroup
from sglang.srt.distributed.sharding import shard_layout
from sglang.srt.model_executor.weight_loader import (
    LoadedWeights,
    load_dummy_weights,
    load_weights,
    tensors_to_load,
)
from sglang.srt.server_args_slices import LoadConfig
from sglang.srt.utils.device import Device
from sglang.srt.utils.hf_transformers.config import load_model_config

logger = logging.getLogger(__name__)


class ModelRunner:
    """``model`` is what the registry names for the checkpoint's architecture (see ``models/interfaces.py``)."""

    def __init__(self, config: ModelConfig, load: LoadConfig, device: Device, group: TpGroup | None = None) -> None:
        """``group``: the ranks that share the model, None for the only one."""
        self.config = config
        self.group = group or TpGroup()
        self.device = device
        self.dtype: torch.dtype = getattr(torch, load.dtype)
        self._load = load
        start = time.perf_counter()
        self.model: Any = self._build(device.torch_device)
        self._weights = self._fill()
        skipped = f", towers not loaded: {', '.join(config.multimodal)}" if config.multimodal else ""
        logger.info(
            "Loaded %s (%s): %.1f MB in %.2f s%s",
            config.architecture,
            load.dtype,
            self.weight_bytes / 1e6,
            time.perf_counter() - start,
            skipped,
        )

    @property
    def model_path(self) -> Path:
        """Where the weights were read."""
        return self._load.model_path

    @property
    def kv_layout(self) -> KVLayout:
        """The KV of this rank."""
        return shard_layout(self.config.text.kv_layout, self.group)

    @property
    def weight_bytes(self) -> int:
        return self._weights.num_bytes

    def check_update(self, path: Path) -> None:
        """``ValueError`` unless the checkpoint in ``path`` has the shape of the one that is loaded."""
        load = self._load
        config = load_model_config(path, overrides=load.overrides, trust_remote_code=load.trust_remote_code)
        differences = _differences(self.config, config)
        if differences:
            raise ValueError(f"{path} is not of the shape that is served: {'; '.join(differences)}")
        # a model without storage says what a checkpoint must hold
        names = tensors_to_load(self._build(torch.device("meta")), path)
        if names != self._weights.names:
            other = ", ".join(sorted(names ^ self._weights.names))
            raise ValueError(f"{path} does not have the tensors that are served, it differs in {other}")

    def update_weights(self, path: Path) -> None:
        """Read other weights into the places of those that are loaded; ``check_update`` comes first.

        ``ValueError`` when a file cannot be read to its end: then the former weights have been read again.
        """
        former, self._load = self._load, replace(self._load, model_path=path, load_format="auto")
        try:
            self._fill()
        except Exception as error:  # whatever reading raises: half of two checkpoints must not serve
            self._load = former
            self._fill()
            raise ValueError(f"{path} could not be read, the former weights serve again: {error}") from error

    def _build(self, device: torch.device) -> Any:
        config, invariant = self.config, self._load.deterministic
        model = load_entry(MODELS, config.architecture)
        return model(config, self.dtype, device, row_invariant=invariant, group=self.group)

    def _fill(self) -> LoadedWeights:
        if self._load.load_format == "dummy":
            return load_dummy_weights(self.model)
        return load_weights(self.model, self._load.model_path, quiet=not self.group.leads)


def _differences(served: ModelConfig, other: ModelConfig) -> list[str]:
    """What of another configuration would need another engine. The type on disk is not part of it, nor are towers."""
    pairs = [
        (name, getattr(served, name), getattr(other, name))
        for name in ("architecture", "assistant", "eos_token_ids", "media_token_ids")
    ]
    pairs += [(f.name, getattr(served.text, f.name), getattr(other.text, f.name)) for f in fields(served.text)]
    return [f"{name} is {theirs!s:.100}, served is {ours!s:.100}" for name, ours, theirs in pairs if ours != theirs]
