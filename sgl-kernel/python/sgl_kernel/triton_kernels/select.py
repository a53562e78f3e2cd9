"""Choosing the best of a row: keys whose integer order is the order of (score, lower index first).

A key has the bits of its score above those of its index. Scores in 16 bits leave room for both in an int32 (indices
below 65536), which halves the work of sorting; float32 scores make int64 keys.
"""

import triton
import triton.language as tl


@triton.jit
def ranking_keys(scores, index):
    """Keys of ``scores``: a greater score has a greater key, of equal scores the lower index has."""
    narrow: tl.constexpr = scores.dtype.primitive_bitwidth == 16
    magnitude: tl.constexpr = 0x7FFF if narrow else 0x7FFFFFFF
    low_bits: tl.constexpr = 0xFFFF if narrow else 0x7FFFFFFF
    bits = tl.where(scores == 0.0, 0.0, scores).to(scores.dtype).to(tl.int16 if narrow else tl.int32, bitcast=True)
    # negative floats order backwards as integers: turning their magnitude over puts them in line
    ordered = tl.where(bits < 0, bits ^ magnitude, bits).to(tl.int32 if narrow else tl.int64)
    return (ordered << (16 if narrow else 32)) | (index ^ low_bits).to(ordered.dtype)


@triton.jit
def key_index(key):
    """The index a key was made of."""
    low_bits: tl.constexpr = 0xFFFF if key.dtype.primitive_bitwidth == 32 else 0x7FFFFFFF
    return ((key & low_bits) ^ low_bits).to(tl.int32)


@triton.jit
def key_score(key):
    """The float32 score an int64 key was made of."""
    ordered = (key >> 32).to(tl.int32)
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)
