"""Mixture of experts: grouping by expert, the two grouped products, and the end of a sparse layer.

Shapes: T rows, E experts, k of them per row, P = T * k pairs of a row and an expert, D hidden width, M expert width.
A pair is numbered row * k + slot. The weight tile is the first operand of every product (y^T = W x^T), so few rows cost
no more than one, and a row's result is formed in the same order whatever tile it falls into.
"""

from dataclasses import dataclass

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
from sgl_kernel.triton_kernels.linear import gelu_tanh, product_of_used
from sgl_kernel.triton_kernels.norm import inverse_rms, sum_parts

MAX_DIRECT_ROWS = 32  # up to here every program finds its own rows; beyond, pairs are sorted by expert first


@triton.jit
def align_kernel(ids_ptr, order_ptr, starts_ptr, num_pairs, BLOCK: tl.constexpr):
    """order: the pairs sorted by expert, stable; starts[e]: where those of expert e begin. One expert per program."""
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    wait_for_inputs()
    start = 0
    for base in range(0, num_pairs, BLOCK):
        ids = tl.load(ids_ptr + base + lane, mask=base + lane < num_pairs, other=expert)
        start += tl.sum((ids < expert).to(tl.int32), axis=0)
    tl.store(starts_ptr + expert, start)
    if expert == tl.num_programs(0) - 1:
        tl.store(starts_ptr + expert + 1, num_pairs)
    for base in range(0, num_pairs, BLOCK):
        ids = tl.load(ids_ptr + base + lane, mask=base + lane < num_pairs, other=-1)
        match = (ids == expert).to(tl.int32)
        tl.store(order_ptr + start + tl.cumsum(match, axis=0) - 1, base + lane, mask=match != 0)
        start += tl.sum(match, axis=0)
    release_dependents()


@triton.jit
def _own_pairs(
    ids_ptr, tile, T, E, top_k, BM: tl.constexpr, BLOCK_K: tl.constexpr, BY_EXPERT: tl.constexpr
):  # fmt: skip
    """Direct mode: the expert of ``tile`` and, in lane t, row t's pair with that expert (T * k where it has none).

    A tile stands for an expert, or for a pair: then the first pair of an expert takes all of its rows.
    """
    row = tl.arange(0, BM)[:, None]
    slot = tl.arange(0, BLOCK_K)[None, :]
    pair = row * top_k + slot
    ids = tl.load(ids_ptr + pair, mask=(row < T) & (slot < top_k), other=-1).to(tl.int32)
    expert = tile if BY_EXPERT else tl.load(ids_ptr + tile).to(tl.int32)
    pairs = tl.min(tl.where(ids == expert, pair, T * top_k), axis=1)
    first = tl.min(pairs, axis=0)
    mine = first < T * top_k if BY_EXPERT else first == tile
    return tl.where(mine, expert, E), pairs


@triton.jit
def _sorted_pairs(
    order_ptr, starts_ptr, tile, num_pairs, E, BM: tl.constexpr, BLOCK_E: tl.constexpr
):  # fmt: skip
    """Sorted mode: the expert of ``tile`` (E where there is no such tile) and its pairs, num_pairs in idle lanes."""
    e = tl.arange(0, BLOCK_E)
    start = tl.load(starts_ptr + e, mask=e < E, other=0)
    end = tl.load(starts_ptr + e + 1, mask=e < E, other=0)
    tiles = (end - start + BM - 1) // BM
    expert = tl.sum((tl.cumsum(tiles, axis=0) <= tile).to(tl.int32), axis=0)
    expert = tl.minimum(expert, E)
    before = tl.sum(tl.where(e < expert, tiles, 0), axis=0)
    at = tl.sum(tl.where(e == expert, start, 0), axis=0) + (tile - before) * BM + tl.arange(0, BM)
    inside = at < tl.sum(tl.where(e == expert, end, 0), axis=0)
    return expert, tl.load(order_ptr + at, mask=inside, other=num_pairs)


