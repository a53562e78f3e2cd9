"""The target's part of a decode step as programs: plain decode, and the verification of drafts.

Shapes: B rows of the batch, padding included; N rows per request; T = B * N; V vocabulary; H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from sgl_kernel.decode_step import advance_rows, place_rows
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.grammar_mask import apply_grammar_masks
from sglang.srt.layers.logit_controls import apply_logit_controls
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import sample_tokens
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.cuda_graph_runner import Step, StepKind
from sglang.srt.model_executor.decode_rows import DecodeRows
from sglang.srt.model_executor.forward_batch_info import (
    AttnGeometry,
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    HostLens,
    TreeRows,
)
from sglang.srt.model_executor.input_buffers import ROWS, InputBuffers, buffer
from sglang.srt.model_executor.pool_configurator import KVMemory
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.speculative.spec_info import SpecInput

WIDTH = "width"

# logits [T, V], the requests' controls, the position of each row's input token [T] -> the token after each row [T]
Sampler = Callable[[torch.Tensor, SamplingBatchInfo, torch.Tensor], torch.Tensor]

B = TypeVar("B", bound="StepBuffers")


@dataclass(frozen=True, slots=True, eq=False)
class StepBuffers(InputBuffers):
    """What a step leaves for the host. ``result`` [B, N + 1]: the tokens of each row, then how many of them count."""

    result: torch.Tensor = buffer(ROWS, "result_width", dtype=torch.int64, pad=1)

    def of_width(self: B, num_rows: int, width: int) -> B:
        """The first requests' part in a step of ``width`` rows each."""
        return self.front(num_rows, width=width, result_width=width + 1)

    def load_seed(self, seed: SpecInput | None) -> None:
        """Take what a request brings from its last step besides its tokens; nothing without speculation."""
        assert seed is None, f"a plain decode step was given {type(seed).__name__}"

    def next_seed(self, rows: DecodeRows, num_rows: int) -> SpecInput | None:
        """What the next step of the same rows starts from, as views of the buffers."""
        return None


@dataclass(frozen=True, slots=True, eq=False)
class VerifyBuffers(StepBuffers):
    """``draft_tokens`` [B, N], column 0 the bonus token; the target's choice after each, [B, N], and its hidden state
    there, [B, N, H]."""

    draft_tokens: torch.Tensor = buffer(ROWS, WIDTH, dtype=torch.int64)
    target_tokens: torch.Tensor = buffer(ROWS, WIDTH, dtype=torch.int64)
    verify_hidden: torch.Tensor = buffer(ROWS, WIDTH, "hidden", dtype=None)


