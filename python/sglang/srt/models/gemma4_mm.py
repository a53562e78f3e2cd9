"""Composite Gemma 4 checkpoints. They serve text; the image and audio towers stay on disk."""

from __future__ import annotations

from sglang.srt.models.gemma4_causal import Gemma4ForCausalLM

_TOWER_PREFIXES = (
    "model.vision_tower.",
    "model.audio_tower.",
    "model.vision_embedder.",
    "model.embed_vision.",
    "model.embed_audio.",
)


class Gemma4ForConditionalGeneration(Gemma4ForCausalLM):
    weight_prefix = "model.language_model."

    def _is_ignored(self, name: str) -> bool:
        return name.startswith(_TOWER_PREFIXES) or super()._is_ignored(name)
