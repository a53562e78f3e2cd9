"""Mixture of experts: routing and the experts' gated MLPs."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sgl_kernel.activation import gelu_tanh_and_mul


def route(router_logits: torch.Tensor, per_expert_scale: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over all experts, keep ``top_k``, renormalise, then scale per expert.

    ``router_logits`` [T, E] -> weights [T, top_k] float32 and expert ids [T, top_k] int64.
    """
    weights, expert_ids = torch.softmax(router_logits.float(), dim=-1).topk(top_k, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True)
    return weights * per_expert_scale.float()[expert_ids], expert_ids


def experts(
    x: torch.Tensor, weights: torch.Tensor, expert_ids: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Sum of the selected experts' outputs.

    ``x`` [T, D]; ``weights``, ``expert_ids`` [T, k]; ``gate_up`` [E, 2M, D] (gate rows first); ``down`` [E, D, M]
    -> [T, D].
    Rows are grouped by expert, and each row adds its experts in order of expert id, whatever else is in the batch.
    """
    out = torch.zeros_like(x)
    for expert in expert_ids.unique().tolist():
        rows, slots = (expert_ids == expert).nonzero(as_tuple=True)
        y = F.linear(gelu_tanh_and_mul(F.linear(x[rows], gate_up[expert])), down[expert])
        out.index_add_(0, rows, (y * weights[rows, slots, None]).to(x.dtype))
    return out
