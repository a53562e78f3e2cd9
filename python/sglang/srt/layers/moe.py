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
        """``residual``, ``normed`` [T, D] -> what this rank has of the chosen experts' outputs [T, k, D], and their
        weights [T, k] float32."""
        weights, expert_ids = self.route(residual)
        return expert_pairs(normed, expert_ids, self.gate_up, self.down), weights

    def over_ranks(
        self, dense: torch.Tensor, pairs: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The sums over the ranks of the dense MLP's output, [T, D] or parts, and of the experts', in one exchange. The
        latter as a single pair of weight 1."""
        if self._group.size == 1:
            return dense, pairs, weights
        here = dense.sum(0) if dense.dim() == 3 else dense
        sparse = combine_pairs(pairs, weights)
        total_dense, total_sparse = self._group.total(torch.cat((here, sparse.to(here.dtype)))).chunk(2)
        one = torch.ones(len(here), 1, dtype=torch.float32, device=here.device)
        return total_dense, total_sparse.to(pairs.dtype)[:, None], one
