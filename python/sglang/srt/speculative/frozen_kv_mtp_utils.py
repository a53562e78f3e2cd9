"""Small steps of a frozen-KV draft: where it stands, what it sees, what it runs.

All of them make new values; a draft never edits a batch it was given.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from sglang.srt.model_executor.forward_batch_info import (
    AttnGeometry,
    AttnPlan,
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    HostLens,
)
from sglang.srt.speculative.frozen_kv_mtp_info import FrozenKVMTPContext

_RANGE, _SPREAD = 1 << 16, 40503  # of simulated accept lengths


def set_frozen_kv_positions(committed_lens: torch.Tensor) -> torch.Tensor:
    """The query position of each request for the whole round, [B] int64. It does not advance while drafting.

    A drafting query stands at the bonus token's own index L - 1, the first position without KV, which is the number of
    committed tokens: the result is ``committed_lens`` itself. (Engines that draft from the last committed slot stand
    one before.)
    """
    return committed_lens


def frozen_kv_target_view(
    req_pool_indices: torch.Tensor,
    committed_lens: torch.Tensor,
    committed_on_host: tuple[int, ...] | None,
    max_kv_len: int,
) -> AttnGeometry:
    """What a draft may see, for planning: the committed prefix of each request and never an uncommitted slot.

    ``req_pool_indices``, ``committed_lens`` [B] int64, the latter also as the host has them, if it may be asked;
    ``max_kv_len``: a bound for them otherwise.
    """
    host = None
    if committed_on_host is not None:
        host = HostLens(committed_on_host, committed_on_host)
        max_kv_len = max(committed_on_host)
    positions, q_lens = set_frozen_kv_positions(committed_lens), (1,) * committed_lens.shape[0]
    return AttnGeometry(req_pool_indices, committed_lens, positions, q_lens, max_kv_len, host)


def expand_for_topk_draft(geometry: AttnGeometry, topk: int) -> AttnGeometry:
    """The geometry of ``topk`` branches per request: one row becomes ``topk`` rows at the same position, so that a
    request's keys are read once for all of them."""
    return replace(
        geometry,
        positions=geometry.positions.repeat_interleave(topk),
        q_lens_cpu=tuple(num * topk for num in geometry.q_lens_cpu),
    )


def target_kv_pool_view(
    context: FrozenKVMTPContext, geometry: AttnGeometry, plan: AttnPlan, input_ids: torch.Tensor
) -> ForwardBatch:
    """A draft forward with the target's KV installed for reading. ``input_ids`` [rows of ``geometry``] int64."""
    return ForwardBatch(
        mode=ForwardMode.DRAFT,
        input_ids=input_ids,
        positions=geometry.positions,
        token_to_kv_pool=context.target_token_to_kv_pool,
        out_cache_loc=None,
        attn=plan,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        logits_rows=None,
        tail=None,
    )


def with_tokens(fb: ForwardBatch, input_ids: torch.Tensor) -> ForwardBatch:
    """The next iteration of a draft: same positions, same plan, the tokens just drafted."""
    return replace(fb, input_ids=input_ids)


def simulated_accept_lens(mean: float, seeds: torch.Tensor, committed_lens: torch.Tensor) -> torch.Tensor:
    """Accept lengths that are ``mean`` on average, [B] int64, without asking the target.

    A row's is the whole number below or above the mean, by ``seeds`` and ``committed_lens`` [B] int64. Few operators,
    since what is measured pays for them: the multiples of an odd number that is about the golden ratio of the range
    spread evenly over it.
    """
    whole = math.floor(mean)
    place = torch.add(seeds, committed_lens, alpha=_SPREAD).bitwise_and_(_RANGE - 1)
    return (place < round((mean - whole) * _RANGE)) + whole
