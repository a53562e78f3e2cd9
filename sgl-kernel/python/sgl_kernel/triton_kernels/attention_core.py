"""The inner loop of every paged attention kernel: a tile of query rows over a range of key positions."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def exponent_base(top):
    """What to subtract before ``exp2``: the maximum, or 0 for rows that have seen no key, whose terms are all 0."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def fold_keys(
    q, q_pos, q_ok, slots_ptr, key_ptr, value_ptr, start, end, tree_ptr, first_draft,
    SLOT_STRIDE: tl.constexpr, D: tl.constexpr, D_OUT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, HAS_TREE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Softmax state of ``q`` [BLOCK_M, D] over key positions start .. end: (maximum, sum, unnormalised output).

    The output has the D_OUT columns from ``value_ptr`` on. ``start`` is a multiple of BLOCK_N, so that a position
    always has the same place in its block; a block of which a row sees nothing leaves the row's state bitwise as it
    was. Maxima are in units of log2. With HAS_TREE, keys from ``first_draft`` on are seen where the row's bytes at
    ``tree_ptr`` [BLOCK_M] are set.
    """
    width, out_width = tl.arange(0, D), tl.arange(0, D_OUT)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_OUT], tl.float32)
    for block in range(start, end, BLOCK_N):
        pos = block + tl.arange(0, BLOCK_N)
        stored = pos < end
        # what lies behind the range is never read, a slot without a token may hold anything: the last key stands in
        slots = tl.load(slots_ptr + tl.minimum(pos, end - 1)).to(tl.int64)[:, None] * SLOT_STRIDE
        k = tl.load(key_ptr + (slots + width[None, :]))
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * LOG2_E
        seen = (pos[None, :] <= q_pos[:, None]) & stored[None, :]
        if WINDOW > 0:
            seen = seen & (pos[None, :] > q_pos[:, None] - WINDOW)
        if HAS_TREE:
            draft = pos - first_draft
            is_draft = (draft >= 0) & stored
            mask = is_draft[None, :] & q_ok[:, None]
            seen = tl.where(mask, tl.load(tree_ptr[:, None] + draft[None, :], mask=mask, other=0) != 0, seen)
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = exponent_base(new_top)
        p = tl.exp2(scores - base[:, None])
        keep = tl.exp2(top - base)
        v = tl.load(value_ptr + (slots + out_width[None, :]))
        total = total * keep + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * keep[:, None], input_precision=PRECISION)
        top = new_top
    return top, total, acc


def check_layout(q, key, value, kind):
    """ValueError unless the tensors are laid out as the kernels read them."""
    heads, kv_heads, width = kind.num_heads, kind.num_kv_heads, kind.head_dim
    if q.dim() != 3 or q.shape[1:] != (heads, width) or q.stride()[1:] != (width, 1):
        raise ValueError(f"q must be [T, {heads}, {width}] with contiguous rows, got {list(q.shape)} {q.stride()}")
    for name, buffer in (("key", key), ("value", value)):
        if buffer.shape[1:] != (kv_heads, width) or not buffer.is_contiguous() or buffer.shape != key.shape:
            raise ValueError(
                f"{name} must be [slots, {kv_heads}, {width}], contiguous, keys and values alike; "
                f"got {list(buffer.shape)} {buffer.stride()}"
            )
        if (buffer.dtype, buffer.device) != (q.dtype, q.device):
            raise ValueError(f"{name} is {buffer.dtype} on {buffer.device}, but q is {q.dtype} on {q.device}")
