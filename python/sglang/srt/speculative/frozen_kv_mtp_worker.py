"""FROZEN_KV_MTP: the assistant drafts a chain over the target's frozen KV, the target verifies it in one pass.

A step is three functions: ``draft``, ``verify`` and the commit the scheduler makes of its result. Output equals the
target's own: every emitted token is the target's choice after a prefix of emitted tokens; drafts only decide how many
such choices one pass yields. See docs/speculative_decoding.md.

Shapes: B requests, S draft steps, N = S + 1 rows per request, H hidden width of the target.
"""

from __future__ import annotations

import torch

from sgl_kernel.spec_tree import accept_chain
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.managers.schedule_batch import GenerationBatchResult, ScheduleBatch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.models.gemma4_mtp import build_frozen_kv_mtp_context
from sglang.srt.server_args_slices import SpecConfig
from sglang.srt.speculative.frozen_kv_mtp_info import FrozenKVMTPDraftInput, FrozenKVMTPVerifyInput
from sglang.srt.speculative.frozen_kv_mtp_utils import (
    expand_for_topk_draft,
    frozen_kv_target_view,
    target_kv_pool_view,
    with_tokens,
)
from sglang.srt.speculative.spec_info import SpecCapabilities
from sglang.srt.utils.env import SGLANG_DEBUG_KV_DIGEST


class FrozenKVMTPWorker(TpModelWorker):
    """*Is* the assistant's worker, *has* the target's. Reads the target's KV through a read-only view."""

    def __init__(self, runner: ModelRunner, target: TpModelWorker, backend: AttentionBackend, spec: SpecConfig) -> None:
        super().__init__(runner, target.kv_reader(), backend)
        self.target = target
        self.spec = spec
        self.context = build_frozen_kv_mtp_context(target.runner.config, runner.config, self.memory.pool)
        embed, _ = target.runner.model.get_embed_and_head()
        runner.model.bind_frozen_kv_context(self.context, embed)
        self.capabilities = SpecCapabilities(
            max_tokens_per_step=spec.num_draft_tokens, needs_draft_kv=False, supports_overlap=False
        )
        self._check_digest = SGLANG_DEBUG_KV_DIGEST.get()

    def forward_batch_generation(self, batch: ScheduleBatch) -> GenerationBatchResult:
        with torch.inference_mode():
            if batch.mode is ForwardMode.EXTEND:
                return self._extend(batch)
            chain = self.draft(batch)
            return self.verify(batch, chain)

    def _extend(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """The target alone; its token and hidden state seed the first draft."""
        tokens, hidden = self.target.extend(batch)
        assert hidden is not None
        ones = torch.ones(len(batch.reqs), dtype=torch.int64)
        return GenerationBatchResult(tokens[:, None], ones, FrozenKVMTPDraftInput(tokens, hidden), num_drafts=0)

    def draft(self, batch: ScheduleBatch) -> FrozenKVMTPVerifyInput:
        """S identical iterations (token, hidden) -> (token, hidden) over the committed prefix, planned once."""
        seed = batch.spec_info
        assert isinstance(seed, FrozenKVMTPDraftInput), f"a decode step needs a draft seed, got {type(seed).__name__}"
        before = self.context.target_token_to_kv_pool.digest() if self._check_digest else None
        kvs = [req.kv for req in batch.reqs if req.kv is not None]
        geometry = expand_for_topk_draft(frozen_kv_target_view(kvs, self._device), self.spec.topk)
        plan = self.backend.init_forward_metadata(geometry)
        token, hidden = seed.bonus_tokens, seed.hidden_states
        fb = target_kv_pool_view(self.context, geometry, plan, token)
        chain = [token]
        for _ in range(self.spec.num_steps):
            state, hidden = self.runner.model.forward(with_tokens(fb, token), hidden)
            token = self.runner.model.draft_argmax(state)
            chain.append(token)
        if before is not None and before != self.context.target_token_to_kv_pool.digest():
            raise RuntimeError("drafting changed the target's KV")
        steps = torch.arange(len(chain), device=self._device)
        return FrozenKVMTPVerifyInput(torch.stack(chain, dim=1), geometry.positions[:, None] + steps)

    def verify(self, batch: ScheduleBatch, chain: FrozenKVMTPVerifyInput) -> GenerationBatchResult:
        """One target pass over the chain; the run each request gains, and the seed of its next draft."""
        tokens, hidden = self.target.decode_rows(batch, chain.draft_tokens)
        assert hidden is not None
        accept_lens = accept_chain(chain.draft_tokens, tokens)
        last = (accept_lens - 1)[:, None]
        seed = FrozenKVMTPDraftInput(
            bonus_tokens=tokens.gather(1, last).squeeze(1),
            hidden_states=hidden.gather(1, last[:, :, None].expand(-1, -1, hidden.shape[2])).squeeze(1),
        )
        return GenerationBatchResult(tokens, accept_lens, seed, num_drafts=self.spec.num_steps)

    def describe(self) -> dict[str, object]:
        facts = self.target.describe()
        facts["spec"] = {
            "algorithm": self.spec.algorithm,
            "num_steps": self.spec.num_steps,
            "num_draft_tokens": self.spec.num_draft_tokens,
            "assistant_architecture": self.runner.config.architecture,
            "assistant_weights_bytes": self.runner.weight_bytes,
            "assistant_kv_bytes": 0,
            "layer_map": dict(enumerate(self.context.target_layer_ids)),
        }
        return facts
