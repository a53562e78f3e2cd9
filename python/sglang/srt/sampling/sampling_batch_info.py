"""Sampling controls of a batch as tensors, one row per request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang.srt.sampling.sampling_params import TOP_K_ALL, SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingBatchInfo:
    """[B] tensors; a control that no request uses is None.

    ``temperatures`` float32 (1.0 where greedy), ``greedy`` bool, ``seeds`` int64, ``top_ks`` int64, ``top_ps`` and
    ``min_ps`` float32.
    """

    all_greedy: bool
    greedy: torch.Tensor
    temperatures: torch.Tensor
    seeds: torch.Tensor
    top_ks: torch.Tensor | None
    top_ps: torch.Tensor | None
    min_ps: torch.Tensor | None

    @classmethod
    def from_params(
        cls, params: Sequence[SamplingParams], seeds: Sequence[int], device: torch.device
    ) -> SamplingBatchInfo:
        """``seeds``: the seed each request draws with, whether it came from the user or not."""
        greedy = [p.is_greedy for p in params]
        top_ks = [p.top_k if p.top_k > 0 else TOP_K_ALL for p in params]
        sampled = [p for p in params if not p.is_greedy]

        def floats(values: Sequence[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)

        return cls(
            all_greedy=all(greedy),
            greedy=torch.tensor(greedy, device=device),
            temperatures=floats([1.0 if p.is_greedy else p.temperature for p in params]),
            seeds=torch.tensor(seeds, dtype=torch.int64, device=device),
            top_ks=torch.tensor(top_ks, device=device) if any(p.top_k > 0 for p in sampled) else None,
            top_ps=floats([p.top_p for p in params]) if any(p.top_p < 1.0 for p in sampled) else None,
            min_ps=floats([p.min_p for p in params]) if any(p.min_p > 0.0 for p in sampled) else None,
        )
