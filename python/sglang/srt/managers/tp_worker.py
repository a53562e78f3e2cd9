"""From a ``ScheduleBatch`` to forwards of one model, and from logits to tokens.

Shapes: B requests, N rows per request in a decode step, V vocabulary, H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from sglang.srt.layers.asked_outputs import ExtendedRows, kept_rows
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.grammar_mask import apply_grammar_masks
from sglang.srt.layers.logit_controls import apply_logit_controls
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import sample_tokens
from sglang.srt.managers.schedule_batch import GenerationBatchResult, Req, ScheduleBatch
from sglang.srt.mem_cache.kv_view import ReadOnlyKVPool
from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner, EagerRunner, Runner, batch_sizes
from sglang.srt.model_executor.decode_loop import DecodeLoop
from sglang.srt.model_executor.decode_programs import StepBuffers, TargetDecodeProgram
from sglang.srt.model_executor.decode_rows import ResidentRows
from sglang.srt.model_executor.draft_length import FixedLength
from sglang.srt.model_executor.forward_batch_info import (
    AttnGeometry,
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    HostLens,
    TailBatch,
)
from sglang.srt.model_executor.input_buffers import ROWS
from sglang.srt.model_executor.mixed_forward import MixedForward
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.pool_configurator import KVMemory
from sglang.srt.sampling.logprobs import ReqOutputs
from sglang.srt.server_args_slices import GraphConfig
from sglang.srt.speculative.spec_info import SpecCapabilities
from sglang.srt.utils.env import SGLANG_DEBUG_TP_CONSISTENCY

TargetPass = Callable[[ForwardBatch], LogitsProcessorOutput]


class TpModelWorker:
    """Runs one model over the KV memory it was given. Without speculation it is the scheduler's worker."""

    def __init__(
        self,
        runner: ModelRunner,
        memory: KVMemory,
        backend: AttentionBackend,
        *,
        capture_hidden: bool = False,
        graphs: GraphConfig | None = None,
    ) -> None:
        """``graphs``: how its decode steps run; None for a worker whose decode steps are somebody else's."""
        self.runner = runner
        self.memory = memory
        self.backend = backend
        self.kv_manager = memory.kv_manager
        self.capture_hidden = capture_hidden
        self._check_ranks = SGLANG_DEBUG_TP_CONSISTENCY.get()
        overlap = graphs is not None and graphs.overlap
        self.capabilities = SpecCapabilities(
            max_tokens_per_step=1, max_drafts=0, needs_draft_kv=False, supports_overlap=overlap
        )
        self._loop = None if graphs is None else self._decode_loop(graphs)

    def kv_reader(self) -> KVMemory:
        """The only way to this worker's KV for another worker: read-only."""
        return self.memory.read_only()

    @property
    def loop(self) -> DecodeLoop:
        """What runs its decode steps."""
        assert self._loop is not None, "this worker was made without decode steps"
        return self._loop

    def forward_batch_generation(self, batch: ScheduleBatch) -> GenerationBatchResult:
        if batch.mode is not ForwardMode.EXTEND:
            return self.launch(batch)()
        with torch.inference_mode():
            result = self._extend(batch, None)
        return self.checked(lambda: result)()

    def forward_mixed(
        self, prompts: ScheduleBatch, running: ScheduleBatch
    ) -> tuple[GenerationBatchResult, GenerationBatchResult]:
        """An extend step and a decode step of other requests in one pass of the target; the result of each."""
        decoded: list[GenerationBatchResult] = []

        def forward(fb: ForwardBatch) -> LogitsProcessorOutput:
            mixed = MixedForward(fb)
            decoded.append(self.loop.run_mixed(running, mixed))
            return mixed.output

        with torch.inference_mode():
            return self._extend(prompts, forward), decoded[0]

    def launch(self, batch: ScheduleBatch) -> Callable[[], GenerationBatchResult]:
        """Start a decode step; calling the result waits for it."""
        with torch.inference_mode():
            return self.checked(self.loop.launch(batch))

    def checked(self, pending: Callable[[], GenerationBatchResult]) -> Callable[[], GenerationBatchResult]:
        """``pending``, or in debug mode the same with an error when the ranks of the model do not agree."""
        if not self._check_ranks:
            return pending

        def finish() -> GenerationBatchResult:
            result = pending()
            for what, tensor in self.decided(result).items():
                if not self.runner.group.same(tensor):
                    raise RuntimeError(f"the ranks do not agree on {what}: rank {self.runner.group.rank} has {tensor}")
            return result

        return finish

    def decided(self, result: GenerationBatchResult) -> dict[str, torch.Tensor]:
        """What a step came to, which every rank must have come to."""
        return {"tokens": result.next_token_ids, "accepted tokens": result.accept_lens}

    def can_run_ahead(self, batch: ScheduleBatch) -> bool:
        """Whether ``launch(batch)`` may come before the last step of the same requests was read."""
        return self.loop.can_run_ahead(batch)

    def capture_graphs(self) -> None:
        """Once, before the first step."""
        self.loop.capture()

    def _extend(self, batch: ScheduleBatch, forward: TargetPass | None) -> GenerationBatchResult:
        tokens, _, outputs = self.extend(batch, forward)
        ones = torch.ones(len(batch.reqs), dtype=torch.int64)
        return GenerationBatchResult(tokens[:, None], ones, None, num_drafts=0, outputs=outputs)

    def extend(
        self, batch: ScheduleBatch, forward: TargetPass | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None, tuple[ReqOutputs | None, ...]]:
        """Compute the next ``extend_lens`` positions of each request.

        Returns the token after each request's last position [B], the hidden state there [B, H] (or None), and what
        requests asked for beside. ``forward``: the target's pass, if it is not for these rows alone.
        """
        starts = [req.committed_len for req in batch.reqs]
        ids = np.concatenate(
            [
                np.asarray(req.token_ids[s : s + n], dtype=np.int64)
                for req, s, n in zip(batch.reqs, starts, batch.extend_lens, strict=True)
            ]
        )
        mode = CaptureHiddenMode.LAST if self.capture_hidden else CaptureHiddenMode.NULL
        kept = kept_rows(batch.reqs, batch.extend_lens)
        if kept is not None:
            mode = CaptureHiddenMode.FULL
        fb = self._extend_batch(batch.reqs, self._tensor(ids), batch.extend_lens, mode, kept)
        out: LogitsProcessorOutput = (forward or self.runner.model.forward)(fb)
        ends = [s + n for s, n in zip(starts, batch.extend_lens, strict=True)]
        newest = torch.zeros((1, 1), dtype=torch.int64, device=self._device)
        for b, req in enumerate(batch.reqs):
            if ends[b] == len(req.token_ids):  # the token after a prompt that is not complete means nothing
                apply_logit_controls(out.next_token_logits[b : b + 1], (req,), newest)
                apply_grammar_masks(out.next_token_logits[b : b + 1], (req,), newest)
        tokens = sample_tokens(out.next_token_logits, batch.sampling_info, self._tensor(np.array(ends) - 1))
        if kept is None:
            return tokens, out.hidden_states, ()
        assert out.hidden_states is not None
        # without layers that share KV, every row of the prompts went all the way
        last, hidden = np.cumsum(batch.extend_lens if fb.tail is None else kept) - 1, out.hidden_states
        states = [hidden[end - n + 1 : end + 1] for end, n in zip(last, kept, strict=True)]
        extended = ExtendedRows(ends, states, out.next_token_logits, tokens)
        outputs = extended.outputs(batch.reqs, self.runner.model.compute_logits)
        return tokens, hidden[self._tensor(last)], outputs

    def update_weights(self, target: Path, draft: Path | None) -> None:
        """Serve other weights of the same shape; nothing may run. ``ValueError``: the former ones still serve."""
        if draft is not None:
            raise ValueError(f"draft_model_path {str(draft)!r} is given, but this server drafts nothing: leave it out")
        self.runner.check_update(target)
        self.runner.update_weights(target)

    def describe(self) -> dict[str, object]:
        """Facts for the start-up log and ``/server_info``."""
        layout = self.memory.pool.layout
        return {
            "context_len": self.memory.context_length,
            "max_total_num_tokens": self.kv_manager.total_tokens,
            "max_running_requests": self.memory.max_requests,
            "vocab_size": self.runner.config.text.vocab_size,
            "eos_token_ids": self.runner.config.eos_token_ids,
            "kv_bytes_per_token": layout.elements_per_token * self.memory.pool.dtype.itemsize,
            "kv_layers": [spec.layer_id for spec in layout.owners],
            "weights_bytes": self.runner.weight_bytes,
            "architecture": self.runner.config.architecture,
            "decode_batch_sizes": () if self._loop is None else self._loop.sizes.sizes,
        }

    def _decode_loop(self, graphs: GraphConfig) -> DecodeLoop:
        device, memory = self._device, self.memory
        rows = ResidentRows(memory.max_requests, memory.dummy_row, device)
        out = StepBuffers.allocate({ROWS: memory.max_requests, "result_width": 2}, self.runner.dtype, device)
        program = TargetDecodeProgram(self.runner.model, self.backend, memory, rows.device, out)
        sizes = batch_sizes(graphs, memory.max_requests)
        runner: Runner = EagerRunner(program)
        if graphs.capture:
            runner = CudaGraphRunner(program, sizes.sizes)
        return DecodeLoop(rows, out, runner, sizes, self.kv_manager, FixedLength((0,)), self.runner.device.clock)

    @property
    def _device(self) -> torch.device:
        return self.runner.device.torch_device

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)

    def _extend_batch(
        self,
        reqs: tuple[Req, ...],
        input_ids: torch.Tensor,
        q_lens: tuple[int, ...],
        capture: CaptureHiddenMode,
        kept: tuple[int, ...] | None,
    ) -> ForwardBatch:
        """The next ``q_lens[b]`` positions of each request, in slots it owns. ``kept``: how many of its last rows are
        wanted to the end, None for one each."""
        kvs = [req.kv for req in reqs]
        assert all(kv is not None for kv in kvs), "a request without KV cannot run"
        self.kv_manager.show_device()
        starts = tuple(kv.committed_len for kv in kvs)  # type: ignore[union-attr]
        ends = tuple(s + n for s, n in zip(starts, q_lens, strict=True))
        positions = self._tensor(np.concatenate([np.arange(s, e) for s, e in zip(starts, ends, strict=True)]))
        locs = [self.kv_manager.locs(kv, s, e) for kv, s, e in zip(kvs, starts, ends, strict=True)]  # type: ignore[arg-type]
        req_rows = self._tensor(np.array([kv.req_pool_idx for kv in kvs]))  # type: ignore[union-attr]
        geometry = AttnGeometry.from_host(req_rows, positions, q_lens, HostLens(ends, starts), is_extend=True)
        logits_rows, tail = self._tensor(np.cumsum(q_lens) - 1), None
        text = self.runner.config.text
        if text.first_kv_shared_layer < text.num_layers:
            tail = self._tail(q_lens, kept or (1,) * len(reqs), geometry, input_ids, capture)
        return ForwardBatch(
            mode=ForwardMode.EXTEND,
            input_ids=input_ids,
            positions=positions,
            token_to_kv_pool=self.memory.pool,
            out_cache_loc=self._tensor(np.concatenate(locs)),
            attn=self.backend.init_forward_metadata(geometry),
            capture_hidden_mode=capture,
            logits_rows=logits_rows,
            tail=tail,
        )

    def _tail(
        self,
        q_lens: tuple[int, ...],
        kept: tuple[int, ...],
        geometry: AttnGeometry,
        input_ids: torch.Tensor,
        capture: CaptureHiddenMode,
    ) -> TailBatch:
        """The last ``kept`` rows of each request, as a forward that writes nothing; one each is a decode."""
        rows = self._tensor(
            np.concatenate([np.arange(end - n, end) for end, n in zip(np.cumsum(q_lens), kept, strict=True)])
        )
        positions, only_last = geometry.positions[rows], max(kept) == 1
        assert geometry.host is not None
        ends = geometry.host.kv_lens
        host = HostLens(ends, tuple(end - n for end, n in zip(ends, kept, strict=True)))
        last = replace(geometry, positions=positions, q_lens_cpu=kept, host=host, is_extend=not only_last)
        batch = ForwardBatch(
            mode=ForwardMode.DECODE if only_last else ForwardMode.EXTEND,
            input_ids=input_ids[rows],
            positions=positions,
            token_to_kv_pool=ReadOnlyKVPool(self.memory.pool),
            out_cache_loc=None,
            attn=self.backend.init_forward_metadata(last),
            capture_hidden_mode=capture,
            logits_rows=None if only_last else self._tensor(np.cumsum(kept) - 1),
            tail=None,
        )
        return TailBatch(rows, batch)
