"""Extend steps as programs of fixed shape: the tokens of a few prompts, padded to the next of some numbers of tokens.

Shapes: T tokens, padding included; R requests at most; P = R + 1 places, for them and for padding; V vocabulary; H
hidden width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.mem_cache.kv_view import ReadOnlyKVPool
from sglang.srt.model_executor.cuda_graph_runner import (
    BatchSizes,
    CudaGraphRunner,
    EagerRunner,
    GraphFlags,
    GraphPool,
    Runner,
    Step,
    StepKind,
)
from sglang.srt.model_executor.forward_batch_info import (
    AttnGeometry,
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    TailBatch,
)
from sglang.srt.model_executor.input_buffers import ROWS, InputBuffers, StagedBuffers, buffer
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.pool_configurator import KVMemory
from sglang.srt.server_args_slices import GraphConfig

MAX_REQUESTS = 8
_FLAGS = GraphFlags(
    unit="tokens",
    largest="--piecewise-cuda-graph-max-tokens",
    sizes="--piecewise-cuda-graph-tokens",
    off="--disable-piecewise-cuda-graph",
)


@dataclass(frozen=True, slots=True, eq=False)
class PrefillTokens(InputBuffers):
    """[T] each. A token of padding stands at the first position of the dummy row, so it attends to one key and writes
    the dummy page."""

    input_ids: torch.Tensor = buffer(ROWS, dtype=torch.int64)
    positions: torch.Tensor = buffer(ROWS, dtype=torch.int64)
    out_cache_loc: torch.Tensor = buffer(ROWS, dtype=torch.int64)


@dataclass(frozen=True, slots=True, eq=False)
class PrefillPlaces(InputBuffers):
    """[P] each; ``row_ends``: the row behind a request's last. The place behind the last request has all padding, those
    that follow have no rows."""

    req_pool_indices: torch.Tensor = buffer(ROWS, dtype=torch.int64, pad="dummy_row")
    kv_lens: torch.Tensor = buffer(ROWS, dtype=torch.int64, pad=1)
    row_ends: torch.Tensor = buffer(ROWS, dtype=torch.int64, pad="num_tokens")


@dataclass(frozen=True, slots=True, eq=False)
class PrefillResult(InputBuffers):
    """Of each request's last row: ``logits`` [R, V], and ``hidden`` [R, H] after the final norm."""

    logits: torch.Tensor = buffer(ROWS, "vocab", dtype=None)
    hidden: torch.Tensor = buffer(ROWS, "hidden", dtype=None)


class PrefillProgram:
    """The target's pass over T tokens."""

    name = "prompts"
    samples = False

    def __init__(
        self,
        runner: ModelRunner,
        backend: AttentionBackend,
        memory: KVMemory,
        tokens: PrefillTokens,
        places: PrefillPlaces,
        out: PrefillResult,
    ) -> None:
        self._model: Any = runner.model
        self._shares_kv = runner.config.text.shares_kv
        self._backend = backend
        self._memory = memory
        self._tokens = tokens
        self._places = places
        self._out = out

    def run(self, step: Step) -> None:
        tokens, places, memory = self._tokens.first(step.size), self._places, self._memory
        ends = places.row_ends.clamp(max=step.size)  # in a place without a request it is that of the longest step
        last_rows, longest = ends[:MAX_REQUESTS] - 1, memory.max_kv_len
        geometry = AttnGeometry(
            places.req_pool_indices, places.kv_lens, tokens.positions, (), longest, None, is_extend=True, row_ends=ends
        )
        tail = None
        if self._shares_kv:
            last = places.first(MAX_REQUESTS)
            one_each = AttnGeometry(
                last.req_pool_indices, last.kv_lens, last.kv_lens - 1, (1,) * MAX_REQUESTS, longest, None
            )
            tail = tail_batch(
                last_rows, tokens.input_ids, one_each, memory, self._backend, CaptureHiddenMode.LAST, None
            )
        fb = ForwardBatch(
            mode=ForwardMode.EXTEND,
            input_ids=tokens.input_ids,
            positions=tokens.positions,
            token_to_kv_pool=memory.pool,
            out_cache_loc=tokens.out_cache_loc,
            attn=self._backend.init_forward_metadata(geometry),
            capture_hidden_mode=CaptureHiddenMode.LAST,
            logits_rows=last_rows,
            tail=tail,
        )
        result: LogitsProcessorOutput = self._model.forward(fb)
        assert result.hidden_states is not None
        self._out.logits.copy_(result.next_token_logits)
        self._out.hidden.copy_(result.hidden_states)


