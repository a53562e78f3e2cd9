"""The split kernel of ``paged_attention`` for 512 columns and 64 query rows, in Gluon, for Hopper.

Such a tile fills shared memory and registers so far that Triton's own pipeline has no room: it would copy the next
keys only when it is done with these. Here the order is given by hand: while the weights of 32 keys are computed, the
matrix unit is at the scores of the next ones, and three more tiles of keys and values are on their way. Eight warps
share the output's columns; every four of them compute all scores, so that weights need not be exchanged.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sgl_kernel.triton_kernels.attention_core import LOG2_E
from sgl_kernel.triton_kernels.paged_attention import ITEM_FIELDS

COPY = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0]))
TILE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
# eight warps: four times 16 rows, twice for the scores, and half of the columns each for the sums
SCORES = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 32, 16]))
SUMS = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 256, 16]))
NUM_WARPS = 8


@gluon.jit
def copy_rows(buffer, base_ptr, slots, STRIDE: gl.constexpr, D: gl.constexpr, wanted):
    """Start to copy the rows of ``slots`` if they are wanted, as a group of their own: waits count groups."""
    if wanted:
        cols = gl.arange(0, D, gl.SliceLayout(0, COPY))
        async_copy.async_copy_global_to_shared(
            buffer, base_ptr + (slots.to(gl.int64) * STRIDE)[:, None] + cols[None, :]
        )
    async_copy.commit_group()


@gluon.jit
def wait_for_copies(LATER: gl.constexpr):
    """Until all threads have all copies but the ``LATER`` last groups, and the matrix unit may read them."""
    async_copy.wait_group(LATER)
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def start_scores(q_tile, k_tile, nothing):
    """Start to compute the scores of a tile of keys."""
    return warpgroup_mma(q_tile, k_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def out_rows(row, request, index, chunks, num_rows, kv_head, KV_HEADS: gl.constexpr, GROUP: gl.constexpr):
    """Where the partial results of a tile's rows are, in rows of all query heads."""
    token = (request * chunks + index).to(gl.int64) * num_rows + row // GROUP
    return token * (KV_HEADS * GROUP) + kv_head * GROUP + row % GROUP


