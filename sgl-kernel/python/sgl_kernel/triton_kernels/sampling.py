"""Choosing tokens from rows of logits without sorting them.

A row is cut into blocks of BLOCK tokens; all statistics are kept per block and added up in the order of blocks, so a
row's token depends on nothing beside the row. The filters are thresholds on the probability: the greatest t whose
tokens with p >= t are at least top_k many (top-k), or weigh at least top_p of what top-k kept (top-p). The bits of t
are found five at a time: 32 candidates are tried in one pass over the row. Of the tokens at a threshold the lower ids
stay.
"""

import torch
import triton
import triton.language as tl

from sgl_kernel.triton_kernels.common import cdiv, next_power_of_2, options, release_dependents, wait_for_inputs

BLOCK = 2048
CHUNK = 128
BITS = 5  # of the threshold, per pass
PASSES = 6  # a probability is at most 1.0, whose bits are 30
_NONE = tl.constexpr(0x7FFFFFFF)
_NO_THRESHOLD = tl.constexpr(-1)  # below the bits of every probability


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
    uniform = ((h >> 8).to(tl.float32) + 0.5) * (1.0 / (1 << 24))
    return -tl.log(uniform)


@triton.jit
def _scaled(logits_ptr, stride, temperature, row, tokens, V):
    logits = tl.load(logits_ptr + row * stride + tokens, mask=tokens < V, other=float("-inf")).to(tl.float32)
    return tl.div_rn(logits, temperature)


