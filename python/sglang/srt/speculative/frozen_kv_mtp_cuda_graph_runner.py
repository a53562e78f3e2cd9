"""A FROZEN_KV_MTP round as programs of fixed shape: draft loop, verification, acceptance.

Together they are one program, captured as one graph per batch size; apart, each is a graph of its own.
Shapes: B rows of the batch, padding included; S draft steps; N = S + 1 rows per request; H hidden width of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sgl_kernel.decode_step import advance_rows
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.grammar_mask import GrammarDrafts
from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner, GraphPool, GraphProgram, Step
from sglang.srt.model_executor.decode_programs import VerifyBuffers, committed_lens
from sglang.srt.model_executor.decode_rows import DecodeRows
from sglang.srt.model_executor.forward_batch_info import AttnGeometry, ForwardBatch
from sglang.srt.model_executor.input_buffers import ROWS, buffer
from sglang.srt.speculative.frozen_kv_mtp_info import FrozenKVMTPContext, FrozenKVMTPDraftInput
from sglang.srt.speculative.frozen_kv_mtp_utils import (
    frozen_kv_target_view,
    simulated_accept_lens,
    target_kv_pool_view,
    with_tokens,
)
from sglang.srt.speculative.spec_info import SpecInput


@dataclass(frozen=True, slots=True, eq=False)
class FrozenKVMTPInputBuffers(VerifyBuffers):
    """A round's buffers. ``hidden_states`` [B, H]: the target's state that predicted each row's bonus token."""

    hidden_states: torch.Tensor = buffer(ROWS, "hidden", dtype=None)

    def load_seed(self, seed: SpecInput | None) -> None:
        assert isinstance(seed, FrozenKVMTPDraftInput), f"a round needs a draft seed, got {type(seed).__name__}"
        assert seed.hidden_states.data_ptr() != self.hidden_states.data_ptr(), (
            "this seed is a view of the buffers, which a later round has overwritten"
        )
        self.hidden_states[: seed.hidden_states.shape[0]].copy_(seed.hidden_states)

    def next_seed(self, rows: DecodeRows, num_rows: int) -> FrozenKVMTPDraftInput:
        return FrozenKVMTPDraftInput(rows.bonus_tokens[:num_rows], self.hidden_states[:num_rows])


@dataclass(frozen=True, slots=True)
class FrozenPrefix:
    """What every draft reads: the committed prefix of its requests in the target's KV. ``max_kv_len`` bounds it where
    the host may not be asked."""

    backend: AttentionBackend
    context: FrozenKVMTPContext
    max_kv_len: int

    def geometry(self, rows: DecodeRows, step: Step) -> AttnGeometry:
        """One row per request."""
        on_host = committed_lens(step.batch)
        return frozen_kv_target_view(rows.req_pool_indices, rows.committed_lens, on_host, self.max_kv_len)

    def forward_batch(self, geometry: AttnGeometry, input_ids: torch.Tensor) -> ForwardBatch:
        """A draft forward over ``geometry``, planned once for every iteration that keeps it."""
        plan = self.backend.init_forward_metadata(geometry)
        return target_kv_pool_view(self.context, geometry, plan, input_ids)