def tail_batch(
    rows: torch.Tensor,
    input_ids: torch.Tensor,
    geometry: AttnGeometry,
    memory: KVMemory,
    backend: AttentionBackend,
    capture: CaptureHiddenMode,
    logits_rows: torch.Tensor | None,
) -> TailBatch:
    """``rows`` [R] of an extend with ``input_ids`` [T], as a forward over ``geometry`` that writes nothing."""
    batch = ForwardBatch(
        mode=ForwardMode.EXTEND if geometry.is_extend else ForwardMode.DECODE,
        input_ids=input_ids[rows],
        positions=geometry.positions,
        token_to_kv_pool=ReadOnlyKVPool(memory.pool),
        out_cache_loc=None,
        attn=backend.init_forward_metadata(geometry),
        capture_hidden_mode=capture,
        logits_rows=logits_rows,
        tail=None,
    )
    return TailBatch(rows, batch)


class PrefillSteps:
    """Runs those extend steps that fit a program. Between two of them nothing is remembered."""

    def __init__(
        self,
        runner: ModelRunner,
        backend: AttentionBackend,
        memory: KVMemory,
        sizes: tuple[int, ...],
        *,
        capture: bool,
        pool: GraphPool | None = None,
    ) -> None:
        """``sizes``: of programs, in tokens, ascending; ``pool``: for graphs of them, by default one of their own."""
        self.sizes = BatchSizes(sizes, pad=True)
        self._kv_manager = memory.kv_manager
        device, text, longest = runner.device.torch_device, runner.config.text, sizes[-1]
        self._tokens = StagedBuffers(PrefillTokens, {ROWS: longest}, device)
        places = {ROWS: MAX_REQUESTS + 1, "dummy_row": memory.dummy_row, "num_tokens": longest}
        self._places = StagedBuffers(PrefillPlaces, places, device)
        result = {ROWS: MAX_REQUESTS, "vocab": text.vocab_size, "hidden": text.hidden_size}
        self._out = PrefillResult.allocate(result, runner.dtype, device)
        program = PrefillProgram(runner, backend, memory, self._tokens.device, self._places.device, self._out)
        self.runner: Runner = EagerRunner(program)
        if capture:
            self.runner = CudaGraphRunner(program, sizes, pool=pool, flags=_FLAGS)

    def capture(self) -> None:
        """Before the first step: the buffers must hold nothing but padding."""
        self.runner.capture()

    def run(self, batch: ScheduleBatch) -> LogitsProcessorOutput | None:
        """Of each request's last row: logits, to be used before the next step, and hidden states. None, and nothing
        done, for a step that does not fit."""
        num, size = len(batch.reqs), self.sizes.fit(sum(batch.extend_lens))
        if num > MAX_REQUESTS or size is None:
            return None
        self._load(batch, size)
        self._kv_manager.show_device()
        self.runner.run(Step(size, StepKind.GREEDY, None, 1))
        out = self._out.first(num)
        return LogitsProcessorOutput(out.logits, out.hidden.clone())

    def _load(self, batch: ScheduleBatch, size: int) -> None:
        tokens, places = self._tokens.fill(), self._places.fill()
        ids, positions, locs = (x.numpy() for x in (tokens.input_ids, tokens.positions, tokens.out_cache_loc))
        req_rows, kv_lens, row_ends = (x.numpy() for x in (places.req_pool_indices, places.kv_lens, places.row_ends))
        end = 0
        for b, (req, num) in enumerate(zip(batch.reqs, batch.extend_lens, strict=True)):
            kv = req.kv
            assert kv is not None, "a request without KV cannot run"
            first, last, rows = kv.committed_len, kv.committed_len + num, slice(end, end + num)
            ids[rows] = req.token_ids[first:last]
            positions[rows] = np.arange(first, last)
            locs[rows] = self._kv_manager.locs(kv, first, last)
            end += num
            req_rows[b], kv_lens[b], row_ends[b] = kv.req_pool_idx, last, end
        tokens.pad(end, size)
        places.pad(len(batch.reqs))
        self._tokens.send()
        self._places.send()


def prefill_sizes(graphs: GraphConfig) -> tuple[int, ...]:
    """Numbers of tokens that extend steps are padded to, ascending; beyond the smallest that is up to a quarter more.
    Empty where they run as they are."""
    if graphs.prefill_sizes is not None:
        return tuple(sorted(set(graphs.prefill_sizes)))
    largest = graphs.prefill_max_size if graphs.capture else 0
    if largest == 0:
        return ()
    wanted = [16, 32, 64, *range(128, 256, 64), *range(256, 1024, 128), *range(1024, largest, 256)]
    return (*(size for size in wanted if size < largest), largest)