@triton.jit
def statistics_kernel(
    logits_ptr, greedy_ptr, temperature_ptr, max_ptr, sum_ptr, best_ptr, stride, V, width, BLOCK: tl.constexpr
):  # fmt: skip
    """Per block: greatest scaled logit, its lowest token id, sum of exp(logit - greatest). Grid: (blocks, rows)."""
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs()
    temperature = tl.where(tl.load(greedy_ptr + row // width) != 0, 1.0, tl.load(temperature_ptr + row // width))
    x = _scaled(logits_ptr, stride, temperature, row, tokens, V)
    top = tl.max(x, axis=0)
    release_dependents()
    at = row * tl.num_programs(0) + block
    tl.store(max_ptr + at, top)
    tl.store(sum_ptr + at, tl.sum(tl.exp(x - tl.where(top == float("-inf"), 0.0, top)), axis=0))
    tl.store(best_ptr + at, tl.min(tl.where(x == top, tokens, _NONE), axis=0))


@triton.jit
def _softmax_terms(max_ptr, sum_ptr, row, num_blocks, BLOCKS: tl.constexpr):
    """A row's greatest scaled logit and its sum of exponentials."""
    b = tl.arange(0, BLOCKS)
    tops = tl.load(max_ptr + row * num_blocks + b, mask=b < num_blocks, other=float("-inf"))
    sums = tl.load(sum_ptr + row * num_blocks + b, mask=b < num_blocks, other=0.0)
    top = tl.max(tops, axis=0)
    return top, tl.sum(sums * tl.exp(tops - top), axis=0)


@triton.jit
def _probability(x, top, total):
    return tl.exp(x - top) / total


@triton.jit
def _bits(p):
    """Bits of a probability: integers in the same order."""
    return p.to(tl.int32, bitcast=True)


@triton.jit
def _row_sum(ptr, row, num_blocks, BLOCKS: tl.constexpr):
    """Sum of a per-block statistic over a row."""
    b = tl.arange(0, BLOCKS)
    return tl.sum(tl.load(ptr + row * num_blocks + b, mask=b < num_blocks, other=0.0), axis=0)


@triton.jit
def _kept_by_top_k(threshold_ptr, count_ptr, mass_ptr, top_k_ptr, row, request, num_blocks, BLOCKS: tl.constexpr):
    """Top-k's threshold, how many of the tokens at it stay, and the probability of all that stays."""
    threshold = tl.load(threshold_ptr + row)
    at_threshold = tl.load(top_k_ptr + request).to(tl.float32) - _row_sum(count_ptr, row, num_blocks, BLOCKS)
    kept = _row_sum(mass_ptr, row, num_blocks, BLOCKS) + at_threshold * threshold.to(tl.float32, bitcast=True)
    return threshold, at_threshold, tl.where(threshold < 0, 1.0, kept)


@triton.jit
def _goal(
    k_threshold_ptr, k_count_ptr, k_mass_ptr, top_k_ptr, top_p_ptr, row, request, num_blocks,
    MASS: tl.constexpr, HAS_TOP_K: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """What the tokens from the threshold on must reach, and a threshold that is known to reach it (or -1)."""
    known = tl.full((), -1, dtype=tl.int32)
    if not MASS:
        goal = tl.load(top_k_ptr + request).to(tl.float32)
    elif not HAS_TOP_K:
        goal = tl.load(top_p_ptr + request)
    else:
        known, _, kept = _kept_by_top_k(
            k_threshold_ptr, k_count_ptr, k_mass_ptr, top_k_ptr, row, request, num_blocks, BLOCKS
        )
        goal = tl.load(top_p_ptr + request) * kept
    return goal, known


@triton.jit
def _active(greedy_ptr, top_k_ptr, top_p_ptr, request, V, MASS: tl.constexpr):
    """Whether this request is sampled and uses the filter."""
    uses = tl.load(top_p_ptr + request) < 1.0 if MASS else tl.load(top_k_ptr + request) < V
    return uses & (tl.load(greedy_ptr + request) == 0)


@triton.jit
def _narrow(
    tried_ptr, low_ptr, row, num_rows, num_blocks, goal, known,
    PASS: tl.constexpr, BITS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Lower end of the interval that holds the threshold after PASS passes."""
    TRIED: tl.constexpr = 1 << BITS
    shift: tl.constexpr = 30 - BITS * PASS
    j = tl.arange(0, TRIED)
    b = tl.arange(0, BLOCKS)[:, None]
    tried = tried_ptr + ((PASS - 1) % 2 * num_rows + row) * num_blocks * TRIED
    sums = tl.sum(tl.load(tried + b * TRIED + j[None, :], mask=b < num_blocks, other=0.0), axis=0)
    low = tl.load(low_ptr + (PASS - 1) * num_rows + row)
    reached = (sums >= goal) | (low + (j << shift) <= known)
    return low + (tl.max(tl.where(reached, j, 0), axis=0) << shift)


@triton.jit
def search_kernel(
    logits_ptr, greedy_ptr, temperature_ptr, max_ptr, sum_ptr, tried_ptr, low_ptr,
    k_threshold_ptr, k_count_ptr, k_mass_ptr, top_k_ptr, top_p_ptr, stride, V, width,
    PASS: tl.constexpr, BITS: tl.constexpr, MASS: tl.constexpr, HAS_TOP_K: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Tries 2^BITS thresholds: per block, how many tokens (MASS: what probability) lie at or above each.

    Grid: (blocks, rows).
    """
    TRIED: tl.constexpr = 1 << BITS
    block, num_blocks = tl.program_id(0), tl.num_programs(0)
    row, num_rows = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    request = row // width
    wait_for_inputs()
    release_dependents()
    if not _active(greedy_ptr, top_k_ptr, top_p_ptr, request, V, MASS):
        return
    low = tl.zeros((), dtype=tl.int32)
    if PASS > 0:
        goal, known = _goal(
            k_threshold_ptr, k_count_ptr, k_mass_ptr, top_k_ptr, top_p_ptr, row, request, num_blocks,
            MASS, HAS_TOP_K, BLOCKS,
        )  # fmt: skip
        low = _narrow(tried_ptr, low_ptr, row, num_rows, num_blocks, goal, known, PASS, BITS, BLOCKS)
    if block == 0:
        tl.store(low_ptr + PASS * num_rows + row, low)
    top, total = _softmax_terms(max_ptr, sum_ptr, row, num_blocks, BLOCKS)
    j = tl.arange(0, TRIED)
    thresholds = low + (j << (30 - BITS * (PASS + 1)))
    acc = tl.zeros((TRIED, CHUNK), dtype=tl.float32)
    # a block without a token in the interval adds nothing to any sum that is still in question
    if _bits(_probability(tl.load(max_ptr + row * num_blocks + block), top, total)) >= low:
        temperature = tl.load(temperature_ptr + request)
        for start in tl.static_range(0, BLOCK, CHUNK):  # unrolled, so that all loads are under way at once
            tokens = block * BLOCK + start + tl.arange(0, CHUNK)
            p = _probability(_scaled(logits_ptr, stride, temperature, row, tokens, V), top, total)
            counted = (_bits(p)[None, :] >= thresholds[:, None]) & (tokens < V)[None, :]
            acc += tl.where(counted, p[None, :] if MASS else 1.0, 0.0)
    tried = tried_ptr + ((PASS % 2 * num_rows + row) * num_blocks + block) * TRIED
    tl.store(tried + j, tl.sum(acc, axis=1))


@triton.jit
def tally_kernel(
    logits_ptr, greedy_ptr, temperature_ptr, max_ptr, sum_ptr, tried_ptr, low_ptr,
    k_threshold_ptr, k_count_ptr, k_mass_ptr, top_k_ptr, top_p_ptr,
    threshold_ptr, count_ptr, mass_ptr, ties_ptr, stride, V, width,
    PASSES: tl.constexpr, BITS: tl.constexpr, MASS: tl.constexpr, HAS_TOP_K: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The threshold (-1: the request has none); per block, number and probability of the tokens above it, and how many
    lie at it. Grid: (blocks, rows)."""
    block, num_blocks = tl.program_id(0), tl.num_programs(0)
    row, num_rows = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    request = row // width
    wait_for_inputs()
    release_dependents()
    if not _active(greedy_ptr, top_k_ptr, top_p_ptr, request, V, MASS):
        if block == 0:
            tl.store(threshold_ptr + row, _NO_THRESHOLD)
        return
    goal, known = _goal(
        k_threshold_ptr, k_count_ptr, k_mass_ptr, top_k_ptr, top_p_ptr, row, request, num_blocks,
        MASS, HAS_TOP_K, BLOCKS,
    )  # fmt: skip
    threshold = _narrow(tried_ptr, low_ptr, row, num_rows, num_blocks, goal, known, PASSES, BITS, BLOCKS)
    if block == 0:
        tl.store(threshold_ptr + row, threshold)
    top, total = _softmax_terms(max_ptr, sum_ptr, row, num_blocks, BLOCKS)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    p = _probability(_scaled(logits_ptr, stride, tl.load(temperature_ptr + request), row, tokens, V), top, total)
    above = (_bits(p) > threshold) & (tokens < V)
    at = row * num_blocks + block
    tl.store(count_ptr + at, tl.sum(above.to(tl.float32), axis=0))
    tl.store(mass_ptr + at, tl.sum(tl.where(above, p, 0.0), axis=0))
    tl.store(ties_ptr + at, tl.sum(((_bits(p) == threshold) & (tokens < V)).to(tl.int32), axis=0))


@triton.jit
def _stays(
    bits, in_row, block, threshold, ties_ptr, row, num_blocks, BLOCKS: tl.constexpr
):  # fmt: skip
    """Which tokens lie above ``threshold``, which at it, and how many of a row lie at it before each."""
    b = tl.arange(0, BLOCKS)
    before = tl.sum(tl.load(ties_ptr + row * num_blocks + b, mask=b < block, other=0), axis=0)
    tie = (bits == threshold) & in_row
    return bits > threshold, tie, before + tl.cumsum(tie.to(tl.int32), axis=0) - tie.to(tl.int32)


@triton.jit
def race_kernel(
    logits_ptr, greedy_ptr, temperature_ptr, seed_ptr, position_ptr, max_ptr, sum_ptr,
    top_k_ptr, k_threshold_ptr, k_count_ptr, k_mass_ptr, k_ties_ptr,
    top_p_ptr, p_threshold_ptr, p_mass_ptr, p_ties_ptr, min_p_ptr, race_ptr, winner_ptr, stride, V, width,
    HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr, HAS_MIN_P: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Greatest p / noise among a block's tokens that pass the filters, and its lowest token. Grid: (blocks, rows)."""
    block, num_blocks = tl.program_id(0), tl.num_programs(0)
    row = tl.program_id(1).to(tl.int64)
    request = row // width
    wait_for_inputs()
    if tl.load(greedy_ptr + request) != 0:
        return
    top, total = _softmax_terms(max_ptr, sum_ptr, row, num_blocks, BLOCKS)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    p = _probability(_scaled(logits_ptr, stride, tl.load(temperature_ptr + request), row, tokens, V), top, total)
    kept = tokens < V
    k_threshold, kept_mass = -1, 1.0
    if HAS_TOP_K:
        k_threshold, at_threshold, kept_mass = _kept_by_top_k(
            k_threshold_ptr, k_count_ptr, k_mass_ptr, top_k_ptr, row, request, num_blocks, BLOCKS
        )
        if k_threshold >= 0:
            above, tie, rank = _stays(_bits(p), tokens < V, block, k_threshold, k_ties_ptr, row, num_blocks, BLOCKS)
            kept = kept & (above | (tie & (rank < at_threshold)))
    if HAS_TOP_P:
        p_threshold = tl.load(p_threshold_ptr + row)
        if p_threshold >= 0:
            above, tie, rank = _stays(_bits(p), tokens < V, block, p_threshold, p_ties_ptr, row, num_blocks, BLOCKS)
            before = _row_sum(p_mass_ptr, row, num_blocks, BLOCKS) + rank.to(tl.float32) * p
            # the first at the threshold always stays: it is the one that reaches the goal
            kept = kept & (above | (tie & ((rank == 0) | (before < tl.load(top_p_ptr + request) * kept_mass))))
    if HAS_MIN_P:
        kept = kept & (p >= _probability(top, top, total) * tl.load(min_p_ptr + request))
    noise = exponential_noise(tl.load(seed_ptr + request), tl.load(position_ptr + row), tokens)
    race = tl.where(kept, p / noise, -1.0)
    best = tl.max(race, axis=0)
    release_dependents()
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
    by_logit = (b < num_blocks) & greedy
    by_race = (b < num_blocks) & (greedy == 0)
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


class _Rows:
    """The rows of one call: what every kernel gets, and scratch per block of tokens."""

    def __init__(self, logits, greedy, temperatures, width):
        self.num_rows, self.vocab = logits.shape
        self.device = logits.device
        self.blocks = cdiv(self.vocab, BLOCK)
        self.padded_blocks = next_power_of_2(self.blocks)
        self.grid = (self.blocks, self.num_rows)
        self.inputs = (logits, greedy, temperatures)
        self.shape = (logits.stride(0), self.vocab, width)

    def per_block(self, dtype):
        return torch.empty((self.num_rows, self.blocks), dtype=dtype, device=self.device)


def _threshold(rows, softmax, top_ks, top_ps, by_top_k):
    """Top-p's threshold, or top-k's where ``top_ps`` is None -> threshold [R], and per block: count and probability
    above, number of tokens at it. ``by_top_k``: what this function gave for top-k, where top-p comes after it."""
    thresholds = torch.empty(rows.num_rows, dtype=torch.int32, device=rows.device)
    result = (thresholds, rows.per_block(torch.float32), rows.per_block(torch.float32), rows.per_block(torch.int32))
    tried = torch.empty((2, rows.num_rows, rows.blocks, 1 << BITS), dtype=torch.float32, device=rows.device)
    low = torch.empty((PASSES, rows.num_rows), dtype=torch.int32, device=rows.device)
    mass = top_ps is not None
    controls = (*(by_top_k or result)[:3], top_ps if top_ks is None else top_ks, top_ps if mass else top_ks)
    which = {"MASS": mass, "HAS_TOP_K": by_top_k is not None, "BITS": BITS, "BLOCK": BLOCK}
    for index in range(PASSES):
        search_kernel[rows.grid](
            *rows.inputs, *softmax, tried, low, *controls, *rows.shape,
            PASS=index, CHUNK=CHUNK, BLOCKS=rows.padded_blocks, **which, **options(8),
        )  # fmt: skip
    tally_kernel[rows.grid](
        *rows.inputs, *softmax, tried, low, *controls, *result, *rows.shape,
        PASSES=PASSES, BLOCKS=rows.padded_blocks, **which, **options(4),
    )  # fmt: skip
    return result


def choose_tokens(logits, greedy, temperatures, seeds, positions, top_ks, top_ps, min_ps):
    """``logits`` [R, V]; ``positions`` [R]; the rest [B], R a multiple of B; filters may be None -> [R] int64."""
    _check(logits, positions, (greedy, temperatures, seeds, top_ks, top_ps, min_ps))
    width = logits.shape[0] // greedy.shape[0]
    rows = _Rows(logits, greedy, temperatures, width)
    softmax = tops, _ = rows.per_block(torch.float32), rows.per_block(torch.float32)
    bests, winners, race = rows.per_block(torch.int32), rows.per_block(torch.int32), rows.per_block(torch.float32)
    statistics_kernel[rows.grid](*rows.inputs, *softmax, bests, *rows.shape, BLOCK=BLOCK, **options(4))
    by_top_k = None if top_ks is None else _threshold(rows, softmax, top_ks, None, None)
    by_top_p = None if top_ps is None else _threshold(rows, softmax, top_ks, top_ps, by_top_k)
    unused = (race,) * 4
    p_threshold, _, p_mass, p_ties = by_top_p or unused
    race_kernel[rows.grid](
        *rows.inputs, seeds, positions, *softmax,
        seeds if top_ks is None else top_ks, *(by_top_k or unused),
        race if top_ps is None else top_ps, p_threshold, p_mass, p_ties,
        race if min_ps is None else min_ps, race, winners, *rows.shape,
        HAS_TOP_K=top_ks is not None, HAS_TOP_P=top_ps is not None, HAS_MIN_P=min_ps is not None,
        BLOCK=BLOCK, BLOCKS=rows.padded_blocks, **options(4),
    )  # fmt: skip
    tokens = torch.empty(rows.num_rows, dtype=torch.int64, device=rows.device)
    winner_kernel[(rows.num_rows,)](
        greedy, tops, bests, race, winners, tokens, rows.blocks, width, BLOCKS=rows.padded_blocks, **options(1)
    )
    return tokens


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
