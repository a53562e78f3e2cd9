"""The one way from logits to tokens, for plain decode and for every row of a verified block."""

from __future__ import annotations

import torch

from sgl_kernel.sampling import filtered_probs, sample
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo


def sample_tokens(
    logits: torch.Tensor, info: SamplingBatchInfo, positions: torch.Tensor, rows_per_request: int
) -> torch.Tensor:
    """Choose the token that follows each row.

    ``logits`` [B * N, V]; ``positions`` [B * N] int64, the position of each row's input token; N = ``rows_per_request``
    -> [B * N] int64. A draw is keyed by (request's seed, position), so the token after a given prefix is the same
    whether it was reached by plain decode or as a row of a verified block, and in any batch.
    """
    best = logits.argmax(dim=-1)
    if info.all_greedy:
        return best

    def rows(value: torch.Tensor | None) -> torch.Tensor | None:
        return value if value is None or rows_per_request == 1 else value.repeat_interleave(rows_per_request)

    temperatures, seeds, greedy = rows(info.temperatures), rows(info.seeds), rows(info.greedy)
    assert temperatures is not None and seeds is not None and greedy is not None
    probs = filtered_probs(logits, temperatures, rows(info.top_ks), rows(info.top_ps), rows(info.min_ps))
    return torch.where(greedy, best, sample(probs, seeds, positions))
