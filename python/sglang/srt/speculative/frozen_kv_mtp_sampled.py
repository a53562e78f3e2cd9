"""Sampled drafts: the stages of a round whose drafts are drawn, and accepted by the rule min(1, p / q).

Drafts are drawn with their request's own temperature and filters. A greedy request's are the best tokens, as ever.

Shapes: B rows of the batch, padding included; N rows per request; V vocabulary; D hidden width of the assistant.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from sgl_kernel.rejection import count_accepted, draw_drafts, sampling_distribution, verify_drafts
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.grammar_mask import GrammarDrafts
from sglang.srt.layers.sampler import sample_tokens
from sglang.srt.model_executor.cuda_graph_runner import Step, StepKind
from sglang.srt.model_executor.decode_programs import WIDTH, Sampler, TargetVerifyProgram, sampling_info
from sglang.srt.model_executor.decode_rows import DecodeRows
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.input_buffers import ROWS, buffer
from sglang.srt.model_executor.pool_configurator import KVMemory
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.speculative.frozen_kv_mtp_cuda_graph_runner import FrozenKVMTPDraftProgram, FrozenKVMTPInputBuffers


@dataclass(frozen=True, slots=True, eq=False)
class FrozenKVMTPSampledBuffers(FrozenKVMTPInputBuffers):
    """A round's buffers. For each draft, in the column of the token before it: the assistant's state that it was drawn
    from, [B, N, D], and its probability, [B, N]. A whole row of probabilities is made again for the one draft that
    was rejected, which takes far less memory than to keep them all."""

    draft_states: torch.Tensor = buffer(ROWS, WIDTH, "draft_hidden", dtype=None)
    draft_probs: torch.Tensor = buffer(ROWS, WIDTH, dtype=torch.float32)


class FrozenKVMTPSampledDraftProgram(FrozenKVMTPDraftProgram):
    """The draft loop, with drafts drawn."""

    samples = True

    def whole_chain(self, fb: ForwardBatch, hidden: torch.Tensor, num_steps: int) -> None:
        """A draft is drawn by its request's controls, one after the other."""

    def pick(
        self,
        step: Step,
        rows: DecodeRows,
        out: FrozenKVMTPInputBuffers,
        index: int,
        state: torch.Tensor,
        grammars: GrammarDrafts | None,
    ) -> torch.Tensor:
        best = super().pick(step, rows, out, index, state, grammars)
        if step.kind is StepKind.GREEDY:
            return best
        assert isinstance(out, FrozenKVMTPSampledBuffers)
        info = sampling_info(rows, step)
        probs = draft_distribution(self.model, state, info)
        drafts = draw_drafts(probs, info.seeds, rows.committed_lens + index)
        out.draft_states[:, index].copy_(state)
        out.draft_probs[:, index].copy_(probs.gather(1, drafts[:, None])[:, 0])
        return torch.where(info.greedy, best, drafts)


class FrozenKVMTPSampledVerifyProgram(TargetVerifyProgram):
    """The target over the chain; its tokens are accepted drafts, and the one drawn where they end."""

    def __init__(
        self,
        assistant: Any,
        model: Any,
        backend: AttentionBackend,
        memory: KVMemory,
        rows: DecodeRows,
        out: FrozenKVMTPSampledBuffers,
    ) -> None:
        super().__init__(model, backend, memory, rows, out)
        self._assistant = assistant

    def sampler(self, out: Any) -> Sampler:
        assert isinstance(out, FrozenKVMTPSampledBuffers)
        return sample_tokens if out.draft_tokens.shape[1] == 1 else partial(self._verify, out)

    def _verify(
        self, out: FrozenKVMTPSampledBuffers, logits: torch.Tensor, info: SamplingBatchInfo, positions: torch.Tensor
    ) -> torch.Tensor:
        best = logits.argmax(dim=-1)
        if info.all_greedy:
            return best
        batch, width = out.draft_tokens.shape
        controls = (info.temperatures, info.top_ks, info.top_ps, info.min_ps)
        wide = (None if control is None else control.repeat_interleave(width) for control in controls)
        target = sampling_distribution(logits, *wide).view(batch, width, -1)  # type: ignore[arg-type]
        at = positions.view(batch, width)
        of_drafts = target[:, :-1].gather(2, out.draft_tokens[:, 1:, None])[:, :, 0]
        accepted = count_accepted(of_drafts, out.draft_probs[:, :-1], info.seeds, at[:, :-1])
        request = torch.arange(batch, device=logits.device)
        state = out.draft_states[request, accepted.clamp(max=width - 2)]
        tokens = verify_drafts(
            target[request, accepted],
            draft_distribution(self._assistant, state, info),
            out.draft_tokens,
            accepted,
            info.seeds,
            at[request, accepted],
        )
        return torch.where(info.greedy[:, None], best.view(batch, width), tokens).view(-1)


def draft_distribution(assistant: Any, state: torch.Tensor, info: SamplingBatchInfo) -> torch.Tensor:
    """``state`` [B, D] of the assistant -> what a draft is drawn from, [B, V]."""
    return sampling_distribution(
        assistant.draft_logits(state), info.temperatures, info.top_ks, info.top_ps, info.min_ps
    )