class FrozenKVMTPDraftProgram:
    """S identical iterations (token, hidden) -> (token, hidden) over the committed prefix, planned once."""

    name = "draft loop"
    samples = False

    def __init__(self, model: Any, prefix: FrozenPrefix, rows: DecodeRows, out: FrozenKVMTPInputBuffers) -> None:
        self.model = model
        self._prefix = prefix
        self._rows = rows
        self._out = out

    def run(self, step: Step) -> None:
        rows, out = self._rows.first(step.size), self._out.of_width(step.size, step.width)
        if step.width == 1:  # nothing to draft
            out.draft_tokens[:, 0].copy_(rows.bonus_tokens)
            return
        token, hidden = rows.bonus_tokens, out.hidden_states
        fb = self._prefix.forward_batch(self._prefix.geometry(rows, step), token)
        grammars = None if step.batch is None else GrammarDrafts.of(step.batch.reqs)
        whole = self.whole_chain(fb, hidden, step.width - 1) if grammars is None else None
        if whole is not None:
            out.draft_tokens.copy_(whole)
            return
        chain, rope = [token], self.model.rope_tables(fb.positions)
        for index in range(step.width - 1):
            state, hidden = self.model.forward(with_tokens(fb, token), hidden, rope)
            token = self.pick(step, rows, out, index, state, grammars)
            chain.append(token)
            if grammars is not None:
                grammars.accept(token)
        if grammars is not None:
            grammars.close()
        torch.stack(chain, dim=1, out=out.draft_tokens)

    def whole_chain(self, fb: ForwardBatch, hidden: torch.Tensor, num_steps: int) -> torch.Tensor | None:
        """All drafts at once, [B, num_steps + 1] int64 with ``fb.input_ids`` first, where the assistant can."""
        chain: torch.Tensor | None = self.model.draft_chain(fb, hidden, num_steps)
        return chain

    def pick(
        self,
        step: Step,
        rows: DecodeRows,
        out: FrozenKVMTPInputBuffers,
        index: int,
        state: torch.Tensor,
        grammars: GrammarDrafts | None,
    ) -> torch.Tensor:
        """The draft of iteration ``index`` [B] int64, from the assistant's ``state`` [B, D]: the best that the
        requests' grammars allow."""
        if grammars is None:
            tokens: torch.Tensor = self.model.draft_argmax(state)
            return tokens
        logits: torch.Tensor = self.model.draft_logits(state)
        grammars.mask(logits)
        return logits.argmax(dim=-1)


class FrozenKVMTPAcceptProgram:
    """How much of each chain the target agrees with, and from there the rows and the seed of the next round.

    ``simulated_len``: accept so many tokens per round on average, whatever the target says; for measurements only.
    """

    name = "accept"
    samples = False

    def __init__(self, rows: DecodeRows, out: FrozenKVMTPInputBuffers, simulated_len: float | None) -> None:
        self._rows = rows
        self._out = out
        self._simulated_len = simulated_len

    def run(self, step: Step) -> None:
        rows, out = self._rows.first(step.size), self._out.of_width(step.size, step.width)
        forced = None
        if self._simulated_len is not None:
            forced = simulated_accept_lens(self._simulated_len, rows.seeds, rows.committed_lens)
        hidden = out.verify_hidden.view(-1, out.hidden_states.shape[1])
        advance_rows(
            out.draft_tokens,
            out.target_tokens,
            rows.live,
            forced,
            rows.max_drafts,
            rows.committed_lens,
            rows.bonus_tokens,
            out.result,
            hidden,
            out.hidden_states,
        )


class FrozenKVMTPRound:
    """Draft, verify, accept: one program."""

    name = "FROZEN_KV_MTP round"
    samples = True

    def __init__(self, draft: GraphProgram, verify: GraphProgram, accept: GraphProgram) -> None:
        self.draft = draft
        self.verify = verify
        self.accept = accept

    @property
    def stages(self) -> tuple[GraphProgram, ...]:
        return self.draft, self.verify, self.accept

    def run(self, step: Step) -> None:
        for stage in self.stages:
            stage.run(step)


class FrozenKVMTPCudaGraphRunner(CudaGraphRunner):
    """Replays a round as one graph, or (``separate``) as a graph per stage, which is how stages are timed."""

    def __init__(
        self,
        program: FrozenKVMTPRound,
        sizes: Sequence[int],
        widths: Sequence[int],
        pool: GraphPool | None,
        *,
        separate: bool,
    ) -> None:
        super().__init__(program, sizes, widths, pool)
        stages = program.stages if separate else ()
        self.stages = tuple(CudaGraphRunner(stage, sizes, widths, self._pool) for stage in stages)

    def can_run(self, step: Step) -> bool:
        return all(stage.can_run(step) for stage in self.stages) if self.stages else super().can_run(step)

    def capture(self) -> None:
        if not self.stages:
            super().capture()
        for stage in self.stages:
            stage.capture()

    def run(self, step: Step) -> None:
        if not self.stages:
            super().run(step)
        for stage in self.stages:
            stage.run(step)
