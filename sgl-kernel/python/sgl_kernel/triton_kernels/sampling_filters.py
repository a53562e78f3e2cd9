"""Top-k and top-p as thresholds on the probability, found without sorting.

The threshold is the greatest t whose tokens with p >= t are at least top_k many (top-k), or weigh at least top_p of
what top-k kept (top-p). Its bits are found five at a time: 32 candidates are tried in one pass over the row. Statistics
are kept per block of a row and added up in the order of blocks, so they depend on nothing beside the row.
"""

import torch
import triton
import triton.language as tl

from sgl_kernel.triton_kernels.common import cdiv, next_power_of_2, options, release_dependents, wait_for_inputs

BLOCK = 2048
CHUNK = 128
BITS = 5  # of the threshold, per pass
PASSES = 6  # a probability is at most 1.0, whose bits are 30
_NO_THRESHOLD = tl.constexpr(-1)  # below the bits of every probability


@triton.jit
def scaled_logits(logits_ptr, stride, temperature, row, tokens, V):
    logits = tl.load(logits_ptr + row * stride + tokens, mask=tokens < V, other=float("-inf")).to(tl.float32)
    return tl.div_rn(logits, temperature)


@triton.jit
def probability(x, top, total):
    """Of a scaled logit, given a row's greatest one and its sum of exponentials."""
    return tl.exp(x - top) / total


@triton.jit
def bits_of(p):
    """Bits of a probability: integers in the same order."""
    return p.to(tl.int32, bitcast=True)


@triton.jit
def row_sum(ptr, row, num_blocks, BLOCKS: tl.constexpr):
    """Sum of a per-block statistic over a row."""
    b = tl.arange(0, BLOCKS)
    return tl.sum(tl.load(ptr + row * num_blocks + b, mask=b < num_blocks, other=0.0), axis=0)


