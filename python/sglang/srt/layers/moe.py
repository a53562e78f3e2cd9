"""The sparse half of a mixture-of-experts layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sgl_kernel.moe import experts, route
from sgl_kernel.norm import rmsnorm
from sglang.srt.configs.model_config import MoEConfig


class MoE:
    """Router and experts. The router sees the raw residual, the experts its normed form."""

    def __init__(self, hidden_size: int, moe: MoEConfig, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device=device)

        self.top_k = moe.top_k
        self.eps = eps
        self.router_gain = hidden_size**-0.5
        self.router_proj = empty(moe.num_experts, hidden_size)
        self.router_scale = empty(hidden_size)
        self.per_expert_scale = empty(moe.num_experts)
        self.gate_up = empty(moe.num_experts, 2 * moe.intermediate_size, hidden_size)
        self.down = empty(moe.num_experts, hidden_size, moe.intermediate_size)

    def __call__(self, residual: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """``residual``, ``normed`` [T, D] -> [T, D]."""
        z = rmsnorm(residual, None, self.eps) * self.router_scale * self.router_gain
        weights, expert_ids = route(F.linear(z, self.router_proj), self.per_expert_scale, self.top_k)
        return experts(normed, weights, expert_ids, self.gate_up, self.down)
