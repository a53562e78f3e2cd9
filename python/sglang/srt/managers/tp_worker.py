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
from sglang.srt.managers.schedule_batch import GenerationBatchResult, ScheduleBatch
from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner, EagerRunner, GraphPool, Runner, batch_sizes
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
from sglang.srt.model_executor.prefill_programs import PrefillSteps, prefill_sizes, tail_batch
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
        decodes: bool = True,
    ) -> None:
        """``graphs``: how its steps run; without them it has no decode steps, and prompts run as they are.
        ``decodes`` False: its decode steps are somebody else's."""
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
        # graphs of prompts and of decode steps, whoever runs these, share their memory: no two run at once
        self.graph_pool = GraphPool.open() if graphs is not None and graphs.capture else None
        self._prefill = None
        if graphs is not None and (sizes := prefill_sizes(graphs)):
            capture = graphs.capture
            self._prefill = PrefillSteps(runner, backend, memory, sizes, capture=capture, pool=self.graph_pool)
        self._loop = None if graphs is None or not decodes else self._decode_loop(graphs)

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
        """Once, before the first step. Prompts first: they need most memory, in which the others find room."""
        if self._prefill is not None:
            with torch.inference_mode():
                self._prefill.capture()
        if self._loop is not None:
            self._loop.capture()

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
        kept = kept_rows(batch.reqs, batch.extend_lens)
        ends = [req.committed_len + n for req, n in zip(batch.reqs, batch.extend_lens, strict=True)]
        last_positions = self._tensor(np.array(ends) - 1)  # before the pass, since sending waits for it
        out = self._pass(batch, kept, forward)
        for b, req in enumerate(batch.reqs):
            # the token after a prompt that is not complete means nothing
            if req.needs_host and ends[b] == len(req.token_ids):
                newest = torch.zeros((1, 1), dtype=torch.int64, device=self._device)
                apply_logit_controls(out.next_token_logits[b : b + 1], (req,), newest)
                apply_grammar_masks(out.next_token_logits[b : b + 1], (req,), newest)
        tokens = sample_tokens(out.next_token_logits, batch.sampling_info, last_positions)
        if kept is None:
            return tokens, out.hidden_states, ()
        assert out.hidden_states is not None
        # without layers that share KV, every row of the prompts went all the way
        shares_kv, hidden = self.runner.config.text.shares_kv, out.hidden_states
        last = np.cumsum(kept if shares_kv else batch.extend_lens) - 1
        states = [hidden[end - n + 1 : end + 1] for end, n in zip(last, kept, strict=True)]
        extended = ExtendedRows(ends, states, out.next_token_logits, tokens)
        outputs = extended.outputs(batch.reqs, self.runner.model.compute_logits)
        return tokens, hidden[self._tensor(last)], outputs

    def _pass(
        self, batch: ScheduleBatch, kept: tuple[int, ...] | None, forward: TargetPass | None
    ) -> LogitsProcessorOutput:
        """The target over the rows of prompts, as a program if they fit one."""
        if self._prefill is not None and kept is None and forward is None:
            done = self._prefill.run(batch)
            if done is not None:
                return done
        out: LogitsProcessorOutput = (forward or self.runner.model.forward)(self._extend_batch(batch, kept))
        return out

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
            "prefill_sizes": () if self._prefill is None else self._prefill.sizes.sizes,
        }

    def _decode_loop(self, graphs: GraphConfig) -> DecodeLoop:
        device, memory = self._device, self.memory
        rows = ResidentRows(memory.max_requests, memory.dummy_row, device)
        out = StepBuffers.allocate({ROWS: memory.max_requests, "result_width": 2}, self.runner.dtype, device)
        program = TargetDecodeProgram(self.runner.model, self.backend, memory, rows.device, out)
        sizes = batch_sizes(graphs, memory.max_requests)
        runner: Runner = EagerRunner(program)
        if graphs.capture:
            runner = CudaGraphRunner(program, sizes.sizes, pool=self.graph_pool)
        return DecodeLoop(rows, out, runner, sizes, self.kv_manager, FixedLength((0,)), self.runner.device.clock)

    @property
    def _device(self) -> torch.device:
        return self.runner.device.torch_device

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)

    def _extend_batch(self, batch: ScheduleBatch, kept: tuple[int, ...] | None) -> ForwardBatch:
        """The next positions of each request, in slots it owns. ``kept``: how many of its last rows are wanted to the
        end, None for one each."""
        q_lens, kvs = batch.extend_lens, [req.kv for req in batch.reqs if req.kv is not None]
        assert len(kvs) == len(batch.reqs), "a request without KV cannot run"
        self.kv_manager.show_device()
        starts = tuple(kv.committed_len for kv in kvs)
        ends = tuple(s + n for s, n in zip(starts, q_lens, strict=True))
        spans = list(zip(batch.reqs, kvs, starts, ends, strict=True))
        ids = np.concatenate([np.asarray(req.token_ids[s:e], dtype=np.int64) for req, _, s, e in spans])
        locs = np.concatenate([self.kv_manager.locs(kv, s, e) for _, kv, s, e in spans])
        input_ids = self._tensor(ids)
        positions = self._tensor(np.concatenate([np.arange(s, e) for s, e in zip(starts, ends, strict=True)]))
        req_rows = self._tensor(np.array([kv.req_pool_idx for kv in kvs]))
        geometry = AttnGeometry.from_host(req_rows, positions, q_lens, HostLens(ends, starts), is_extend=True)
        mode = CaptureHiddenMode.LAST if self.capture_hidden else CaptureHiddenMode.NULL
        if kept is not None:
            mode = CaptureHiddenMode.FULL
        logits_rows, tail = self._tensor(np.cumsum(q_lens) - 1), None
        if self.runner.config.text.shares_kv:
            tail = self._tail(q_lens, kept or (1,) * len(kvs), geometry, input_ids, mode)
        return ForwardBatch(
            mode=ForwardMode.EXTEND,
            input_ids=input_ids,
            positions=positions,
            token_to_kv_pool=self.memory.pool,
            out_cache_loc=self._tensor(locs),
            attn=self.backend.init_forward_metadata(geometry),
            capture_hidden_mode=mode,
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
        only_last = max(kept) == 1
        assert geometry.host is not None
        ends = geometry.host.kv_lens
        host = HostLens(ends, tuple(end - n for end, n in zip(ends, kept, strict=True)))
        positions = geometry.positions[rows]
        last = replace(geometry, positions=positions, q_lens_cpu=kept, host=host, is_extend=not only_last)
        logits_rows = None if only_last else self._tensor(np.cumsum(kept) - 1)
        return tail_batch(rows, input_ids, last, self.memory, self.backend, capture, logits_rows)
