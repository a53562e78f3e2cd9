"""Paged attention of a few query rows per request (decode, verify, draft), keys split over programs.

A request's keys are cut into chunks at absolute positions, so a row's result depends neither on the rows beside it, nor
on the batch, nor on how many keys follow. A work item is (request, chunk, KV head, tile of query rows); all query heads
of a KV head and all rows of a request share tiles. The number of programs is fixed: they deal the items of a list among
themselves that one small kernel makes per forward and kind of layer, from lengths that only the device knows. Partial
results go to scratch memory and are merged by a second kernel, in order of position.

Names: B requests, N rows each, H query heads, KH KV heads, G = H / KH, D head width, C chunks of the longest request.
"""

from dataclasses import dataclass
from functools import cache
from importlib import import_module

import torch
import triton
import triton.language as tl

from sgl_kernel.triton_kernels.attention_core import check_layout, exponent_base, fold_keys
from sgl_kernel.triton_kernels.common import (
    cdiv,
    dot_precision,
    next_power_of_2,
    options,
    prefetch_l2,
    release_dependents,
    wait_for_inputs,
)

# chunks of full layers: this many positions in narrow chunks, then up to the next bound 4, then 8, then 16 times wider
BOUND_1, BOUND_2, BOUND_3 = tl.constexpr(2048), tl.constexpr(8192), tl.constexpr(32768)
MERGED_AT_ONCE = tl.constexpr(16)
ITEM_FIELDS = tl.constexpr(8)  # five are used; an item lies in one sector of memory


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Tile sizes and launch options: functions of the kind of layer, since a row's sums may not depend on N or B.

    ``value_parts``: programs that share a tile's output columns; each computes all of its scores. ``wide``: the kernel
    of ``attention_wide`` takes such tiles whole where the device has what it needs.
    """

    chunk: int
    block_m: int
    block_n: int
    value_parts: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    wide: bool = False


def decode_config(kind):
    """For one kind of layer, as measured on an H200. Narrow chunks give few KV heads enough programs and short contexts
    a short way; wide ones save partial results."""
    group, width, kv_heads = kind.num_heads // kind.num_kv_heads, kind.head_dim, kind.num_kv_heads
    if kind.dtype.itemsize == 4:
        return DecodeConfig(64 if kv_heads <= 8 else 128, 16, 32 if width <= 128 else 16, 1, 4, 1, 2)
    # slots are read a stage before keys and values, so five stages are the least with a tile on its way during another
    if width < 512:
        if kv_heads < 8:
            return DecodeConfig(64, 16, 64, 1, 4, 3, 2)
        return DecodeConfig(128, 16, 64 if kv_heads == 8 else 32, 1, 4, 5, 2)
    if group <= 4:  # 16 rows hold several tokens
        return DecodeConfig(64, 16, 32, 1, 4, 5, 1)
    if group <= 8 and kv_heads <= 2:
        return DecodeConfig(64, 32, 32, 1, 4, 5, 1)
    # 64 rows need four warps: eight would repeat each other's scores. 512 columns of sums are too many for their
    # registers, so two programs take half of them each
    return DecodeConfig(64 if kv_heads <= 2 else 128, 64, 32, 2, 4, 5, 1, wide=True)


@triton.jit
def chunk_start(index, width):
    """First position of a full layer's chunk. Widths depend on the position alone; plain arithmetic, for both sides."""
    second = index - BOUND_1 // width
    third = second - (BOUND_2 - BOUND_1) // (4 * width)
    fourth = third - (BOUND_3 - BOUND_2) // (8 * width)
    return width * (index + 3 * second * (second > 0) + 4 * third * (third > 0) + 8 * fourth * (fourth > 0))


@triton.jit
def num_chunks(length, width):
    """How many of those chunks the first ``length`` positions touch."""
    second, third, fourth = length - BOUND_1, length - BOUND_2, length - BOUND_3
    first = length - second * (second > 0)
    second = second * (second > 0) - third * (third > 0)
    third = third * (third > 0) - fourth * (fourth > 0)
    fourth = fourth * (fourth > 0)
    chunks = (first + width - 1) // width + (second + 4 * width - 1) // (4 * width)
    return chunks + (third + 8 * width - 1) // (8 * width) + (fourth + 16 * width - 1) // (16 * width)


