"""One target pass for prompts and for the rows of running requests, so that streams go on while prompts are computed.

Every operation of a model treats rows alike but attention, which each part plans for itself: rows get what they would
get in a pass of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.mem_cache.kv_pool import LayerKV
from sglang.srt.mem_cache.kv_view import ReadOnlyKVPool
from sglang.srt.model_executor.forward_batch_info import (
    AttnPlan,
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    TailBatch,
)


class MixedForward:
    """Prompts that wait for a decode step to take them along. Used once."""

    def __init__(self, prompts: ForwardBatch) -> None:
        self._prompts = prompts
        self._output: LogitsProcessorOutput | None = None

    @property
    def output(self) -> LogitsProcessorOutput:
        """Of the prompts, after the pass."""
        assert self._output is not None, "no decode step took the prompts along"
        return self._output

    def forward(self, model: Any, block: ForwardBatch) -> LogitsProcessorOutput:
        """The pass; returns what ``block``, all of whose rows want logits, would get alone."""
        prompts = self._prompts
        out: LogitsProcessorOutput = model.forward(join_forwards(prompts, block))
        last = prompts if prompts.tail is None else prompts.tail.batch
        num_rows, logits_rows = last.input_ids.shape[0], _logits_rows(last)
        num_logits, logits, hidden = len(logits_rows), out.next_token_logits, out.hidden_states
        assert hidden is not None
        kept = {
            CaptureHiddenMode.NULL: None,
            CaptureHiddenMode.LAST: hidden[logits_rows],
            CaptureHiddenMode.FULL: hidden[:num_rows],
        }
        self._output = LogitsProcessorOutput(logits[:num_logits], kept[prompts.capture_hidden_mode])
        is_kept = block.capture_hidden_mode is not CaptureHiddenMode.NULL
        return LogitsProcessorOutput(logits[num_logits:], hidden[num_rows:] if is_kept else None)


def join_forwards(prompts: ForwardBatch, block: ForwardBatch) -> ForwardBatch:
    """The rows of ``prompts``, then those of ``block``, in one forward with all final hidden states."""
    if prompts.tail is None:
        return _joined(prompts, block, None)
    rows, num_rows = prompts.tail.rows, prompts.input_ids.shape[0]
    block_rows = torch.arange(num_rows, num_rows + block.input_ids.shape[0], device=rows.device)
    # layers without KV of their own write none
    reading = replace(block, token_to_kv_pool=ReadOnlyKVPool(block.token_to_kv_pool), out_cache_loc=None)
    return _joined(prompts, block, TailBatch(torch.cat((rows, block_rows)), _joined(prompts.tail.batch, reading, None)))


@dataclass(frozen=True, slots=True)
class _JoinedPlan:
    """``first`` for the first ``num_rows`` rows of a forward, ``second`` for the others."""

    first: AttnPlan
    second: AttnPlan
    num_rows: int

    def attend(self, q: torch.Tensor, kv: LayerKV) -> torch.Tensor:
        return torch.cat((self.first.attend(q[: self.num_rows], kv), self.second.attend(q[self.num_rows :], kv)))

    def few_rows(self) -> None:
        """Two geometries are not one."""


def _joined(first: ForwardBatch, second: ForwardBatch, tail: TailBatch | None) -> ForwardBatch:
    num_rows = first.input_ids.shape[0]
    out_cache_loc = None
    if first.out_cache_loc is not None and second.out_cache_loc is not None:
        out_cache_loc = torch.cat((first.out_cache_loc, second.out_cache_loc))
    return ForwardBatch(
        mode=ForwardMode.EXTEND,
        input_ids=torch.cat((first.input_ids, second.input_ids)),
        positions=torch.cat((first.positions, second.positions)),
        token_to_kv_pool=first.token_to_kv_pool,
        out_cache_loc=out_cache_loc,
        attn=_JoinedPlan(first.attn, second.attn, num_rows),
        capture_hidden_mode=CaptureHiddenMode.FULL,
        logits_rows=torch.cat((_logits_rows(first), _logits_rows(second) + num_rows)),
        tail=tail,
    )


def _logits_rows(fb: ForwardBatch) -> torch.Tensor:
    if fb.logits_rows is not None:
        return fb.logits_rows
    return torch.arange(fb.input_ids.shape[0], device=fb.input_ids.device)
