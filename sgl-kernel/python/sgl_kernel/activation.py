"""Gated GELU."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``gate_up`` [T, 2 * I], gate half first -> gelu_tanh(gate) * up, [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up
