"""Choosing tokens from rows of logits without sorting them.

A row is cut into blocks; statistics and winners are found per block, then per row, in an order that depends on the
vocabulary only, so a row's token depends on nothing beside the row.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from sgl_kernel.triton_kernels.common import ON_GPU, options, release_dependents, wait_for_inputs
from sgl_kernel.triton_kernels.sampling_filters import (
    BLOCK,
    Rows,
    bits_of,
    probability,
    row_sum,
    scaled_logits,
    top_k_threshold,
    top_p_threshold,
)

_NONE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _mix(h):
    """``sgl_kernel.sampling._mix`` on uint32."""
    h = h ^ (h >> 16)
    h = h * 0x7FEB352D
    h = h ^ (h >> 15)
    h = h * 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def exponential_noise(seed, position, tokens):
    """``sgl_kernel.sampling.exponential_noise`` for one row: ``seed``, ``position`` int64, ``tokens`` int32."""
    key = _mix(seed.to(tl.uint32) ^ 0x9E3779B9)
    key = _mix(key ^ (seed >> 32).to(tl.uint32))
    key = _mix(key ^ position.to(tl.uint32))
    h = _mix(_mix(tokens.to(tl.uint32) + 0x632BE5AB) ^ key)
    uniform = ((h >> 9).to(tl.float32) + 0.5) * (1.0 / (1 << 23))
    if ON_GPU:  # the fast logarithm loses its digits near 1, where the winners are
        noise = -libdevice.log(uniform)
    else:
        noise = -tl.log(uniform)
    return noise


@triton.jit
def statistics_kernel(
    logits_ptr, greedy_ptr, temperature_ptr, max_ptr, sum_ptr, best_ptr, stride, V, width, BLOCK: tl.constexpr
):  # fmt: skip
    """Per block: greatest scaled logit, its lowest token id, sum of exp(logit - greatest). Grid: (blocks, rows)."""
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs()
    release_dependents()
    temperature = tl.where(tl.load(greedy_ptr + row // width) != 0, 1.0, tl.load(temperature_ptr + row // width))
    x = scaled_logits(logits_ptr, stride, temperature, row, tokens, V)
    top = tl.max(x, axis=0)
    at = row * tl.num_programs(0) + block
    tl.store(max_ptr + at, top)
    tl.store(sum_ptr + at, tl.sum(tl.exp(x - tl.where(top == float("-inf"), 0.0, top)), axis=0))
    tl.store(best_ptr + at, tl.min(tl.where(x == top, tokens, _NONE), axis=0))


@triton.jit
def softmax_kernel(max_ptr, sum_ptr, top_ptr, total_ptr, num_blocks, BLOCKS: tl.constexpr):
    """A row's greatest scaled logit and its sum of exponentials. One row per program."""
    row = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, BLOCKS)
    wait_for_inputs()
    release_dependents()
    tops = tl.load(max_ptr + row * num_blocks + b, mask=b < num_blocks, other=float("-inf"))
    sums = tl.load(sum_ptr + row * num_blocks + b, mask=b < num_blocks, other=0.0)
    top = tl.max(tops, axis=0)
    tl.store(top_ptr + row, top)
    tl.store(total_ptr + row, tl.sum(sums * tl.exp(tops - top), axis=0))


@triton.jit
def _stays(bits, in_row, block, threshold, ties_ptr, row, num_blocks, BLOCKS: tl.constexpr):
    """Which tokens lie above ``threshold``, which at it, and how many of a row lie at it before each."""
    b = tl.arange(0, BLOCKS)
    before = tl.sum(tl.load(ties_ptr + row * num_blocks + b, mask=b < block, other=0), axis=0)
    tie = (bits == threshold) & in_row
    return bits > threshold, tie, before + tl.cumsum(tie.to(tl.int32), axis=0) - tie.to(tl.int32)


