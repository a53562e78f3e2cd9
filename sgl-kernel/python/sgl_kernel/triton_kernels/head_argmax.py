"""The output head of greedy rows: best token, its logit and the log-sum-exp, without a row of logits in memory.

Two kernels: each tile of the vocabulary leaves its best logit, that token and a sum of exponentials; a second kernel
reduces the tiles of a row in an order that depends on the vocabulary only.
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
from sgl_kernel.triton_kernels.linear import check, product_of_used

BN = 64  # the order in which a tile's logits are summed hangs on it: one value for every number of rows
_NONE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def tanh(x):
    """tanh to a few units in the last place; near zero by its series, where the exponential form cancels."""
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    far = tl.where(x < 0.0, -t, t)
    s = x * x
    near = x * (1.0 + s * (-1.0 / 3.0 + s * (2.0 / 15.0 + s * (-17.0 / 315.0 + s * (62.0 / 2835.0)))))
    return tl.where(tl.abs(x) < 0.3, near, far)


@triton.jit
def softcap(logits, cap, dtype: tl.constexpr):
    """cap * tanh(logits / cap), rounded to ``dtype`` after each of the three steps, as tensors of it would be."""
    scaled = tl.div_rn(logits, cap).to(dtype).to(tl.float32)
    bent = tanh(scaled).to(dtype).to(tl.float32)
    return (bent * cap).to(dtype).to(tl.float32)


@triton.jit
def best_and_sum(logits, ids):
    """Over axis 0: greatest logit, the lowest of its ids, and the sum of exp(logit - greatest); -inf does not count."""
    best = tl.max(logits, axis=0)
    first = tl.min(tl.where(logits == best, ids, _NONE), axis=0)
    return best, first, tl.sum(tl.exp(logits - tl.where(best == float("-inf"), 0.0, best)), axis=0)


@triton.jit
def head_tiles_kernel(
    x_ptr, w_ptr, best_ptr, id_ptr, sum_ptr, T, V, K, stride_x, cap,
    HAS_CAP: tl.constexpr, EVEN_K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Statistics of BN tokens for BM rows, [T, tiles] each. Grid: (row tiles, vocabulary tiles)."""
    dtype: tl.constexpr = w_ptr.dtype.element_ty
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    used = m < T
    w_rows = w_ptr + tl.minimum(n, V - 1).to(tl.int64)[:, None] * K
    x_rows = x_ptr + m.to(tl.int64)[None, :] * stride_x
    wait_for_inputs()
    acc = product_of_used(w_rows, x_rows, used, K, BN, BK, BM, EVEN_K, PRECISION)
    release_dependents()
    logits = acc.to(dtype).to(tl.float32)
    if HAS_CAP:
        logits = softcap(logits, cap, dtype)
    ids = tl.broadcast_to(n[:, None], (BN, BM))
    best, first, total = best_and_sum(tl.where(ids < V, logits, float("-inf")), ids)
    at = m.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    tl.store(best_ptr + at, best, mask=used)
    tl.store(id_ptr + at, first, mask=used)
    tl.store(sum_ptr + at, total, mask=used)


@triton.jit
def reduce_kernel(
    best_ptr, id_ptr, sum_ptr, token_ptr, ids_ptr, max_ptr, lse_ptr, num_parts,
    HAS_TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row per program. Of equal logits the least entry of ``id`` wins; HAS_TOKENS: it stands for a token."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    used = part < num_parts
    at = row * num_parts + part
    wait_for_inputs()
    bests = tl.load(best_ptr + at, mask=used, other=float("-inf"))
    firsts = tl.load(id_ptr + at, mask=used, other=_NONE)
    sums = tl.load(sum_ptr + at, mask=used, other=0.0)
    release_dependents()
    best = tl.max(bests, axis=0)
    first = tl.min(tl.where(bests == best, firsts, _NONE), axis=0)
    total = tl.sum(sums * tl.exp(bests - best), axis=0)
    token = first.to(tl.int64)
    if HAS_TOKENS:
        tokens = tl.load(token_ptr + at, mask=used & (firsts == first), other=0)
        token = tl.sum(tokens, axis=0)
    tl.store(ids_ptr + row, token)
    tl.store(max_ptr + row, best)
    tl.store(lse_ptr + row, best + tl.log(total))


def reduce_parts(best, first, total, tokens=None):
    """[R, parts] statistics -> ids [R] int64, max logit [R] and log-sum-exp [R] float32."""
    rows, parts = best.shape
    ids = torch.empty(rows, dtype=torch.int64, device=best.device)
    top, lse = (torch.empty(rows, dtype=torch.float32, device=best.device) for _ in range(2))
    block = next_power_of_2(parts)
    reduce_kernel[(rows,)](
        best, first, total, best if tokens is None else tokens, ids, top, lse, parts,
        HAS_TOKENS=tokens is not None, BLOCK=block, **options(min(8, max(1, block // 64))),
    )  # fmt: skip
    return ids, top, lse


def choose_tile(num_rows, k, dtype):
    """BM, BK and stages."""
    bm = min(64, max(16, next_power_of_2(num_rows)))
    if dtype.itemsize == 4:
        return bm, 32, 2
    return bm, 128 if bm <= 32 and k % 128 == 0 else 64, 4


def head_argmax(hidden, weight, cap, tile=None):
    """``hidden`` [T, D], ``weight`` [V, D] -> ids [T] int64, max logit and log-sum-exp [T] float32.

    ``tile``: (BM, BK, stages) instead of the chosen ones.
    """
    check(hidden, weight)
    (rows, width), vocab = hidden.shape, weight.shape[0]
    bm, bk, stages = tile or choose_tile(rows, width, weight.dtype)
    tiles = cdiv(vocab, BN)
    best, total = (torch.empty((rows, tiles), dtype=torch.float32, device=hidden.device) for _ in range(2))
    first = torch.empty((rows, tiles), dtype=torch.int32, device=hidden.device)
    head_tiles_kernel[(cdiv(rows, bm), tiles)](
        hidden, weight, best, first, total, rows, vocab, width, hidden.stride(0), cap or 1.0,
        HAS_CAP=cap is not None, EVEN_K=width % bk == 0, BN=BN, BK=bk, BM=bm,
        PRECISION=dot_precision(weight.dtype), **options(4, stages),
    )  # fmt: skip
    return reduce_parts(best, first, total)
