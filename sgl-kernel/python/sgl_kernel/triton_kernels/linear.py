"""Products of a few rows with a large weight, at the speed of memory.

The weight tile is the first operand (y^T = W x^T): its 64 or more rows fill the matrix unit however few rows ``x`` has,
and the sum over K of one output element is formed in the same order for every number of rows. Narrow outputs are split
along K so that all multiprocessors read; the parts are summed by whoever consumes them, which saves a launch.
"""

from dataclasses import replace

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
from sgl_kernel.triton_kernels.tiles import TILES, Tile

# what two programs on each of a H200's 132 multiprocessors come to, less some for an even load
_PROGRAMS = 220


def rows_per_tile(num_rows):
    """BM. Rows beyond the largest tile read the weight again, from the L2 cache."""
    return min(256, max(16, next_power_of_2(num_rows)))


def choose_tile(n, k, num_rows, itemsize, *, whole):
    """``split`` depends on the weight's shape only: it decides the order of summation."""
    tile = TILES.get((n, k, whole)) or _default_tile(n, k, whole)
    bm = rows_per_tile(num_rows)
    if bm > 32:
        tile = Tile(128, 64, 3, 8, tile.split) if bm > 64 else Tile(64, 64, 4, 4, tile.split)
    # stages are for elements of two bytes
    return tile if itemsize == 2 else replace(tile, stages=max(2, tile.stages // 2))


def _default_tile(n, k, whole):
    split = 1 if whole else choose_split(n, k)
    return Tile(64, 128, 4, 4, split) if k // split % 128 == 0 else Tile(64, 64, 6, 4, split)


def choose_split(n, k):
    """Parts along K, each of at least 256 columns, so that there are not quite two programs per multiprocessor."""
    tiles = cdiv(n, 64)
    allowed = [split for split in (1, 2, 3, 4, 5, 6, 8) if k % (split * 64) == 0 and k // split >= 256]
    return min(allowed, key=lambda split: abs(tiles * split - _PROGRAMS), default=1)


@triton.jit
def _load(rows, cols, limit, EVEN_K: tl.constexpr):
    if EVEN_K:
        return tl.load(rows + cols)
    return tl.load(rows + cols, mask=cols < limit, other=0.0)


@triton.jit
def _product(
    x_ptr, w_ptr, rows_n, rows_m, k_start, k_end, K, stride_x,
    BN: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """W[rows_n, k_start:k_end] @ x[rows_m, k_start:k_end]^T, [BN, BM] float32, summed over k in ascending order."""
    k = tl.arange(0, BK)
    w_rows = w_ptr + rows_n.to(tl.int64)[:, None] * K
    x_rows = x_ptr + rows_m.to(tl.int64)[None, :] * stride_x
    wait_for_inputs()
    release_dependents()
    acc = tl.zeros((BN, BM), dtype=tl.float32)
    for start in range(k_start, k_end, BK):
        w = _load(w_rows, (start + k)[None, :], k_end, EVEN_K)
        x = _load(x_rows, (start + k)[:, None], k_end, EVEN_K)
        acc = tl.dot(w, x, acc, input_precision=PRECISION)
    return acc


@triton.jit
def product_of_used(
    w_rows, x_rows, used, K,
    BN: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As ``_product`` over all of K, from pointers to the rows: ``w_rows`` [BN, 1], ``x_rows`` [1, BM], of which only
    those ``used`` [BM] are read; the others count as zeros."""
    k = tl.arange(0, BK)
    acc = tl.zeros((BN, BM), dtype=tl.float32)
    for start in range(0, K, BK):
        cols = start + k
        if EVEN_K:
            w = tl.load(w_rows + cols[None, :])
            x = tl.load(x_rows + cols[:, None], mask=used[None, :], other=0.0)
        else:
            w = tl.load(w_rows + cols[None, :], mask=cols[None, :] < K, other=0.0)
            x = tl.load(x_rows + cols[:, None], mask=used[None, :] & (cols[:, None] < K), other=0.0)
        acc = tl.dot(w, x, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["T"])
def parts_kernel(
    x_ptr, w_ptr, y_ptr, T, N, K, k_split, stride_x,
    BN: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """y[s, t, n] = sum over part s of K of x[t, k] w[n, k]. Grid: (row tiles, weight tiles, parts)."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    part = tl.program_id(2)
    k_start = part * k_split
    k_end = tl.minimum(k_start + k_split, K)
    acc = _product(
        x_ptr, w_ptr, tl.minimum(n, N - 1), tl.minimum(m, T - 1), k_start, k_end, K, stride_x,
        BN, BK, BM, EVEN_K, PRECISION,
    )  # fmt: skip
    y = y_ptr + (part.to(tl.int64) * T + m.to(tl.int64)[None, :]) * N + n[:, None]
    tl.store(y, acc.to(y_ptr.dtype.element_ty), mask=(m[None, :] < T) & (n[:, None] < N))


@triton.jit
def gelu_tanh(x):
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    # tanh by the exponential of a non-positive number, which cannot overflow
    e = tl.exp(-2.0 * tl.abs(inner))
    t = (1.0 - e) / (1.0 + e)
    return 0.5 * x * (1.0 + tl.where(inner < 0.0, -t, t))


@triton.jit(do_not_specialize=["T"])
def gate_up_kernel(
    x_ptr, w_ptr, y_ptr, T, N, K, stride_x,
    BN: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """y[t, n] = gelu_tanh(x w[n]) * (x w[N + n]); N is the width of the result. Grid: (row tiles, weight tiles).

    One tile holds BN / 2 gate rows above their BN / 2 up rows, so that both come from one stream of large tiles.
    """
    HALF: tl.constexpr = BN // 2
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    r = tl.arange(0, BN)
    column = tl.minimum(tl.program_id(1) * HALF + r % HALF, N - 1)
    acc = _product(
        x_ptr, w_ptr, tl.where(r < HALF, column, column + N), tl.minimum(m, T - 1), 0, K, K, stride_x,
        BN, BK, BM, EVEN_K, PRECISION,
    )  # fmt: skip
    gate, up = tl.split(tl.permute(tl.reshape(acc, (2, HALF, BM)), (1, 2, 0)))
    n = tl.program_id(1) * HALF + tl.arange(0, HALF)
    y = y_ptr + m.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(y, (gelu_tanh(gate) * up).to(y_ptr.dtype.element_ty), mask=(m[None, :] < T) & (n[:, None] < N))


def check(x, weight):
    """ValueError unless ``x`` [T, K] and ``weight`` [N, K] can be multiplied by these kernels."""
    fits = x.dim() == 2 and weight.dim() == 2 and x.shape[1] == weight.shape[1] and x.shape[0] > 0
    if not fits or x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError(
            f"a product needs x [T, K] with contiguous rows and a contiguous weight [N, K], got x {list(x.shape)} "
            f"strides {x.stride()} and weight {list(weight.shape)} strides {weight.stride()}"
        )
    if x.dtype is not weight.dtype or x.device != weight.device:
        raise ValueError(f"x is {x.dtype} on {x.device}, the weight {weight.dtype} on {weight.device}: they must agree")


def linear_parts(x, weight, tile=None):
    """``x`` [T, K], ``weight`` [N, K] -> [S, T, N] float32."""
    check(x, weight)
    (t, k), n = x.shape, weight.shape[0]
    tile = tile or choose_tile(n, k, t, x.element_size(), whole=False)
    y = torch.empty((tile.split, t, n), dtype=torch.float32, device=x.device)
    _launch_parts(x, weight, y, tile)
    return y


def linear(x, weight, tile=None):
    """``x`` [T, K], ``weight`` [N, K] -> [T, N] in the dtype of ``x``, in one part."""
    check(x, weight)
    (t, k), n = x.shape, weight.shape[0]
    tile = tile or choose_tile(n, k, t, x.element_size(), whole=True)
    y = torch.empty((t, n), dtype=x.dtype, device=x.device)
    _launch_parts(x, weight, y, tile)
    return y


def _launch_parts(x, weight, y, tile):
    (t, k), n = x.shape, weight.shape[0]
    bm = rows_per_tile(t)
    k_split = cdiv(k, tile.split)
    even = k % tile.split == 0 and k_split % tile.bk == 0
    grid = (cdiv(t, bm), cdiv(n, tile.bn), tile.split)
    parts_kernel[grid](
        x, weight, y, t, n, k, k_split, x.stride(0),
        BN=tile.bn, BK=tile.bk, BM=bm, EVEN_K=even,
        PRECISION=dot_precision(x.dtype), **options(tile.warps, tile.stages),
    )  # fmt: skip


def gate_up_gelu(x, weight, tile=None):
    """``x`` [T, K], ``weight`` [2N, K], gate rows first -> gelu_tanh(gate) * up, [T, N] in the dtype of ``x``."""
    check(x, weight)
    (t, k), n = x.shape, weight.shape[0] // 2
    tile = tile or choose_tile(2 * n, k, t, x.element_size(), whole=True)
    bm = rows_per_tile(t)
    y = torch.empty((t, n), dtype=x.dtype, device=x.device)
    even = k % tile.bk == 0
    gate_up_kernel[(cdiv(t, bm), cdiv(n, tile.bn // 2))](
        x, weight, y, t, n, k, x.stride(0),
        BN=tile.bn, BK=tile.bk, BM=bm, EVEN_K=even,
        PRECISION=dot_precision(x.dtype), **options(tile.warps, tile.stages),
    )  # fmt: skip
    return y