@triton.jit
def race_kernel(
    logits_ptr, greedy_ptr, temperature_ptr, seed_ptr, position_ptr, top_ptr, total_ptr,
    top_k_ptr, k_threshold_ptr, k_count_ptr, k_ties_ptr,
    p_goal_ptr, p_threshold_ptr, p_mass_ptr, p_ties_ptr, min_p_ptr, race_ptr, winner_ptr, stride, V, width,
    HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr, HAS_MIN_P: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Greatest p / noise among a block's tokens that pass the filters, and its lowest token. Grid: (blocks, rows)."""
    block, num_blocks = tl.program_id(0), tl.num_programs(0)
    row = tl.program_id(1).to(tl.int64)
    request = row // width
    wait_for_inputs()
    release_dependents()
    if tl.load(greedy_ptr + request) != 0:
        return
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    x = scaled_logits(logits_ptr, stride, tl.load(temperature_ptr + request), row, tokens, V)
    top, total = tl.load(top_ptr + row), tl.load(total_ptr + row)
    p = probability(x, top, total)
    kept = tokens < V
    if HAS_TOP_K:
        threshold = tl.load(k_threshold_ptr + row)
        if threshold >= 0:
            above, tie, rank = _stays(bits_of(p), tokens < V, block, threshold, k_ties_ptr, row, num_blocks, BLOCKS)
            at_threshold = tl.load(top_k_ptr + request).to(tl.float32) - row_sum(k_count_ptr, row, num_blocks, BLOCKS)
            kept = kept & (above | (tie & (rank < at_threshold)))
    if HAS_TOP_P:
        threshold = tl.load(p_threshold_ptr + row)
        if threshold >= 0:
            above, tie, rank = _stays(bits_of(p), tokens < V, block, threshold, p_ties_ptr, row, num_blocks, BLOCKS)
            before = row_sum(p_mass_ptr, row, num_blocks, BLOCKS) + rank.to(tl.float32) * p
            # the first at the threshold always stays: it is the one that reaches the goal
            kept = kept & (above | (tie & ((rank == 0) | (before < tl.load(p_goal_ptr + row)))))
    if HAS_MIN_P:
        kept = kept & (p >= probability(top, top, total) * tl.load(min_p_ptr + request))
    noise = exponential_noise(tl.load(seed_ptr + request), tl.load(position_ptr + row), tokens)
    race = tl.where(kept, p / noise, -1.0)
    best = tl.max(race, axis=0)
    at = row * num_blocks + block
    tl.store(race_ptr + at, best)
    tl.store(winner_ptr + at, tl.min(tl.where(race == best, tokens, _NONE), axis=0))


@triton.jit
def winner_kernel(
    greedy_ptr, max_ptr, best_ptr, race_ptr, winner_ptr, token_ptr, num_blocks, width, BLOCKS: tl.constexpr
):  # fmt: skip
    """The best block's token: of the logits where greedy, else of the race. One row per program."""
    row = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, BLOCKS)
    at = row * num_blocks + b
    wait_for_inputs()
    greedy = tl.load(greedy_ptr + row // width) != 0
    by_logit = b < tl.where(greedy, num_blocks, 0)
    by_race = b < tl.where(greedy, 0, num_blocks)
    score = tl.where(
        greedy,
        tl.load(max_ptr + at, mask=by_logit, other=float("-inf")),
        tl.load(race_ptr + at, mask=by_race, other=-1.0),
    )
    score = tl.where(b < num_blocks, score, float("-inf"))
    token = tl.load(best_ptr + at, mask=by_logit, other=0) + tl.load(winner_ptr + at, mask=by_race, other=0)
    release_dependents()
    best = tl.max(score, axis=0)
    tl.store(token_ptr + row, tl.min(tl.where(score == best, token, _NONE), axis=0).to(tl.int64))


def choose_tokens(logits, greedy, temperatures, seeds, positions, top_ks, top_ps, min_ps):
    """``logits`` [R, V]; ``positions`` [R]; the rest [B], R a multiple of B; filters may be None -> [R] int64."""
    _check(logits, positions, (greedy, temperatures, seeds, top_ks, top_ps, min_ps))
    rows = Rows(logits, greedy, temperatures)
    bests, sums = rows.per_block(torch.int32), rows.per_block(torch.float32)
    statistics_kernel[rows.grid](*rows.inputs, rows.max, sums, bests, *rows.shape, BLOCK=BLOCK, **options(4))
    softmax_kernel[(rows.num_rows,)](
        rows.max, sums, rows.top, rows.total, rows.blocks, BLOCKS=rows.padded_blocks, **options(1)
    )
    by_top_k = None if top_ks is None else top_k_threshold(rows, top_ks)
    by_top_p = None if top_ps is None else top_p_threshold(rows, top_ps, top_ks, by_top_k)
    winners, race = _race(rows, seeds, positions, top_ks, by_top_k, by_top_p, min_ps)
    tokens = torch.empty(rows.num_rows, dtype=torch.int64, device=rows.device)
    winner_kernel[(rows.num_rows,)](
        greedy, rows.max, bests, race, winners, tokens, rows.blocks, rows.width, BLOCKS=rows.padded_blocks, **options(1)
    )
    return tokens


def _race(rows, seeds, positions, top_ks, by_top_k, by_top_p, min_ps):
    """Each block's winner and its score, [R, blocks]."""
    winners, race = rows.per_block(torch.int32), rows.per_block(torch.float32)
    k, p = by_top_k, by_top_p
    top_k = (race,) * 4 if k is None else (top_ks, k.threshold, k.count, k.ties)
    top_p = (race,) * 4 if p is None else (p.goal, p.threshold, p.mass, p.ties)
    race_kernel[rows.grid](
        *rows.inputs, seeds, positions, rows.top, rows.total, *top_k, *top_p, race if min_ps is None else min_ps,
        race, winners, *rows.shape,
        HAS_TOP_K=k is not None, HAS_TOP_P=p is not None, HAS_MIN_P=min_ps is not None,
        BLOCK=BLOCK, BLOCKS=rows.padded_blocks, **options(4),
    )  # fmt: skip
    return winners, race


def _check(logits, positions, controls):
    if logits.dim() != 2 or logits.stride(1) != 1 or logits.shape[0] == 0:
        raise ValueError(f"logits must be [R, V] with contiguous rows, got {list(logits.shape)} {logits.stride()}")
    requests = controls[0].shape[0]
    if logits.shape[0] % requests or list(positions.shape) != [logits.shape[0]]:
        raise ValueError(
            f"{logits.shape[0]} rows of logits, {list(positions.shape)} positions and {requests} requests do not fit"
        )
    names = ("greedy", "temperatures", "seeds", "top_ks", "top_ps", "min_ps")
    dtypes = (torch.bool, torch.float32, torch.int64, torch.int64, torch.float32, torch.float32)
    named = {"positions": (positions, torch.int64)} | dict(zip(names, zip(controls, dtypes, strict=True), strict=True))
    for name, (tensor, dtype) in named.items():
        if tensor is None:
            continue
        rows = logits.shape[0] if name == "positions" else requests
        good = list(tensor.shape) == [rows] and tensor.dtype is dtype and tensor.is_contiguous()
        if not good or tensor.device != logits.device:
            raise ValueError(
                f"{name} must be contiguous [{rows}] {dtype} on {logits.device}, got {list(tensor.shape)} "
                f"{tensor.dtype} on {tensor.device}"
            )