# N and C are no constants of the compiled kernel: decode and verify run the same instructions
@gluon.jit(do_not_specialize=["num_rows", "chunks"])
def wide_split_kernel(
    q_ptr, key_ptr, value_ptr, table_ptr, positions_ptr, kv_lens_ptr, tree_ptr, items_ptr, count_ptr, acc_ptr,
    stats_ptr, q_stride, table_stride, chunks, num_rows,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    WINDOW: gl.constexpr, HAS_TREE: gl.constexpr,
):  # fmt: skip
    """See ``paged_attention.split_kernel``."""
    STRIDE: gl.constexpr = KV_HEADS * D
    tiles = (num_rows * GROUP + BLOCK_M - 1) // BLOCK_M
    per_chunk = tiles * KV_HEADS
    q_tile = gl.allocate_shared_memory(q_ptr.dtype.element_ty, [BLOCK_M, D], TILE)
    k_tiles = gl.allocate_shared_memory(q_ptr.dtype.element_ty, [3, BLOCK_N, D], TILE)
    v_tiles = gl.allocate_shared_memory(q_ptr.dtype.element_ty, [2, BLOCK_N, D], TILE)
    key_row = gl.arange(0, BLOCK_N, gl.SliceLayout(1, COPY))
    gdc_wait()
    gdc_launch_dependents()
    for work in range(gl.program_id(0), gl.load(count_ptr) * per_chunk, gl.num_programs(0)):
        item = items_ptr + work // per_chunk * ITEM_FIELDS
        request = gl.load(item)
        index = gl.load(item + 1)
        start = gl.load(item + 2)
        end = gl.load(item + 3)
        slots_ptr = table_ptr + gl.load(item + 4).to(gl.int64) * table_stride
        kv_head, first_row = work // tiles % KV_HEADS, work % tiles * BLOCK_M
        keys, values = key_ptr + kv_head * D, value_ptr + kv_head * D
        gl.thread_barrier()  # nobody reads the tiles of the item before any more
        slots = gl.load(slots_ptr + gl.minimum(start + key_row, end - 1))
        copy_rows(k_tiles.index(0), keys, slots, STRIDE, D, True)
        next_slots = gl.load(slots_ptr + gl.minimum(start + BLOCK_N + key_row, end - 1))
        copy_rows(k_tiles.index(1), keys, next_slots, STRIDE, D, start + BLOCK_N < end)
        copy_rows(v_tiles.index(0), values, slots, STRIDE, D, True)
        later_slots = gl.load(slots_ptr + gl.minimum(start + 2 * BLOCK_N + key_row, end - 1))
        copy_rows(k_tiles.index(2), keys, later_slots, STRIDE, D, start + 2 * BLOCK_N < end)

        q_row = first_row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, COPY))
        q_at = (request * num_rows + q_row // GROUP).to(gl.int64) * q_stride + (kv_head * GROUP + q_row % GROUP) * D
        q_cols = gl.arange(0, D, gl.SliceLayout(0, COPY))
        q_ok = q_row < num_rows * GROUP
        q_tile.store(gl.load(q_ptr + q_at[:, None] + q_cols[None, :], mask=q_ok[:, None], other=0.0))

        row = first_row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, SCORES))
        ok = row < num_rows * GROUP
        token = request * num_rows + row // GROUP
        q_pos = gl.load(positions_ptr + token, mask=ok, other=-1).to(gl.int32)
        if HAS_TREE:
            tree_row = tree_ptr + token * num_rows
            first_draft = gl.load(kv_lens_ptr + request).to(gl.int32) - num_rows
        top = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        total = gl.full([BLOCK_M], 0.0, gl.float32, gl.SliceLayout(1, SCORES))
        acc = gl.zeros([BLOCK_M, D], gl.float32, SUMS)
        nothing = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, SCORES)
        wait_for_copies(3)  # the first keys
        scores = start_scores(q_tile, k_tiles.index(0), nothing)
        scores = warpgroup_mma_wait(0, deps=[scores])
        for i in range(0, (end - start + BLOCK_N - 1) // BLOCK_N):
            block = start + i * BLOCK_N
            slots = gl.load(slots_ptr + gl.minimum(block + 3 * BLOCK_N + key_row, end - 1))
            wait_for_copies(1)  # these values and the next keys; and all threads are done with the tiles before
            copy_rows(v_tiles.index((i + 1) % 2), values, next_slots, STRIDE, D, block + BLOCK_N < end)
            copy_rows(k_tiles.index(i % 3), keys, slots, STRIDE, D, block + 3 * BLOCK_N < end)
            next_slots, later_slots = later_slots, slots
            next_scores = start_scores(q_tile, k_tiles.index((i + 1) % 3), nothing)
            scores = scores * LOG2_E
            pos = block + gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
            stored = pos < end
            seen = (pos[None, :] <= q_pos[:, None]) & stored[None, :]
            if WINDOW > 0:
                seen = seen & (pos[None, :] > q_pos[:, None] - WINDOW)
            if HAS_TREE:
                draft = pos - first_draft
                mask = ((draft >= 0) & stored)[None, :] & ok[:, None]
                seen = gl.where(mask, gl.load(tree_row[:, None] + draft[None, :], mask=mask, other=0) != 0, seen)
            scores = gl.where(seen, scores, float("-inf"))
            new_top = gl.maximum(top, gl.max(scores, 1))
            base = gl.where(new_top == float("-inf"), 0.0, new_top)
            p = gl.exp2(scores - base[:, None])
            keep = gl.exp2(top - base)
            total = total * keep + gl.sum(p, 1)
            top = new_top
            weights = gl.convert_layout(p.to(q_ptr.dtype.element_ty), gl.DotOperandLayout(0, SUMS, 2))
            acc = acc * gl.convert_layout(keep, gl.SliceLayout(1, SUMS))[:, None]
            acc = warpgroup_mma(weights, v_tiles.index(i % 2), acc, is_async=True)
            acc, scores = warpgroup_mma_wait(0, deps=[acc, next_scores])
        at = out_rows(row, request, index, chunks, num_rows, kv_head, KV_HEADS, GROUP)
        gl.store(stats_ptr + 2 * at, top, mask=ok)
        gl.store(stats_ptr + 2 * at + 1, total, mask=ok)
        out_row = first_row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, SUMS))
        out_at = out_rows(out_row, request, index, chunks, num_rows, kv_head, KV_HEADS, GROUP)
        out_cols = gl.arange(0, D, gl.SliceLayout(0, SUMS))
        gl.store(acc_ptr + (out_at * D)[:, None] + out_cols[None, :], acc, mask=(out_row < num_rows * GROUP)[:, None])