@triton.jit
def grouped_kernel(
    x_ptr, w_ptr, ids_ptr, order_ptr, starts_ptr, y_ptr, T, E, top_k, N, K, num_n_tiles,
    GATED: tl.constexpr, DIRECT: tl.constexpr, BY_EXPERT: tl.constexpr, EVEN_K: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y[pair, n] = x[row] . w[expert, n] for every pair; a tile holds BN rows of one expert's weight.

    GATED: x has a row per row of the batch, w has 2N rows (gate first), and y = gelu_tanh(gate) * up; a tile holds
    BN / 2 gate rows above their BN / 2 up rows. Else x has a row per pair. Grid: weight tiles * pair tiles, GROUP pair
    tiles sharing one weight tile in turn.
    """
    HALF: tl.constexpr = BN // 2 if GATED else BN
    pid = tl.program_id(0)
    group = pid // (GROUP * num_n_tiles)
    tile = group * GROUP + pid % GROUP
    n_start = (pid % (GROUP * num_n_tiles)) // GROUP * HALF
    num_pairs = T * top_k
    r = tl.arange(0, BN)
    rows_n = tl.minimum(n_start + r % HALF, N - 1) + tl.where(r < HALF, 0, N)
    wait_for_inputs()
    if DIRECT:
        expert, pairs = _own_pairs(ids_ptr, tile, T, E, top_k, BM, BLOCK_K, BY_EXPERT)
    else:
        expert, pairs = _sorted_pairs(order_ptr, starts_ptr, tile, num_pairs, E, BM, BLOCK_E)
    if expert >= E:
        return
    used = pairs < num_pairs
    rows_x = pairs // top_k if GATED else pairs
    num_w_rows = 2 * N if GATED else N
    w_rows = w_ptr + (expert.to(tl.int64) * num_w_rows + rows_n)[:, None] * K
    x_rows = x_ptr + rows_x.to(tl.int64)[None, :] * K
    acc = product_of_used(w_rows, x_rows, used, K, BN, BK, BM, EVEN_K, PRECISION)
    release_dependents()
    n = n_start + tl.arange(0, HALF)
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (2, HALF, BM)), (1, 2, 0)))
        y = gelu_tanh(gate) * up
    else:
        y = acc
    y_rows = y_ptr + pairs.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(y_rows, y.to(y_ptr.dtype.element_ty), mask=used[None, :] & (n[:, None] < N))


@triton.jit
def _weighted_sum(pairs_ptr, weights_ptr, row, d, D, TOP_K: tl.constexpr):
    """Columns ``d`` of sum over slots, in order, of weights[row, slot] * pairs[row, slot], in float32."""
    pair = row * TOP_K
    total = tl.load(weights_ptr + pair) * tl.load(pairs_ptr + pair * D + d, mask=d < D, other=0.0).to(tl.float32)
    for slot in tl.static_range(1, TOP_K):
        y = tl.load(pairs_ptr + (pair + slot) * D + d, mask=d < D, other=0.0).to(tl.float32)
        total += tl.load(weights_ptr + pair + slot) * y
    return total


@triton.jit
def combine_kernel(pairs_ptr, weights_ptr, y_ptr, D, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """y[t] = weighted sum of the row's pairs. Grid: (rows, column blocks)."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs()
    release_dependents()
    total = _weighted_sum(pairs_ptr, weights_ptr, row, d, D, TOP_K)
    tl.store(y_ptr + row * D + d, total.to(y_ptr.dtype.element_ty), mask=d < D)


@triton.jit
def add_experts_kernel(
    dense_ptr, pairs_ptr, weights_ptr, residual_ptr, w_dense_ptr, w_sparse_ptr, w_both_ptr, scale_ptr, w_next_ptr,
    sum_ptr, next_ptr, part_stride, D, eps, PARTS: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """See ``sgl_kernel.moe.add_experts``; rounded wherever a tensor of the reference is. One row per program."""
    dtype: tl.constexpr = residual_ptr.dtype.element_ty
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    mask = d < D
    row = t * D + d
    wait_for_inputs()
    release_dependents()
    sparse = _weighted_sum(pairs_ptr, weights_ptr, t, d, D, TOP_K)
    sparse = _normed(sparse.to(dtype).to(tl.float32), w_sparse_ptr, d, D, eps, dtype)
    dense = sum_parts(dense_ptr, part_stride, row, mask, PARTS).to(dtype).to(tl.float32)
    both = (_normed(dense, w_dense_ptr, d, D, eps, dtype) + sparse).to(dtype).to(tl.float32)
    both = _normed(both, w_both_ptr, d, D, eps, dtype)
    s = (tl.load(residual_ptr + row, mask=mask, other=0.0).to(tl.float32) + both).to(dtype).to(tl.float32)
    s = (s * tl.load(scale_ptr).to(tl.float32)).to(dtype).to(tl.float32)
    tl.store(sum_ptr + row, s.to(dtype), mask=mask)
    tl.store(next_ptr + row, _normed(s, w_next_ptr, d, D, eps, dtype).to(dtype), mask=mask)


@triton.jit
def _normed(x, weight_ptr, d, D, eps, dtype: tl.constexpr):
    """RMSNorm of a row padded with zeros, rounded to ``dtype``."""
    weight = tl.load(weight_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    return (x * inverse_rms(x, D, eps) * weight).to(dtype).to(tl.float32)


@dataclass(frozen=True, slots=True)
class Tile:
    """BN weight rows by BK columns for BM pairs."""

    bn: int
    bk: int
    bm: int
    stages: int
    warps: int


@dataclass(frozen=True, slots=True)
class Grouping:
    """Which pairs a tile takes: found by each program from ``ids`` (direct), or read from ``order`` and ``starts``."""

    ids: torch.Tensor
    order: torch.Tensor
    starts: torch.Tensor
    bm: int
    num_tiles: int
    direct: bool


def choose_tile(bm, k, dtype):
    """64 or more weight rows: anything less leaves the wide matrix unit, whose sums have an order of their own."""
    bk = 128 if k % 128 == 0 and bm <= 32 else 64
    if dtype.itemsize == 4:
        return Tile(64, 32, bm, 2, 4)
    return Tile(64, bk, bm, 4, 4) if bm <= 32 else Tile(128, 64, bm, 4, 8)


def group_pairs(ids, num_experts):
    """``ids`` [T, k] -> ``Grouping``; the number of tiles is the most there can be."""
    rows, top_k = ids.shape
    pairs = rows * top_k
    if rows <= MAX_DIRECT_ROWS:
        bm = max(16, next_power_of_2(rows))
        return Grouping(ids, ids, ids, bm, min(pairs, num_experts), direct=True)
    order, starts = align(ids, num_experts)
    bm = min(128, max(16, next_power_of_2(pairs // num_experts)))
    return Grouping(ids, order, starts, bm, pairs // bm + min(num_experts, pairs), direct=False)


def align(ids, num_experts):
    """``ids`` [T, k] -> pairs sorted by expert [T * k] int32 (stable), and each expert's start [E + 1] int32."""
    pairs = ids.numel()
    order = torch.empty(pairs, dtype=torch.int32, device=ids.device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=ids.device)
    block = min(4096, max(128, next_power_of_2(pairs)))
    align_kernel[(num_experts,)](ids, order, starts, pairs, BLOCK=block, **options(4 if block <= 1024 else 8))
    return order, starts


def _grouped(x, weight, grouping, tile, *, gated):
    rows, top_k = grouping.ids.shape
    num_experts, n, k = weight.shape
    n = n // 2 if gated else n
    y = torch.empty((rows * top_k, n), dtype=x.dtype, device=x.device)
    n_tiles = cdiv(n, tile.bn // 2 if gated else tile.bn)
    group = 1 if grouping.direct else 8
    grouped_kernel[(n_tiles * cdiv(grouping.num_tiles, group) * group,)](
        x, weight, grouping.ids, grouping.order, grouping.starts, y, rows, num_experts, top_k, n, k, n_tiles,
        GATED=gated, DIRECT=grouping.direct, BY_EXPERT=rows * top_k > num_experts, EVEN_K=k % tile.bk == 0,
        BN=tile.bn, BK=tile.bk, BM=tile.bm, GROUP=group, BLOCK_K=next_power_of_2(top_k),
        BLOCK_E=next_power_of_2(num_experts), PRECISION=dot_precision(x.dtype), **options(tile.warps, tile.stages),
    )  # fmt: skip
    return y


def expert_pairs(x, ids, gate_up, down, tiles=None):
    """``x`` [T, D], ``ids`` [T, k], ``gate_up`` [E, 2M, D], ``down`` [E, D, M] -> [T, k, D].

    ``tiles``: a ``Tile`` for each product, instead of the chosen ones.
    """
    _check_experts(x, ids, gate_up, down)
    grouping = group_pairs(ids, gate_up.shape[0])
    up_tile, down_tile = tiles or (choose_tile(grouping.bm, w.shape[2], x.dtype) for w in (gate_up, down))
    inner = _grouped(x, gate_up, grouping, up_tile, gated=True)
    return _grouped(inner, down, grouping, down_tile, gated=False).view(*ids.shape, -1)


def _check_experts(x, ids, gate_up, down):
    num_experts, width, hidden = down.shape[0], down.shape[-1], x.shape[-1]
    if (
        x.dim() != 2
        or ids.dim() != 2
        or ids.shape[0] != x.shape[0]
        or x.shape[0] == 0
        or list(gate_up.shape) != [num_experts, 2 * width, hidden]
        or list(down.shape) != [num_experts, hidden, width]
    ):
        raise ValueError(
            f"experts need x [T, D], ids [T, k], gate_up [E, 2M, D] and down [E, D, M], got {list(x.shape)}, "
            f"{list(ids.shape)}, {list(gate_up.shape)} and {list(down.shape)}"
        )
    for name, tensor in (("x", x), ("ids", ids), ("gate_up", gate_up), ("down", down)):
        if not tensor.is_contiguous() or tensor.device != x.device:
            raise ValueError(f"experts: {name} must be contiguous on {x.device}, got strides {tensor.stride()}")
    if not x.dtype is gate_up.dtype is down.dtype or ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"experts: x, gate_up and down must have one dtype and ids be integers, got {x.dtype}, {gate_up.dtype}, "
            f"{down.dtype} and {ids.dtype}"
        )


def combine(pairs, weights):
    """``pairs`` [T, k, D], ``weights`` [T, k] float32 -> [T, D]."""
    rows, top_k, width = pairs.shape
    if weights.shape != pairs.shape[:2] or not (pairs.is_contiguous() and weights.is_contiguous()):
        raise ValueError(f"weights {list(weights.shape)} do not fit contiguous pairs {list(pairs.shape)}")
    y = torch.empty((rows, width), dtype=pairs.dtype, device=pairs.device)
    combine_kernel[(rows, cdiv(width, 512))](pairs, weights, y, width, TOP_K=top_k, BLOCK=512, **options(4))
    return y


def add_experts(dense, pairs, weights, residual, norm_weights, eps, scale, next_weight):
    """See ``sgl_kernel.moe.add_experts``."""
    rows, top_k, width = pairs.shape
    if dense.shape[-2:] != residual.shape or list(residual.shape) != [rows, width] or weights.shape != pairs.shape[:2]:
        raise ValueError(
            f"dense {list(dense.shape)}, pairs {list(pairs.shape)}, weights {list(weights.shape)} and residual "
            f"{list(residual.shape)} must be [T, D] or [S, T, D], [T, k, D], [T, k] and [T, D]"
        )
    for tensor in (dense, pairs, weights, residual, *norm_weights, next_weight):
        if not tensor.is_contiguous() or tensor.device != residual.device:
            raise ValueError(f"adding experts needs contiguous tensors on {residual.device}, got {tensor.stride()}")
    total, normed = torch.empty_like(residual), torch.empty_like(residual)
    add_experts_kernel[(rows,)](
        dense, pairs, weights, residual, *norm_weights, scale, next_weight, total, normed, rows * width, width, eps,
        PARTS=dense.shape[0] if dense.dim() == 3 else 1, TOP_K=top_k, BLOCK=next_power_of_2(width), **options(8),
    )  # fmt: skip
    return total, normed
