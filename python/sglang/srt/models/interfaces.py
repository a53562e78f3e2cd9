"""What runners and workers may expect of a model."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import torch

from sglang.srt.configs.model_config import KVLayout
from sglang.srt.distributed.sharding import WeightSlot
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.vocab_embedding import ScaledEmbedding
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.speculative.frozen_kv_mtp_info import FrozenKVMTPContext


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """Where each checkpoint tensor goes.

    ``slots``: checkpoint name -> destination, filled in place. ``ignored`` names are in the file but not needed.
    """

    slots: dict[str, WeightSlot]
    ignored: frozenset[str]


class LoadableModel(Protocol):
    def weight_plan(self, available: Collection[str]) -> WeightPlan:
        """``available``: the names in the checkpoint (empty for dummy weights)."""
        ...

    def finish_loading(self) -> None:
        """Derive what is computed from weights; called after the last tensor, whenever weights are loaded."""
        ...


class CausalLM(LoadableModel, Protocol):
    kv_layout: KVLayout

    def forward(self, fb: ForwardBatch) -> LogitsProcessorOutput: ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden`` [R, D] after the final norm -> [R, V]."""
        ...


class SpecTarget(CausalLM, Protocol):
    """A target whose embedding and head a drafter may use."""

    def get_embed_and_head(self) -> tuple[ScaledEmbedding, torch.Tensor]: ...


class FrozenKVAssistant(LoadableModel, Protocol):
    """A drafter that owns no KV."""

    def bind_frozen_kv_context(self, context: FrozenKVMTPContext, embed: ScaledEmbedding) -> None: ...

    def forward(self, fb: ForwardBatch, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...

    def draft_argmax(self, hidden: torch.Tensor) -> torch.Tensor: ...