class TargetForward:
    """N rows per request behind its committed tokens, in slots it owns, and the target's choice after each."""

    def __init__(self, model: Any, backend: AttentionBackend, memory: KVMemory, *, capture_hidden: bool) -> None:
        self._model = model
        self._backend = backend
        self._memory = memory
        self._capture = CaptureHiddenMode.FULL if capture_hidden else CaptureHiddenMode.NULL

    def choose(
        self,
        rows: DecodeRows,
        input_ids: torch.Tensor,
        step: Step,
        *,
        tree: TreeRows | None = None,
        sampler: Sampler = sample_tokens,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``input_ids`` [T] int64 -> tokens [T] int64, and hidden states [T, H] where they are known.

        ``tree``: how a request's rows follow each other, if not in order; ``sampler``: how tokens are chosen in a step
        that is not GREEDY.
        """
        fb = self._forward_batch(rows, input_ids, step, tree)
        if step.kept is not None:
            fb = replace(fb, capture_hidden_mode=CaptureHiddenMode.FULL)
        if step.kind is StepKind.GREEDY and step.mixed is None:
            tokens, hidden = self._model.greedy_tokens(fb)
            return tokens, hidden
        out: LogitsProcessorOutput
        out = self._model.forward(fb) if step.mixed is None else step.mixed.forward(self._model, fb)
        if step.kind is StepKind.EDITED:
            assert step.batch is not None, "only a step that is not captured can edit logits"
            nodes, parents = input_ids.view(step.size, step.width), None if tree is None else tree.parents
            apply_logit_controls(out.next_token_logits, step.batch.reqs, nodes, parents)
            apply_grammar_masks(out.next_token_logits, step.batch.reqs, nodes, parents)
            if step.kept is not None:
                step.kept.keep(out.next_token_logits, out.hidden_states, nodes, parents)
        return sampler(out.next_token_logits, sampling_info(rows, step), fb.positions), out.hidden_states

    def _forward_batch(
        self, rows: DecodeRows, input_ids: torch.Tensor, step: Step, tree: TreeRows | None
    ) -> ForwardBatch:
        table, width = self._memory.req_to_token, step.width
        positions, locs, kv_lens = place_rows(table, rows.req_pool_indices, rows.committed_lens, width)
        committed = committed_lens(step.batch)
        if committed is None:
            host, longest = None, self._memory.max_kv_len
        else:
            host = HostLens(tuple(n + width for n in committed), committed)
            longest = max(host.kv_lens)
        geometry = AttnGeometry(rows.req_pool_indices, kv_lens, positions, (width,) * step.size, longest, host)
        if tree is not None:  # slots are consecutive, positions are not
            positions = (rows.committed_lens[:, None] + tree.depths).view(-1)
            geometry = replace(geometry, positions=positions, tree_mask=tree.mask)
        return ForwardBatch(
            mode=ForwardMode.DECODE if width == 1 else ForwardMode.TARGET_VERIFY,
            input_ids=input_ids,
            positions=positions,
            token_to_kv_pool=self._memory.pool,
            out_cache_loc=locs,
            attn=self._backend.init_forward_metadata(geometry),
            capture_hidden_mode=self._capture,
            logits_rows=None,
            tail=None,
        )


def sampling_info(rows: DecodeRows, step: Step) -> SamplingBatchInfo:
    """The controls of a step's requests."""
    return rows.sampling_info() if step.batch is None else step.batch.sampling_info


def committed_lens(batch: ScheduleBatch | None) -> tuple[int, ...] | None:
    """The committed tokens of each request, if the host may be asked."""
    return None if batch is None else tuple(req.committed_len for req in batch.reqs)


class TargetDecodeProgram:
    """Plain decode: one row per request; its choice is the next step's input."""

    name = "target decode"
    samples = True

    def __init__(self, model: Any, backend: AttentionBackend, memory: KVMemory, rows: DecodeRows, out: StepBuffers):
        self._forward = TargetForward(model, backend, memory, capture_hidden=False)
        self._rows = rows
        self._out = out

    def run(self, step: Step) -> None:
        rows = self._rows.first(step.size)
        out, newest = self._out.first(step.size), rows.bonus_tokens
        tokens, _ = self._forward.choose(rows, newest, step)
        advance_rows(newest[:, None], tokens[:, None], rows.live, None, None, rows.committed_lens, newest, out.result)


class TargetVerifyProgram:
    """The target over bonus token and drafts: its own choice after each, and the hidden states there."""

    name = "target verify"
    samples = True

    def __init__(self, model: Any, backend: AttentionBackend, memory: KVMemory, rows: DecodeRows, out: VerifyBuffers):
        self._forward = TargetForward(model, backend, memory, capture_hidden=True)
        self._rows = rows
        self._out = out

    def run(self, step: Step) -> None:
        rows, out = self._rows.first(step.size), self._out.of_width(step.size, step.width)
        tree, sampler = self.tree(out), self.sampler(out)
        tokens, hidden = self._forward.choose(rows, out.draft_tokens.view(-1), step, tree=tree, sampler=sampler)
        assert hidden is not None
        out.target_tokens.view(-1).copy_(tokens)
        out.verify_hidden.view(hidden.shape).copy_(hidden)

    def tree(self, out: Any) -> TreeRows | None:
        """How the rows in ``out`` follow each other; None for chains."""
        return None

    def sampler(self, out: Any) -> Sampler:
        """How a token is chosen after each row in ``out``."""
        return sample_tokens
