"""Paged attention of prompts: tiles of consecutive query rows, each walking over all its keys.

Blocks of keys lie at absolute positions, so a row's result does not depend on how its prompt was cut into chunks nor on
the requests beside it. Names as in ``paged_attention``.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sgl_kernel.triton_kernels.attention_core import check_layout, fold_keys
from sgl_kernel.triton_kernels.common import (
    cdiv,
    dot_precision,
    next_power_of_2,
    options,
    release_dependents,
    wait_for_inputs,
)


@dataclass(frozen=True, slots=True)
class ExtendConfig:
    """Tile sizes and launch options. ``value_parts``: programs that share a tile's output columns."""

    block_m: int
    block_n: int
    value_parts: int
    num_warps: int
    num_stages: int


def extend_config(kind):
    """For one kind of layer."""
    width = kind.head_dim
    if kind.dtype.itemsize == 4:
        return ExtendConfig(16, 32 if width <= 128 else 16, 1, 4, 1)
    if width == 512:  # half of the output columns: two programs compute the scores of a tile
        return ExtendConfig(128, 32, 2, 8, 3)
    return ExtendConfig(128, 32, 1, 8, 5)


@triton.jit
def extend_kernel(
    q_ptr, key_ptr, value_ptr, table_ptr, req_rows_ptr, kv_lens_ptr, positions_ptr, tiles_ptr, out_ptr,
    q_stride, table_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    VALUE_PARTS: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile, one KV head: the query heads of the group times consecutive rows of one request."""
    wait_for_inputs()
    D_OUT: tl.constexpr = D // VALUE_PARTS
    tile = tiles_ptr + 3 * (tl.program_id(0) // (KV_HEADS * VALUE_PARTS))
    kv_head = tl.program_id(0) // VALUE_PARTS % KV_HEADS
    part = tl.program_id(0) % VALUE_PARTS
    request = tl.load(tile)
    first = tl.load(tile + 1)
    number = tl.load(tile + 2)
    width = tl.arange(0, D)
    lane = tl.arange(0, BLOCK_M)
    ok = lane < number * GROUP
    token, head = first + lane // GROUP, kv_head * GROUP + lane % GROUP
    q_pos = tl.load(positions_ptr + token, mask=ok, other=-1).to(tl.int32)
    q = tl.load(
        q_ptr + (token.to(tl.int64) * q_stride + head * D)[:, None] + width[None, :], mask=ok[:, None], other=0.0
    )
    start = 0
    if WINDOW > 0:
        lowest = tl.load(positions_ptr + first).to(tl.int32) - WINDOW + 1
        start = tl.maximum(lowest, 0) // BLOCK_N * BLOCK_N
    # a tile without rows, of which a plan on the device has some, sees no key
    last = tl.load(positions_ptr + first + number - 1, mask=number > 0, other=-1).to(tl.int32)
    end = tl.minimum(tl.load(kv_lens_ptr + request).to(tl.int32), last + 1)
    slots_ptr = table_ptr + tl.load(req_rows_ptr + request) * table_stride
    _, total, acc = fold_keys(
        q, q_pos, ok, slots_ptr, key_ptr + kv_head * D, value_ptr + kv_head * D + part * D_OUT, start, end,
        slots_ptr, 0, KV_HEADS * D, D, D_OUT, BLOCK_M, BLOCK_N, WINDOW, False, PRECISION,
    )  # fmt: skip
    release_dependents()
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    at = (token.to(tl.int64) * (KV_HEADS * GROUP) + head) * D + part * D_OUT
    tl.store(out_ptr + at[:, None] + tl.arange(0, D_OUT)[None, :], out.to(out_ptr.dtype.element_ty), mask=ok[:, None])


@triton.jit
def tiles_kernel(row_ends_ptr, tiles_ptr, batch, step, BLOCK_B: tl.constexpr):
    """Program j lists the j-th tile of every request that has so many. Late tiles, with most keys, come first."""
    wait_for_inputs()
    index = tl.program_id(0)
    b = tl.arange(0, BLOCK_B)
    real = b < batch
    end = tl.load(row_ends_ptr + b, mask=real, other=0).to(tl.int32)
    start = tl.load(row_ends_ptr + b - 1, mask=real & (b > 0), other=0).to(tl.int32)
    number = tl.where(real, (end - start + step - 1) // step, 0)
    has = number > index
    at = tl.sum(tl.maximum(number - index - 1, 0)) + tl.cumsum(has.to(tl.int32)) - 1
    first = start + index * step
    tile = tiles_ptr + 3 * at
    tl.store(tile, b, mask=has)
    tl.store(tile + 1, first, mask=has)
    tl.store(tile + 2, tl.minimum(step, end - first), mask=has)


@dataclass(frozen=True, slots=True)
class ExtendWork:
    """tiles: [num_tiles, 3] int32 (request, first row of the batch, number of rows), those with most keys first. One
    made on the device is as large as it may have to be: unused tiles are the last, and have no rows."""

    config: ExtendConfig
    tiles: torch.Tensor


def plan_extend(rows, kind):
    """Cut every request's rows into tiles that share a KV head's queries."""
    config = extend_config(kind)
    step = config.block_m // (kind.num_heads // kind.num_kv_heads)
    if rows.row_ends is not None:
        return ExtendWork(config, _tiles_on_device(rows.row_ends, rows.positions.shape[0], step))
    tiles, first = [], 0
    for request, q_len in enumerate(rows.q_lens):
        tiles += [(offset, request, first + offset, min(step, q_len - offset)) for offset in range(0, q_len, step)]
        first += q_len
    tiles.sort(key=lambda tile: -tile[0])
    table = torch.tensor([tile[1:] for tile in tiles], dtype=torch.int32)
    return ExtendWork(config, table.to(rows.positions.device))


def _tiles_on_device(row_ends, num_rows, step):
    """As above, from lengths that are not read back."""
    batch = row_ends.shape[0]
    tiles = torch.zeros((num_rows // step + batch, 3), dtype=torch.int32, device=row_ends.device)
    tiles_kernel[(cdiv(num_rows, step),)](row_ends, tiles, batch, step, BLOCK_B=next_power_of_2(batch), **options(1))
    return tiles


def attend_extend(q, key, value, rows, kind, work):
    """``q`` [T, H, D], the rows of each request consecutive -> [T, H, D], contiguous."""
    check_layout(q, key, value, kind)
    planned = sum(rows.q_lens) if rows.row_ends is None else rows.positions.shape[0]
    if q.shape[0] != planned:
        raise ValueError(f"q has {q.shape[0]} rows, but {planned} were planned")
    config = work.config
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    extend_kernel[(work.tiles.shape[0] * kind.num_kv_heads * config.value_parts,)](
        q, key, value, rows.req_to_token, rows.req_rows, rows.kv_lens, rows.positions, work.tiles, out,
        q.stride(0), rows.req_to_token.stride(0),
        KV_HEADS=kind.num_kv_heads, GROUP=kind.num_heads // kind.num_kv_heads, D=kind.head_dim,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, VALUE_PARTS=config.value_parts, WINDOW=kind.window or 0,
        PRECISION=dot_precision(q.dtype),
        **options(config.num_warps, config.num_stages),
    )  # fmt: skip
    return out
