"""Which programs make up a round, and their buffers: chains, trees, and chains of sampled drafts."""

from __future__ import annotations

from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.decode_programs import WIDTH, TargetVerifyProgram
from sglang.srt.model_executor.decode_rows import DecodeRows
from sglang.srt.model_executor.input_buffers import ROWS
from sglang.srt.server_args_slices import SpecConfig
from sglang.srt.speculative.adaptive_length import draft_lengths
from sglang.srt.speculative.frozen_kv_mtp_cuda_graph_runner import (
    FrozenKVMTPAcceptProgram,
    FrozenKVMTPDraftProgram,
    FrozenKVMTPInputBuffers,
    FrozenKVMTPRound,
    FrozenPrefix,
)
from sglang.srt.speculative.frozen_kv_mtp_info import FrozenKVMTPContext
from sglang.srt.speculative.frozen_kv_mtp_sampled import (
    FrozenKVMTPSampledBuffers,
    FrozenKVMTPSampledDraftProgram,
    FrozenKVMTPSampledVerifyProgram,
)
from sglang.srt.speculative.frozen_kv_mtp_tree import (
    FrozenKVMTPTreeAcceptProgram,
    FrozenKVMTPTreeBuffers,
    FrozenKVMTPTreeDraftProgram,
    FrozenKVMTPTreeVerifyProgram,
)


def round_lengths(spec: SpecConfig, *, captured: bool) -> tuple[int, ...]:
    """How many drafts a round may verify, ascending. A tree is drafted whole or not at all.

    What a seed draws with sampled drafts depends on where rounds end: they are of one length, whatever the rest of a
    batch could use, so that a seed draws the same in any batch.
    """
    most = spec.num_draft_tokens - 1
    if spec.topk > 1:
        return (0, most) if spec.adaptive or not captured else (most,)
    if spec.sample_drafts and not spec.adaptive:
        return (most,)
    return draft_lengths(most, coarse=captured) if spec.adaptive or not captured else (most,)


def allocate_buffers(spec: SpecConfig, assistant: TpModelWorker, target: TpModelWorker) -> FrozenKVMTPInputBuffers:
    """``assistant`` drafts for ``target``."""
    sizes = {
        ROWS: target.memory.max_requests,
        WIDTH: spec.num_draft_tokens,
        "result_width": spec.max_depth + 2,
        "hidden": target.runner.config.text.hidden_size,
        "draft_hidden": assistant.runner.config.text.hidden_size,
    }
    kind = FrozenKVMTPInputBuffers
    if spec.topk > 1:
        kind = FrozenKVMTPTreeBuffers
    elif spec.sample_drafts:
        kind = FrozenKVMTPSampledBuffers
    return kind.allocate(sizes, target.runner.dtype, target.runner.device.torch_device)


def build_round(
    spec: SpecConfig,
    assistant: TpModelWorker,
    target: TpModelWorker,
    context: FrozenKVMTPContext,
    rows: DecodeRows,
    out: FrozenKVMTPInputBuffers,
    simulated_len: float | None,
) -> FrozenKVMTPRound:
    """The stages over ``rows`` and ``out``, which ``allocate_buffers`` made. ``simulated_len``: see
    ``FrozenKVMTPAcceptProgram``."""
    model = assistant.runner.model
    drafting = (model, FrozenPrefix(assistant.backend, context, assistant.memory.max_kv_len), rows)
    verifying = (target.runner.model, target.backend, target.memory, rows)
    if isinstance(out, FrozenKVMTPTreeBuffers):
        return FrozenKVMTPRound(
            FrozenKVMTPTreeDraftProgram(*drafting, out, topk=spec.topk, num_steps=spec.num_steps),
            FrozenKVMTPTreeVerifyProgram(*verifying, out),
            FrozenKVMTPTreeAcceptProgram(target.memory, rows, out, simulated_len),
        )
    accept = FrozenKVMTPAcceptProgram(rows, out, simulated_len)
    if isinstance(out, FrozenKVMTPSampledBuffers):
        drawn = FrozenKVMTPSampledDraftProgram(*drafting, out)
        return FrozenKVMTPRound(drawn, FrozenKVMTPSampledVerifyProgram(model, *verifying, out), accept)
    draft = FrozenKVMTPDraftProgram(*drafting, out)
    return FrozenKVMTPRound(draft, TargetVerifyProgram(*verifying, out), accept)
