"""Composite Gemma 4 checkpoints. They serve text; the image and audio towers stay on disk."""

from __future__ import annotations

from dataclasses import replace

import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import TpGroup
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.models.gemma4_causal import Gemma4ForCausalLM

_TOWER_PREFIXES = (
    "model.vision_tower.",
    "model.audio_tower.",
    "model.vision_embedder.",
    "model.embed_vision.",
    "model.embed_audio.",
)
_PAD_TOKEN_ID = 0


class Gemma4ForConditionalGeneration(Gemma4ForCausalLM):
    weight_prefix = "model.language_model."

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        row_invariant: bool = False,
        group: TpGroup | None = None,
    ) -> None:
        super().__init__(config, dtype, device, row_invariant=row_invariant, group=group)
        # media placeholders have no embedding of their own: where no image or sound takes their place they are padding
        self._text_ids = torch.arange(config.text.vocab_size, device=device)
        self._text_ids[[token_id for _, token_id in config.media_token_ids]] = _PAD_TOKEN_ID

    def _hidden(self, fb: ForwardBatch) -> tuple[torch.Tensor, ForwardBatch]:
        return super()._hidden(replace(fb, input_ids=self._text_ids[fb.input_ids]))

    def _is_ignored(self, name: str) -> bool:
        return name.startswith(_TOWER_PREFIXES) or super()._is_ignored(name)
