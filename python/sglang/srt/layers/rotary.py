"""Rotary position embedding of both Gemma 4 layer kinds."""

from __future__ import annotations

import torch

from sgl_kernel.rope import rope_tables
from sglang.srt.configs.model_config import RopeConfig


class RotaryEmbedding:
    """Tables for one layer kind, made per forward (a cached table for 262144 positions would take a gigabyte).

    "proportional": only the first ``partial_rotary_factor * D // 2`` frequencies rotate, with the exponent over the
    full head width; the others are zero, which leaves their dimensions unchanged.
    """

    def __init__(self, head_dim: int, rope: RopeConfig, device: torch.device) -> None:
        half = head_dim // 2
        exponent = torch.arange(half, dtype=torch.float32, device=device) * 2 / head_dim
        inv_freq = 1.0 / (rope.theta**exponent)
        if rope.proportional:
            inv_freq[int(rope.partial_rotary_factor * head_dim // 2) :] = 0.0
        self.inv_freq = inv_freq / rope.factor

    def tables(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """``positions`` [T] int64 -> cos and signed sin, [T, 1, D]."""
        return rope_tables(positions, self.inv_freq, dtype)