@triton.jit
def count_goal_kernel(
    max_ptr, top_ptr, total_ptr, top_k_ptr, goal_ptr, known_ptr, num_blocks, width, BLOCKS: tl.constexpr
):  # fmt: skip
    """Top-k's goal, and a threshold that is known to reach it: ``top_k`` blocks have a token at or above it.

    -1 where there are not so many blocks. One row per program.
    """
    row = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, BLOCKS)
    wait_for_inputs()
    release_dependents()
    tops = tl.load(max_ptr + row * num_blocks + b, mask=b < num_blocks, other=float("-inf"))
    bits = bits_of(probability(tops, tl.load(top_ptr + row), tl.load(total_ptr + row)))
    better = (bits[None, :] > bits[:, None]) | ((bits[None, :] == bits[:, None]) & (b[None, :] < b[:, None]))
    rank = tl.sum(better.to(tl.int32), axis=1)
    top_k = tl.load(top_k_ptr + row // width)
    tl.store(goal_ptr + row, top_k.to(tl.float32))
    tl.store(known_ptr + row, tl.max(tl.where((rank == top_k - 1) & (b < num_blocks), bits, -1), axis=0))


@triton.jit
def mass_goal_kernel(
    k_threshold_ptr, k_count_ptr, k_mass_ptr, top_k_ptr, top_p_ptr, goal_ptr, known_ptr, num_blocks, V, width,
    HAS_TOP_K: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Top-p's goal, and a threshold that is known to reach it. One row per program."""
    row = tl.program_id(0).to(tl.int64)
    request = row // width
    wait_for_inputs()
    release_dependents()
    top_p = tl.load(top_p_ptr + request)
    known = tl.full((), -1, dtype=tl.int32)
    kept = tl.full((), 1.0, dtype=tl.float32)
    if HAS_TOP_K:
        known = tl.load(k_threshold_ptr + row)
        if known >= 0:
            above = row_sum(k_count_ptr, row, num_blocks, BLOCKS)
            at_threshold = tl.load(top_k_ptr + request).to(tl.float32) - above
            kept = row_sum(k_mass_ptr, row, num_blocks, BLOCKS) + at_threshold * known.to(tl.float32, bitcast=True)
    # even the whole vocabulary at this probability weighs less than what may be missing
    enough = kept * (1.0 - top_p) * 0.999 / V
    tl.store(goal_ptr + row, top_p * kept)
    tl.store(known_ptr + row, tl.maximum(known, bits_of(enough)))


@triton.jit
def _active(greedy_ptr, control_ptr, request, V, MASS: tl.constexpr):
    """Whether this request is sampled and uses the filter."""
    control = tl.load(control_ptr + request)
    uses = control < 1.0 if MASS else control < V
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
    logits_ptr, greedy_ptr, temperature_ptr, max_ptr, top_ptr, total_ptr, tried_ptr, low_ptr,
    control_ptr, goal_ptr, known_ptr, stride, V, width,
    PASS: tl.constexpr, BITS: tl.constexpr, MASS: tl.constexpr,
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
    if not _active(greedy_ptr, control_ptr, request, V, MASS):
        return
    known = tl.load(known_ptr + row)
    low = tl.zeros((), dtype=tl.int32)
    if PASS > 0:
        goal = tl.load(goal_ptr + row)
        low = _narrow(tried_ptr, low_ptr, row, num_rows, num_blocks, goal, known, PASS, BITS, BLOCKS)
    if block == 0:
        tl.store(low_ptr + PASS * num_rows + row, low)
    top, total = tl.load(top_ptr + row), tl.load(total_ptr + row)
    j = tl.arange(0, TRIED)
    thresholds = low + (j << (30 - BITS * (PASS + 1)))
    acc = tl.zeros((TRIED, CHUNK), dtype=tl.float32)
    # a block without tokens from here on adds nothing to any sum that is still in question: most blocks, as a rule
    if bits_of(probability(tl.load(max_ptr + row * num_blocks + block), top, total)) >= tl.maximum(low, known):
        temperature = tl.load(temperature_ptr + request)
        for start in tl.static_range(0, BLOCK, CHUNK):  # unrolled, so that all loads are under way at once
            tokens = block * BLOCK + start + tl.arange(0, CHUNK)
            p = probability(scaled_logits(logits_ptr, stride, temperature, row, tokens, V), top, total)
            counted = (bits_of(p)[None, :] >= thresholds[:, None]) & (tokens < V)[None, :]
            acc += tl.where(counted, p[None, :] if MASS else 1.0, 0.0)
    tried = tried_ptr + ((PASS % 2 * num_rows + row) * num_blocks + block) * TRIED
    tl.store(tried + j, tl.sum(acc, axis=1))


@triton.jit
def tally_kernel(
    logits_ptr, greedy_ptr, temperature_ptr, top_ptr, total_ptr, tried_ptr, low_ptr,
    control_ptr, goal_ptr, known_ptr, threshold_ptr, count_ptr, mass_ptr, ties_ptr, stride, V, width,
    PASSES: tl.constexpr, BITS: tl.constexpr, MASS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The threshold (-1: the request has none); per block, number and probability of the tokens above it, and how many
    lie at it. Grid: (blocks, rows)."""
    block, num_blocks = tl.program_id(0), tl.num_programs(0)
    row, num_rows = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    request = row // width
    wait_for_inputs()
    release_dependents()
    if not _active(greedy_ptr, control_ptr, request, V, MASS):
        if block == 0:
            tl.store(threshold_ptr + row, _NO_THRESHOLD)
        return
    goal, known = tl.load(goal_ptr + row), tl.load(known_ptr + row)
    threshold = _narrow(tried_ptr, low_ptr, row, num_rows, num_blocks, goal, known, PASSES, BITS, BLOCKS)
    if block == 0:
        tl.store(threshold_ptr + row, threshold)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    x = scaled_logits(logits_ptr, stride, tl.load(temperature_ptr + request), row, tokens, V)
    p = probability(x, tl.load(top_ptr + row), tl.load(total_ptr + row))
    above = (bits_of(p) > threshold) & (tokens < V)
    at = row * num_blocks + block
    tl.store(count_ptr + at, tl.sum(above.to(tl.float32), axis=0))
    tl.store(mass_ptr + at, tl.sum(tl.where(above, p, 0.0), axis=0))
    tl.store(ties_ptr + at, tl.sum(((bits_of(p) == threshold) & (tokens < V)).to(tl.int32), axis=0))


class Rows:
    """The rows of one call: what every kernel gets, and scratch per block of tokens or per row."""

    def __init__(self, logits, greedy, temperatures):
        self.num_rows, self.vocab = logits.shape
        self.width = self.num_rows // greedy.shape[0]
        self.device = logits.device
        self.blocks = cdiv(self.vocab, BLOCK)
        self.padded_blocks = next_power_of_2(self.blocks)
        self.grid = (self.blocks, self.num_rows)
        self.inputs = (logits, greedy, temperatures)
        self.shape = (logits.stride(0), self.vocab, self.width)
        self.max = self.per_block(torch.float32)
        self.top, self.total = self.per_row(torch.float32), self.per_row(torch.float32)

    def per_block(self, dtype):
        return torch.empty((self.num_rows, self.blocks), dtype=dtype, device=self.device)

    def per_row(self, dtype):
        return torch.empty(self.num_rows, dtype=dtype, device=self.device)


class Threshold:
    """One filter's threshold per row, its goal, and per block what lies above the threshold and at it."""

    def __init__(self, rows):
        self.goal, self.known = rows.per_row(torch.float32), rows.per_row(torch.int32)
        self.threshold, self.ties = rows.per_row(torch.int32), rows.per_block(torch.int32)
        self.count, self.mass = rows.per_block(torch.float32), rows.per_block(torch.float32)


def top_k_threshold(rows, top_ks):
    """``rows`` with their statistics, ``top_ks`` [B]."""
    found = Threshold(rows)
    count_goal_kernel[(rows.num_rows,)](
        rows.max, rows.top, rows.total, top_ks, found.goal, found.known, rows.blocks, rows.width,
        BLOCKS=rows.padded_blocks, **options(8),
    )  # fmt: skip
    _search(rows, found, top_ks, mass=False)
    return found


def top_p_threshold(rows, top_ps, top_ks, by_top_k):
    """``by_top_k``: what ``top_k_threshold`` gave for ``top_ks``, or None twice."""
    found = Threshold(rows)
    before = found if by_top_k is None else by_top_k
    mass_goal_kernel[(rows.num_rows,)](
        before.threshold, before.count, before.mass, top_ps if top_ks is None else top_ks, top_ps,
        found.goal, found.known, rows.blocks, rows.vocab, rows.width,
        HAS_TOP_K=by_top_k is not None, BLOCKS=rows.padded_blocks, **options(1),
    )  # fmt: skip
    _search(rows, found, top_ps, mass=True)
    return found


def _search(rows, found, control, *, mass):
    tried = torch.empty((2, rows.num_rows, rows.blocks, 1 << BITS), dtype=torch.float32, device=rows.device)
    low = torch.empty((PASSES, rows.num_rows), dtype=torch.int32, device=rows.device)
    state = (rows.top, rows.total, tried, low, control, found.goal, found.known)
    for index in range(PASSES):
        search_kernel[rows.grid](
            *rows.inputs, rows.max, *state, *rows.shape,
            PASS=index, BITS=BITS, MASS=mass, BLOCK=BLOCK, CHUNK=CHUNK, BLOCKS=rows.padded_blocks, **options(8),
        )  # fmt: skip
    tally_kernel[rows.grid](
        *rows.inputs, *state, found.threshold, found.count, found.mass, found.ties, *rows.shape,
        PASSES=PASSES, BITS=BITS, MASS=mass, BLOCK=BLOCK, BLOCKS=rows.padded_blocks, **options(4),
    )  # fmt: skip
