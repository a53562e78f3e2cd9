"""The one way from logits to tokens, for plain decode and for every row of a verified block."""

from __future__ import annotations

import torch

from sgl_kernel.sampling import choose_tokens
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo


def sample_tokens(logits: torch.Tensor, info: SamplingBatchInfo, positions: torch.Tensor) -> torch.Tensor:
    """Choose the token that follows each row.

    ``logits`` [B * N, V], the N rows of a request together; ``positions`` [B * N] int64, the position of each row's
    input token -> [B * N] int64. A draw is keyed by (request's seed, position), so the token after a given prefix is
    the same whether it was reached by plain decode or as a row of a verified block, and in any batch.
    """
    if info.all_greedy:
        return logits.argmax(dim=-1)
    return choose_tokens(
        logits, info.greedy, info.temperatures, info.seeds, positions, info.top_ks, info.top_ps, info.min_ps
    )