@triton.jit
def plan_kernel(
    req_rows_ptr, kv_lens_ptr, positions_ptr, items_ptr, count_ptr, spans_ptr, batch, num_rows,
    BLOCK_B: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Program j lists the j-th chunk of every request that has so many. Late chunks, the widest, come first."""
    wait_for_inputs()
    index = tl.program_id(0)
    b = tl.arange(0, BLOCK_B)
    real = b < batch
    first_pos = tl.load(positions_ptr + b * num_rows, mask=real, other=0).to(tl.int32)
    kv_len = tl.load(kv_lens_ptr + b, mask=real, other=0).to(tl.int32)
    end = tl.minimum(kv_len, first_pos + num_rows)
    if WINDOW > 0:
        low = tl.maximum(first_pos - WINDOW + 1, 0)
        first = low // CHUNK
        number = tl.maximum((end + CHUNK - 1) // CHUNK - first, 0)
    else:
        low = tl.zeros_like(end)
        first = low
        number = num_chunks(end, CHUNK)
    number = tl.where(real, number, 0)
    if index == 0:
        tl.store(count_ptr, tl.sum(number))
        tl.store(spans_ptr + 2 * b, first, mask=real)
        tl.store(spans_ptr + 2 * b + 1, number, mask=real)
    has = number > index
    at = tl.sum(tl.maximum(number - index - 1, 0)) + tl.cumsum(has.to(tl.int32)) - 1
    chunk = first + index
    if WINDOW > 0:
        start = tl.maximum(chunk * CHUNK, low // BLOCK_N * BLOCK_N)
        end = tl.minimum(chunk * CHUNK + CHUNK, end)
    else:
        start = chunk_start(chunk, CHUNK)
        end = tl.minimum(chunk_start(chunk + 1, CHUNK), end)
    item = items_ptr + at * ITEM_FIELDS
    tl.store(item, b, mask=has)
    tl.store(item + 1, tl.zeros_like(at) + index, mask=has)
    tl.store(item + 2, start, mask=has)
    tl.store(item + 3, end, mask=has)
    tl.store(item + 4, tl.load(req_rows_ptr + b, mask=real, other=0).to(tl.int32), mask=has)


# N and C are no constants of the compiled kernels: decode and verify run the same instructions
@triton.jit(do_not_specialize=["num_rows", "chunks"])
def split_kernel(
    q_ptr, key_ptr, value_ptr, table_ptr, positions_ptr, kv_lens_ptr, tree_ptr, items_ptr, count_ptr, acc_ptr,
    stats_ptr, q_stride, table_stride, chunks, num_rows,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    VALUE_PARTS: tl.constexpr, WINDOW: tl.constexpr, HAS_TREE: tl.constexpr, PRECISION: tl.constexpr,
    PLANNED_JUST_NOW: tl.constexpr,
):  # fmt: skip
    """Partial results [B, C, N, H] of the items: output [.., D], (maximum, sum) [.., 2]. Any one-dimensional grid."""
    if PLANNED_JUST_NOW:  # the items themselves may still be on their way
        wait_for_inputs()
    tiles = tl.cdiv(num_rows * GROUP, BLOCK_M)
    per_chunk = tiles * KV_HEADS * VALUE_PARTS
    D_OUT: tl.constexpr = D // VALUE_PARTS
    width, out_width = tl.arange(0, D), tl.arange(0, D_OUT)
    LINE: tl.constexpr = 128 // (q_ptr.dtype.element_ty.primitive_bitwidth // 8)  # elements of a line of the cache
    LINES: tl.constexpr = max(VALUE_PARTS, D // LINE)
    # reading the first item together with the count, not after it, brings it near; a request's number is never negative
    near = tl.load(items_ptr + tl.program_id(0) // per_chunk * ITEM_FIELDS)
    num_work = tl.maximum(tl.load(count_ptr), tl.minimum(near, 0)) * per_chunk
    for work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        item = items_ptr + work // per_chunk * ITEM_FIELDS
        request = tl.load(item)
        index = tl.load(item + 1)
        start = tl.load(item + 2)
        end = tl.load(item + 3)
        req_row = tl.load(item + 4)
        part = work % VALUE_PARTS
        kv_head = work // (tiles * VALUE_PARTS) % KV_HEADS
        row = work // VALUE_PARTS % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
        ok = row < num_rows * GROUP
        row, head = row // GROUP, kv_head * GROUP + row % GROUP
        token = request * num_rows + row
        q_pos = tl.load(positions_ptr + token, mask=ok, other=-1).to(tl.int32)
        slots_ptr = table_ptr + req_row.to(tl.int64) * table_stride
        keys, values = key_ptr + kv_head * D, value_ptr + kv_head * D + part * D_OUT
        # queries and the newest keys are still being written; the others can already be on their way to the L2 cache
        pos = tl.minimum(start + tl.arange(0, BLOCK_N), end - 1)
        slots = tl.load(slots_ptr + pos).to(tl.int64)[:, None] * (KV_HEADS * D)
        prefetch_l2(keys + (slots + (tl.arange(0, LINES) * LINE)[None, :]))
        prefetch_l2(values + (slots + (tl.arange(0, LINES // VALUE_PARTS) * LINE)[None, :]))
        wait_for_inputs()
        release_dependents()
        q_at = token.to(tl.int64) * q_stride + head * D
        q = tl.load(q_ptr + q_at[:, None] + width[None, :], mask=ok[:, None], other=0.0)
        tree_row, first_draft = tree_ptr, 0
        if HAS_TREE:
            tree_row = tree_ptr + token * num_rows
            first_draft = tl.load(kv_lens_ptr + request).to(tl.int32) - num_rows
        top, total, acc = fold_keys(
            q, q_pos, ok, slots_ptr, keys, values, start, end, tree_row, first_draft,
            KV_HEADS * D, D, D_OUT, BLOCK_M, BLOCK_N, WINDOW, HAS_TREE, PRECISION,
        )  # fmt: skip
        at = ((request * chunks + index).to(tl.int64) * num_rows + row) * (KV_HEADS * GROUP) + head
        if part == 0:
            tl.store(stats_ptr + 2 * at, top, mask=ok)
            tl.store(stats_ptr + 2 * at + 1, total, mask=ok)
        tl.store(acc_ptr + (at * D + part * D_OUT)[:, None] + out_width[None, :], acc, mask=ok[:, None])


@triton.jit(do_not_specialize=["num_rows", "chunks"])
def merge_kernel(
    acc_ptr, stats_ptr, spans_ptr, out_ptr, chunks, num_rows,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Output of one query row and head, BLOCK_D columns. Chunks are summed in groups at absolute chunk numbers."""
    row = tl.program_id(0)
    width = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    request = row // (num_rows * HEADS)
    first = tl.load(spans_ptr + 2 * request)
    end = first + tl.load(spans_ptr + 2 * request + 1)
    top = float("-inf")
    total = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    wait_for_inputs()
    release_dependents()
    for group in range(first // MERGED_AT_ONCE * MERGED_AT_ONCE, end, MERGED_AT_ONCE):
        chunk = group + tl.arange(0, MERGED_AT_ONCE)
        there = (chunk >= first) & (chunk < end)
        at = (request * chunks + chunk - first).to(tl.int64) * (num_rows * HEADS) + row % (num_rows * HEADS)
        part_top = tl.load(stats_ptr + 2 * at, mask=there, other=float("-inf"))
        part_total = tl.load(stats_ptr + 2 * at + 1, mask=there, other=0.0)
        part = tl.load(acc_ptr + at[:, None] * D + width[None, :], mask=there[:, None], other=0.0)
        new_top = tl.maximum(top, tl.max(part_top, 0))
        base = exponent_base(new_top)
        keep = tl.exp2(top - base)
        weight = tl.exp2(part_top - base)
        total = total * keep + tl.sum(part_total * weight, 0)
        acc = acc * keep + tl.sum(part * weight[:, None], 0)
        top = new_top
    # a row that sees no key at all gets zeros
    out = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row.to(tl.int64) * D + width, out.to(out_ptr.dtype.element_ty))


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """The items of one forward for one kind of layer, and scratch that its layers use one after the other.

    items: [B * C, 8] int32 (request, number among its chunks, first position, end position, row of req_to_token), of
    which ``count`` [1] int32 are valid; spans: [B, 2] int32, first chunk and how many; acc: [B, C, N, H, D] and stats:
    [B, C, N, H, 2] float32.
    """

    config: DecodeConfig
    items: torch.Tensor
    count: torch.Tensor
    spans: torch.Tensor
    acc: torch.Tensor
    stats: torch.Tensor


def max_chunks(kind, num_rows, max_kv_len):
    """C: the most chunks that rows of one request can touch."""
    width = decode_config(kind).chunk
    if kind.window is None:
        return int(num_chunks.fn(max_kv_len, width))
    # a span of this many positions at the worst offset, and no more than there are
    return min((kind.window + num_rows - 2) // width + 2, cdiv(max_kv_len, width))


def plan_decode(rows, kind):
    """``rows`` with N rows for each request -> DecodeWork. Reads nothing back from the device."""
    batch, num_rows = len(rows.q_lens), rows.q_lens[0]
    config, device = decode_config(kind), rows.positions.device
    chunks = max(1, max_chunks(kind, num_rows, rows.max_kv_len))
    shape = (batch, chunks, num_rows, kind.num_heads)
    work = DecodeWork(
        config,
        torch.empty((batch * chunks, ITEM_FIELDS.value), dtype=torch.int32, device=device),
        torch.empty(1, dtype=torch.int32, device=device),
        torch.empty((batch, 2), dtype=torch.int32, device=device),
        torch.empty((*shape, kind.head_dim), dtype=torch.float32, device=device),
        torch.empty((*shape, 2), dtype=torch.float32, device=device),
    )
    plan_kernel[(chunks,)](
        rows.req_rows, rows.kv_lens, rows.positions, work.items, work.count, work.spans, batch, num_rows,
        BLOCK_B=next_power_of_2(batch), CHUNK=config.chunk, BLOCK_N=config.block_n, WINDOW=kind.window or 0,
        **options(4),
    )  # fmt: skip
    return work


def attend_decode(q, key, value, rows, kind, work, *, planned_just_now):
    """``q`` [B * N, H, D] -> [B * N, H, D], contiguous. ``planned_just_now``: ``work`` is used for the first time."""
    check_layout(q, key, value, kind)
    config = work.config
    batch, chunks, num_rows, heads, width = work.acc.shape
    if q.shape[0] != batch * num_rows:
        raise ValueError(f"q has {q.shape[0]} rows, but {batch} requests of {num_rows} rows were planned")
    group = heads // kind.num_kv_heads
    tiles = cdiv(num_rows * group, config.block_m)
    wide = _wide_kernel(q.device) if config.wide else None
    value_parts = config.value_parts if wide is None else 1
    items = batch * chunks * kind.num_kv_heads * tiles * value_parts
    programs = min(items, _num_sms(q.device) * config.programs_per_sm)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    tree = None if rows.tree_mask is None else rows.tree_mask.view(torch.uint8)
    tensors = (
        q, key, value, rows.req_to_token, rows.positions, rows.kv_lens, tree, work.items, work.count, work.acc,
        work.stats, q.stride(0), rows.req_to_token.stride(0), chunks, num_rows,
    )  # fmt: skip
    shape = {"KV_HEADS": kind.num_kv_heads, "GROUP": group, "D": width, "WINDOW": kind.window or 0}
    shape |= {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "HAS_TREE": tree is not None}
    if wide is not None:
        wide.wide_split_kernel[(programs,)](*tensors, **shape, **options(wide.NUM_WARPS))
    else:
        split_kernel[(programs,)](
            *tensors, **shape, VALUE_PARTS=value_parts, PRECISION=dot_precision(q.dtype),
            PLANNED_JUST_NOW=planned_just_now, **options(config.num_warps, config.num_stages),
        )  # fmt: skip
    block_d = min(width, 256)
    merge_kernel[(batch * num_rows * heads, width // block_d)](
        work.acc, work.stats, work.spans, out, chunks, num_rows, HEADS=heads, D=width, BLOCK_D=block_d, **options(4)
    )
    return out


@cache
def _num_sms(device):
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 2  # the interpreter: few programs, so that each walks through several items


@cache
def _wide_kernel(device):
    """The module of a kernel for Hopper alone; None for other devices, and where Triton is older than Gluon."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return None
    try:
        return import_module("sgl_kernel.triton_kernels.attention_wide")
    except ImportError:
        return None
