"""From final hidden states to logits: pick rows, apply the head, soft-cap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sgl_kernel.activation import softcap_
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch


@dataclass(frozen=True, slots=True)
class LogitsProcessorOutput:
    """``next_token_logits`` [R, V]; ``hidden_states`` after the final norm: [R, H] (LAST), [T, H] (FULL) or None."""

    next_token_logits: torch.Tensor
    hidden_states: torch.Tensor | None


class LogitsProcessor:
    def __init__(self, softcap: float | None) -> None:
        self.softcap = softcap

    def __call__(
        self, hidden: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor], fb: ForwardBatch
    ) -> LogitsProcessorOutput:
        """``hidden`` [T, H] after the final norm; ``head`` maps [R, H] to [R, V]. Logits are in the model's dtype."""
        rows = hidden if fb.logits_rows is None else hidden[fb.logits_rows]
        logits = self.logits(rows, head)
        kept = {CaptureHiddenMode.NULL: None, CaptureHiddenMode.LAST: rows, CaptureHiddenMode.FULL: hidden}
        return LogitsProcessorOutput(logits, kept[fb.capture_hidden_mode])

    def logits(self, rows: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """``rows`` [R, H] after the final norm -> [R, V]."""
        logits = head(rows)
        return logits if self.softcap is None else softcap_(logits, self.softcap)
