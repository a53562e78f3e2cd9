"""The sparse half of a mixture-of-experts layer."""

from __future__ import annotations

import torch

from sgl_kernel.moe import combine_pairs, expert_pairs, norm_and_route
from sglang.srt.configs.model_config import MoEConfig
from sglang.srt.distributed.parallel_state import TpGroup


class MoE:
    """Router and experts. The router sees the raw residual, the experts its normed form.

    Every rank has the router, and a part of the width of every expert.
    """

    def __init__(
        self,
        hidden_size: int,
        moe: MoEConfig,
        eps: float,
        dtype: torch.dtype,
        device: torch.device,
        group: TpGroup,
    ) -> None:
        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device=device)

        self.width = group.part(moe.intermediate_size)
        self.top_k = moe.top_k
        self.eps = eps
        self._group = group
        self.router_proj = empty(moe.num_experts, hidden_size)
        self.router_scale = empty(hidden_size)
        self.per_expert_scale = empty(moe.num_experts)
        self.gate_up = empty(moe.num_experts, 2 * len(self.width), hidden_size)
        self.down = empty(moe.num_experts, hidden_size, len(self.width))

    def route(self, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``residual`` [T, D] -> weights [T, k] float32 and expert ids [T, k] int64."""
        return norm_and_route(
            residual, self.router_scale, self.router_proj, self.per_expert_scale, self.top_k, self.eps
        )

    def pairs(self, residual: torch.Tensor, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``residual``, ``normed`` [T, D] -> the chosen experts' outputs [T, k, D], their weights [T, k] float32.

        With several ranks, k is their number: what each has of the weighted sum, and weights that are 1.
        """
        weights, expert_ids = self.route(residual)
        pairs = expert_pairs(normed, expert_ids, self.gate_up, self.down)
        if self._group.size == 1:
            return pairs, weights
        of_ranks = self._group.gather(combine_pairs(pairs, weights)).transpose(0, 1).contiguous()
        return of_ranks, torch.ones(of_ranks.shape[:2], dtype=torch.float32, device=of_ranks.device)
