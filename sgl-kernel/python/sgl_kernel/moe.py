"""Mixture of experts: routing and the experts' gated MLPs.

Shapes: T rows, E experts, k of them per row, D hidden width, M expert width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sgl_kernel.activation import gelu_tanh_and_mul
from sgl_kernel.launch import triton_kernels
from sgl_kernel.norm import rmsnorm_torch


def route(router_logits: torch.Tensor, per_expert_scale: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over all experts, keep ``top_k``, renormalise, then scale per expert.

    ``router_logits`` [T, E], or parts [S, T, E] to be summed in ascending order -> weights [T, top_k] float32 and
    expert ids [T, top_k] int64, the likeliest first and of equal ones the lower id.
    """
    if router_logits.is_cuda:
        return triton_kernels("moe_router").route(router_logits, per_expert_scale, top_k)
    return route_torch(router_logits, per_expert_scale, top_k)


def route_torch(
    router_logits: torch.Tensor, per_expert_scale: torch.Tensor, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference of ``route``. ``torch.topk`` leaves the order of equal probabilities open."""
    logits = router_logits.float()
    if logits.dim() == 3:
        logits = sum(logits[1:], start=logits[0])
    weights, expert_ids = torch.softmax(logits, dim=-1).topk(top_k, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True)
    return weights * per_expert_scale.float()[expert_ids], expert_ids


def norm_and_route(
    x: torch.Tensor,
    router_scale: torch.Tensor,
    router_proj: torch.Tensor,
    per_expert_scale: torch.Tensor,
    top_k: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole router: RMSNorm without weight, ``router_scale`` [D] and D^-1/2, ``router_proj`` [E, D], ``route``.

    ``x`` [T, D], the residual stream -> as ``route``.
    """
    if x.is_cuda:
        return triton_kernels("moe_router").norm_and_route(x, router_scale, router_proj, per_expert_scale, top_k, eps)
    return norm_and_route_torch(x, router_scale, router_proj, per_expert_scale, top_k, eps)


def norm_and_route_torch(
    x: torch.Tensor,
    router_scale: torch.Tensor,
    router_proj: torch.Tensor,
    per_expert_scale: torch.Tensor,
    top_k: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference of ``norm_and_route``."""
    z = rmsnorm_torch(x, None, eps) * router_scale * x.shape[1] ** -0.5
    return route_torch(F.linear(z, router_proj), per_expert_scale, top_k)


def experts(
    x: torch.Tensor, weights: torch.Tensor, expert_ids: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Sum of the selected experts' outputs.

    ``x`` [T, D]; ``weights``, ``expert_ids`` [T, k]; ``gate_up`` [E, 2M, D] (gate rows first); ``down`` [E, D, M]
    -> [T, D]. A row's experts are added in an order of its own, whatever else is in the batch.
    """
    return combine_pairs(expert_pairs(x, expert_ids, gate_up, down), weights)


def expert_pairs(x: torch.Tensor, expert_ids: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Each selected expert's output by itself, unweighted: what ``experts`` sums. -> [T, k, D] in the dtype of x."""
    if x.is_cuda:
        return triton_kernels("moe").expert_pairs(x, expert_ids, gate_up, down)
    return expert_pairs_torch(x, expert_ids, gate_up, down)


def expert_pairs_torch(
    x: torch.Tensor, expert_ids: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """The reference of ``expert_pairs``."""
    pairs = x.new_empty(*expert_ids.shape, x.shape[1])
    for expert in expert_ids.unique().tolist():
        rows, slots = (expert_ids == expert).nonzero(as_tuple=True)
        pairs[rows, slots] = _expert(x[rows], gate_up[expert], down[expert])
    return pairs


def combine_pairs(pairs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted sum over a row's pairs, slot by slot in float32: ``pairs`` [T, k, D], ``weights`` [T, k] -> [T, D]."""
    if pairs.is_cuda:
        return triton_kernels("moe").combine(pairs, weights)
    return combine_pairs_torch(pairs, weights)


def combine_pairs_torch(pairs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The reference of ``combine_pairs``."""
    return (pairs.float() * weights[:, :, None]).sum(1).to(pairs.dtype)


def add_experts(
    dense: torch.Tensor,
    pairs: torch.Tensor,
    weights: torch.Tensor,
    residual: torch.Tensor,
    norm_weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    eps: float,
    scale: torch.Tensor,
    next_weight: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The end of a sparse layer: ``s = (residual + norm_c(norm_a(dense) + norm_b(experts))) * scale``, and s normed.

    ``dense`` [T, D] or parts [S, T, D], the dense MLP's output; ``pairs`` [T, k, D] and ``weights`` [T, k], whose
    weighted sum the experts' output is; ``residual`` [T, D]; ``norm_weights``: those of a, b and c, [D]; ``scale`` [1];
    ``next_weight`` [D] -> s and rmsnorm(s, next_weight), [T, D] both.
    """
    if residual.is_cuda:
        return triton_kernels("moe").add_experts(dense, pairs, weights, residual, norm_weights, eps, scale, next_weight)
    return add_experts_torch(dense, pairs, weights, residual, norm_weights, eps, scale, next_weight)


def add_experts_torch(
    dense: torch.Tensor,
    pairs: torch.Tensor,
    weights: torch.Tensor,
    residual: torch.Tensor,
    norm_weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    eps: float,
    scale: torch.Tensor,
    next_weight: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference of ``add_experts``."""
    of_dense, of_sparse, of_both = norm_weights
    dense = dense.sum(0).to(residual.dtype) if dense.dim() == 3 else dense
    both = rmsnorm_torch(dense, of_dense, eps) + rmsnorm_torch(combine_pairs_torch(pairs, weights), of_sparse, eps)
    total = (residual + rmsnorm_torch(both, of_both, eps)) * scale
    return total, rmsnorm_torch(total, next_weight, eps)


def _expert(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return F.linear(gelu_tanh_and_mul(F.linear(x, gate_up)), down)
