"""FROZEN_KV_MTP: the assistant drafts over the target's frozen KV, the target verifies the drafts in one pass.

A step is three functions: ``draft``, ``verify`` and the commit the scheduler makes of its result. Output equals the
target's own: every emitted token is the target's choice after a prefix of emitted tokens; drafts only decide how many
such choices one pass yields. See docs/speculative_decoding.md.

Shapes: B requests, S draft steps, N rows per request (S + 1, but for trees), H hidden width of the target.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch

from sgl_kernel.spec_tree import tree_visibility
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.managers.schedule_batch import GenerationBatchResult, ScheduleBatch
from sglang.srt.managers.tp_worker import TargetPass, TpModelWorker
from sglang.srt.mem_cache.kv_manager import RequestKV
from sglang.srt.model_executor.cuda_graph_runner import EagerRunner, Runner, Step, StepKind, batch_sizes
from sglang.srt.model_executor.decode_loop import DecodeLoop
from sglang.srt.model_executor.decode_rows import ResidentRows
from sglang.srt.model_executor.draft_length import DraftLength, FixedLength, SharedLength
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.models.gemma4_mtp import build_frozen_kv_mtp_context
from sglang.srt.server_args_slices import GraphConfig, SpecConfig
from sglang.srt.speculative.adaptive_length import AdaptiveLength
from sglang.srt.speculative.frozen_kv_mtp_cuda_graph_runner import FrozenKVMTPCudaGraphRunner
from sglang.srt.speculative.frozen_kv_mtp_info import FrozenKVMTPDraftInput, FrozenKVMTPVerifyInput
from sglang.srt.speculative.frozen_kv_mtp_rounds import allocate_buffers, build_round, round_lengths
from sglang.srt.speculative.frozen_kv_mtp_tree import FrozenKVMTPTreeBuffers
from sglang.srt.speculative.round_times import MOST_MEASURED_ROWS
from sglang.srt.speculative.spec_info import SpecCapabilities
from sglang.srt.utils.env import SGLANG_DEBUG_KV_DIGEST, SGLANG_SIMULATE_ACC_LEN, SGLANG_SPEC_SEPARATE_GRAPHS

_MEASURING_S, _MEASURED_KV_LEN = 0.5, 128  # for the times of rounds, at the start

logger = logging.getLogger(__name__)


class FrozenKVMTPWorker(TpModelWorker):
    """*Is* the assistant's worker, *has* the target's. Reads the target's KV through a read-only view. The result of
    a round is read before the next one starts."""

    supports_overlap: ClassVar[bool] = False

    def __init__(
        self,
        runner: ModelRunner,
        target: TpModelWorker,
        backend: AttentionBackend,
        spec: SpecConfig,
        graphs: GraphConfig,
    ) -> None:
        super().__init__(runner, target.kv_reader(), backend)
        self.target = target
        self.spec = spec
        self.context = build_frozen_kv_mtp_context(target.runner.config, runner.config, self.memory.pool)
        embed, _ = target.runner.model.get_embed_and_head()
        runner.model.bind_frozen_kv_context(self.context, embed)
        self.capabilities = SpecCapabilities(
            max_tokens_per_step=spec.num_draft_tokens,
            max_drafts=spec.max_depth,
            needs_draft_kv=False,
            supports_overlap=self.supports_overlap,
        )
        self._check_digest = SGLANG_DEBUG_KV_DIGEST.get()
        self._rows = ResidentRows(self.memory.max_requests, self.memory.dummy_row, self._device)
        self._buffers = allocate_buffers(spec, self, target)
        self.round = build_round(
            spec, self, target, self.context, self._rows.device, self._buffers, self._simulated_len()
        )
        self._loop = self._round_loop(graphs)

    def capture_graphs(self) -> None:
        self.target.capture_graphs()
        super().capture_graphs()
        if self._adaptive is not None:
            with torch.inference_mode(), self._usual_requests() as num_rows:
                # every rank must stop at the same round
                clock = partial(self.runner.group.share_number, self._clock)
                if num_rows:
                    self._adaptive.times.measure(self._run_usual, num_rows, _MEASURING_S, clock)

    @contextmanager
    def _usual_requests(self) -> Iterator[int]:
        """How many requests of a usual length there is room for, and the first rows reading the KV of as many, each
        its own: what all of them would share, rounds would find in caches. Nothing else may run."""
        rows, manager, opened = self._rows.device, self.kv_manager, list[RequestKV]()
        num_tokens = self._usual_len + self.spec.num_draft_tokens
        while len(opened) < MOST_MEASURED_ROWS and (kv := manager.open(())) is not None:
            opened.append(kv)
            if not manager.grow(kv, num_tokens):
                break
        indices = [kv.req_pool_idx for kv in opened if kv.allocated_len >= num_tokens]
        rows.req_pool_indices[: len(indices)] = torch.tensor(indices, dtype=torch.int64)
        manager.show_device()
        yield len(indices)
        for kv in opened:
            manager.close(kv, ())
        manager.flush()  # the order of a fresh start
        rows.pad(0)

    @property
    def _usual_len(self) -> int:
        return min(_MEASURED_KV_LEN, self.memory.context_length)

    def _run_usual(self, num_rows: int, num_drafts: int) -> None:
        """A round of requests of a usual length, to its end. They stay where they are, since no row is live."""
        self._rows.device.committed_lens.fill_(self._usual_len)
        self.loop.runner.run(Step(num_rows, StepKind.GREEDY, None, num_drafts + 1))
        self.runner.device.synchronize()

    def launch(self, batch: ScheduleBatch) -> Callable[[], GenerationBatchResult]:
        if not self._check_digest:
            return super().launch(batch)
        with torch.inference_mode():
            result = self.verify(batch, self.draft(batch))
        return self.checked(lambda: result)

    def decided(self, result: GenerationBatchResult) -> dict[str, torch.Tensor]:
        decided = super().decided(result)
        if result.num_drafts:
            # rows of padding write one slot, in no order
            rows = self._buffers.of_width(len(result.accept_lens), result.num_drafts + 1)
            decided["drafts"] = rows.draft_tokens
        return decided

    def _extend(self, batch: ScheduleBatch, forward: TargetPass | None) -> GenerationBatchResult:
        """The target alone; its token and hidden state seed the first draft."""
        tokens, hidden, outputs = self.target.extend(batch, forward)
        assert hidden is not None
        ones = torch.ones(len(batch.reqs), dtype=torch.int64)
        seed = FrozenKVMTPDraftInput(tokens, hidden)
        return GenerationBatchResult(tokens[:, None], ones, seed, num_drafts=0, outputs=outputs)

    def draft(self, batch: ScheduleBatch) -> FrozenKVMTPVerifyInput:
        """The first stage of a round by itself."""
        before = self.context.target_token_to_kv_pool.digest() if self._check_digest else None
        step = self.loop.prepare(batch, exact=True)
        self.round.draft.run(step)
        if before is not None and before != self.context.target_token_to_kv_pool.digest():
            raise RuntimeError("drafting changed the target's KV")
        out, rows = self._buffers.of_width(step.size, step.width), self._rows.device.first(step.size)
        parents = (torch.arange(step.width, device=self._device) - 1).clamp(min=0).expand(step.size, -1)
        if isinstance(out, FrozenKVMTPTreeBuffers):
            parents = out.parents
        depths = tree_visibility(parents, self.spec.max_depth)[1]
        return FrozenKVMTPVerifyInput(out.draft_tokens.clone(), rows.committed_lens[:, None] + depths, parents.clone())

    def verify(self, batch: ScheduleBatch, chain: FrozenKVMTPVerifyInput) -> GenerationBatchResult:
        """The other stages: one target pass over the chain; the run each request gains, and its next seed."""
        step = self.loop.prepare(batch, exact=True, width=chain.num_draft_tokens)
        out = self._buffers.of_width(step.size, step.width)
        out.draft_tokens.copy_(chain.draft_tokens)
        if isinstance(out, FrozenKVMTPTreeBuffers):
            out.parents.copy_(chain.parents)
        self.round.verify.run(step)
        self.round.accept.run(step)
        return self.loop.read(batch, step)()

    def update_weights(self, target: Path, draft: Path | None) -> None:
        # both are checked before either is touched
        self.target.runner.check_update(target)
        if draft is not None:
            self.runner.check_update(draft)
        former = self.target.runner.model_path
        self.target.runner.update_weights(target)
        if draft is not None:
            try:
                self.runner.update_weights(draft)
            except ValueError:
                self.target.runner.update_weights(former)
                raise

    def describe(self) -> dict[str, object]:
        facts = self.target.describe() | {"decode_batch_sizes": self.loop.sizes.sizes}
        facts["spec"] = {
            "algorithm": self.spec.algorithm,
            "num_steps": self.spec.num_steps,
            "num_draft_tokens": self.spec.num_draft_tokens,
            "topk": self.spec.topk,
            "adaptive": self.spec.adaptive,
            "sampled_drafts": self.spec.sample_drafts,
            "assistant_architecture": self.runner.config.architecture,
            "assistant_weights_bytes": self.runner.weight_bytes,
            "assistant_kv_bytes": 0,
            "layer_map": dict(enumerate(self.context.target_layer_ids)),
        }
        return facts

    def _simulated_len(self) -> float | None:
        length, most = SGLANG_SIMULATE_ACC_LEN.get(), self.spec.max_depth + 1
        if length == 0.0:
            return None
        if not 1.0 <= length <= most:
            raise ValueError(f"{SGLANG_SIMULATE_ACC_LEN.name}={length} must be from 1 to {most}, the tokens of a round")
        logger.warning("%s: ANSWERS ARE WRONG, %s tokens are accepted per round", SGLANG_SIMULATE_ACC_LEN.name, length)
        return length

    def _round_loop(self, graphs: GraphConfig) -> DecodeLoop:
        sizes = batch_sizes(graphs, self.memory.max_requests)
        lengths = round_lengths(self.spec, captured=graphs.capture)
        runner: Runner = EagerRunner(self.round)
        if graphs.capture:
            widths, separate = [n + 1 for n in lengths], SGLANG_SPEC_SEPARATE_GRAPHS.get()
            pool = self.target.graph_pool
            runner = FrozenKVMTPCudaGraphRunner(self.round, sizes.sizes, widths, pool, separate=separate)
        self._adaptive = AdaptiveLength(lengths) if self.spec.adaptive else None
        length: DraftLength = FixedLength(lengths) if self._adaptive is None else self._adaptive
        if self._adaptive is not None and self.runner.group.size > 1:
            length = SharedLength(self._adaptive, self.runner.group)
        return DecodeLoop(self._rows, self._buffers, runner, sizes, self.kv_manager, length, self._clock)

    @property
    def _clock(self) -> Callable[[], float]:
        """Seconds that rounds take. Where ranks wait for each other, that is part of a round."""
        return self.runner.device.clock if self.runner.group.size == 1 else time.perf_counter
