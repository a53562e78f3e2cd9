"""The sparse half of a mixture-of-experts layer."""

from __future__ import annotations

import torch

from sgl_kernel.moe import expert_pairs, norm_and_route
from sglang.srt.configs.model_config import MoEConfig


class MoE:
    """Router and experts. The router sees the raw residual, the experts its normed form."""

    def __init__(self, hidden_size: int, moe: MoEConfig, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device=device)

        self.top_k = moe.top_k
        self.eps = eps
        self.router_proj = empty(moe.num_experts, hidden_size)
        self.router_scale = empty(hidden_size)
        self.per_expert_scale = empty(moe.num_experts)
        self.gate_up = empty(moe.num_experts, 2 * moe.intermediate_size, hidden_size)
        self.down = empty(moe.num_experts, hidden_size, moe.intermediate_size)

    def route(self, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``residual`` [T, D] -> weights [T, k] float32 and expert ids [T, k] int64."""
        return norm_and_route(
            residual, self.router_scale, self.router_proj, self.per_expert_scale, self.top_k, self.eps
        )

    def pairs(self, residual: torch.Tensor, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``residual``, ``normed`` [T, D] -> the chosen experts' outputs [T, k, D], their weights [T, k] float32."""
        weights, expert_ids = self.route(residual)
        return expert_pairs(normed, expert_ids, self.gate_up, self.down), weights
