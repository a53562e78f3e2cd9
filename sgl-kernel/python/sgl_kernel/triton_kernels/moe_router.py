"""The router of a mixture of experts: its product with the norm folded in, then softmax and the best few experts.

Shapes: T rows, E experts, k of them per row, D hidden width.
"""

import torch
import triton
import triton.language as tl

from sgl_kernel.triton_kernels.common import (
    cdiv,
    dot_precision,
    next_power_of_2,
    options,
    release_dependents,
    wait_for_inputs,
)
from sgl_kernel.triton_kernels.norm import sum_parts
from sgl_kernel.triton_kernels.select import key_index, key_score, ranking_keys

ROUTER_BK = 256  # columns per part of the router's product


@triton.jit
def router_kernel(
    x_ptr, scale_ptr, w_ptr, parts_ptr, squares_ptr, T, E, D, gain,
    BN: tl.constexpr, BK: tl.constexpr, CHUNK: tl.constexpr, BM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """parts[s, t, e] = sum over part s of D of (x * scale * gain)[t] w[e]; squares[s, t] = that of x[t]^2.

    The norm of x is one factor per row, so it may follow the product. Grid: (row tiles, expert tiles, parts).
    """
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    e = tl.program_id(1) * BN + tl.arange(0, BN)
    part = tl.program_id(2)
    x_rows = x_ptr + m.to(tl.int64)[None, :] * D
    acc = tl.zeros((BN, BM), dtype=tl.float32)
    squares = tl.zeros((BM,), dtype=tl.float32)
    for start in tl.static_range(0, BK, CHUNK):
        d = part * BK + start + tl.arange(0, CHUNK)
        w = tl.load(w_ptr + e[:, None] * D + d[None, :], mask=(e[:, None] < E) & (d[None, :] < D), other=0.0)
        scale = tl.load(scale_ptr + d, mask=d < D, other=0.0).to(tl.float32) * gain
        if start == 0:
            wait_for_inputs()
            release_dependents()
        x = tl.load(x_rows + d[:, None], mask=(m[None, :] < T) & (d[:, None] < D), other=0.0).to(tl.float32)
        acc = tl.dot(w, (x * scale[:, None]).to(w.dtype), acc, input_precision=PRECISION)
        squares += tl.sum(x * x, axis=0)
    at = part.to(tl.int64) * T + m
    tl.store(parts_ptr + at[None, :] * E + e[:, None], acc, mask=(m[None, :] < T) & (e[:, None] < E))
    if tl.program_id(1) == 0:
        tl.store(squares_ptr + at, squares, mask=m < T)


@triton.jit
def route_kernel(
    logits_ptr, squares_ptr, scale_ptr, weights_ptr, ids_ptr, T, E, top_k, D, eps,
    PARTS: tl.constexpr, NORM: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Softmax over all experts, the best ``top_k`` in falling order, renormalised and scaled. One row per program.

    NORM: the logits are those of a row whose RMS, in parts of ``squares``, has yet to be divided by.
    """
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    slot = tl.arange(0, BLOCK_K)
    wait_for_inputs()
    release_dependents()
    logits = sum_parts(logits_ptr, T * E, row * E + e, e < E, PARTS)
    if NORM:
        logits *= tl.rsqrt(sum_parts(squares_ptr, T, row, True, PARTS) / D + eps)
    logits = tl.where(e < E, logits, float("-inf"))
    exps = tl.exp(logits - tl.max(logits, axis=0))
    probs = tl.where(e < E, exps / tl.sum(exps, axis=0), -1.0)
    best = tl.topk(ranking_keys(probs, e), BLOCK_K)
    chosen = slot < top_k
    ids = tl.where(chosen, key_index(best), 0)
    weights = tl.where(chosen, key_score(best), 0.0)
    weights = weights / tl.sum(weights, axis=0) * tl.load(scale_ptr + ids).to(tl.float32)
    tl.store(weights_ptr + row * top_k + slot, weights, mask=chosen)
    tl.store(ids_ptr + row * top_k + slot, ids.to(tl.int64), mask=chosen)


def route(logits, scale, top_k):
    """``logits`` [T, E] or parts [S, T, E]; ``scale`` [E] -> weights [T, k] float32, ids [T, k] int64."""
    if logits.dim() not in (2, 3) or not logits.is_contiguous() or logits.shape[-2] == 0:
        raise ValueError(f"router logits must be contiguous [T, E] or [S, T, E] with T > 0, got {list(logits.shape)}")
    return _route(logits, None, scale, top_k, 1, 0.0)


def _route(logits, squares, scale, top_k, width, eps):
    rows, num_experts = logits.shape[-2:]
    if list(scale.shape) != [num_experts] or not 0 < top_k <= num_experts or scale.device != logits.device:
        raise ValueError(
            f"per-expert scale {list(scale.shape)} on {scale.device} and top_k {top_k} do not fit "
            f"{num_experts} experts on {logits.device}"
        )
    weights = torch.empty((rows, top_k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((rows, top_k), dtype=torch.int64, device=logits.device)
    route_kernel[(rows,)](
        logits, logits if squares is None else squares, scale, weights, ids, rows, num_experts, top_k, width, eps,
        PARTS=logits.shape[0] if logits.dim() == 3 else 1, NORM=squares is not None,
        BLOCK_E=max(2, next_power_of_2(num_experts)), BLOCK_K=max(2, next_power_of_2(top_k)), **options(1),
    )  # fmt: skip
    return weights, ids


def norm_and_route(x, router_scale, router_proj, scale, top_k, eps):
    """``x`` [T, D], ``router_scale`` [D], ``router_proj`` [E, D], ``scale`` [E] -> as ``route``."""
    (rows, width), num_experts = x.shape, router_proj.shape[0]
    if list(router_proj.shape) != [num_experts, width] or list(router_scale.shape) != [width] or rows == 0:
        raise ValueError(
            f"router: x [T, D], router_scale [D] and router_proj [E, D] do not fit: {list(x.shape)}, "
            f"{list(router_scale.shape)}, {list(router_proj.shape)}"
        )
    for name, tensor in (("x", x), ("router_scale", router_scale), ("router_proj", router_proj)):
        if not tensor.is_contiguous() or tensor.device != scale.device or tensor.dtype is not x.dtype:
            raise ValueError(f"router: {name} must be contiguous {x.dtype} on {scale.device}, is {tensor.dtype}")
    parts = torch.empty((cdiv(width, ROUTER_BK), rows, num_experts), dtype=torch.float32, device=x.device)
    squares = torch.empty(parts.shape[:2], dtype=torch.float32, device=x.device)
    router_kernel[(cdiv(rows, 16), cdiv(num_experts, 16), parts.shape[0])](
        x, router_scale, router_proj, parts, squares, rows, num_experts, width, width**-0.5,
        BN=16, BM=16, BK=ROUTER_BK, CHUNK=32 if x.dtype.itemsize == 4 else ROUTER_BK,
        PRECISION=dot_precision(x.dtype), **options(4),
    )  # fmt: skip
    return _route(parts, squares, scale, top_k, width, eps)
