"""One loaded model. No policy: it loads, and it runs what it is given."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.registries import MODELS, load_entry
from sglang.srt.model_executor.weight_loader import load_dummy_weights, load_weights
from sglang.srt.server_args_slices import LoadConfig
from sglang.srt.utils.device import Device

logger = logging.getLogger(__name__)


class ModelRunner:
    """``model`` is what the registry names for the checkpoint's architecture (see ``models/interfaces.py``)."""

    def __init__(self, config: ModelConfig, load: LoadConfig, device: Device) -> None:
        self.config = config
        self.device = device
        self.dtype: torch.dtype = getattr(torch, load.dtype)
        start = time.perf_counter()
        self.model: Any = load_entry(MODELS, config.architecture)(
            config, self.dtype, device.torch_device, row_invariant=load.deterministic
        )
        if load.load_format == "dummy":
            self.weight_bytes = load_dummy_weights(self.model)
        else:
            self.weight_bytes = load_weights(self.model, load.model_path)
        skipped = f", towers not loaded: {', '.join(config.multimodal)}" if config.multimodal else ""
        logger.info(
            "Loaded %s (%s): %.1f MB in %.2f s%s",
            config.architecture,
            load.dtype,
            self.weight_bytes / 1e6,
            time.perf_counter() - start,
            skipped,
        )
