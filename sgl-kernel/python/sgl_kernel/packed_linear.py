"""Matrix products with a weight stored in the blocked layout of the CPU library.

For the few rows of a decode step the library's plain-layout product is much slower than its blocked layout, so float32
weights on a CPU are re-laid once after loading.
"""

from __future__ import annotations

import torch

# below this many elements the call overhead of the blocked product is larger than what it saves
_MIN_ELEMENTS = 1 << 15
_ROWS_HINT = 64


def pack_weight(weight: torch.Tensor) -> torch.Tensor | None:
    """``weight`` [N, K] in blocked layout, for ``packed_linear``; None where that would not help."""
    suits = weight.device.type == "cpu" and weight.dtype is torch.float32 and weight.numel() >= _MIN_ELEMENTS
    if not suits or not torch.backends.mkldnn.is_available():
        return None
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)


def packed_linear(x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """``x`` [T, K] float32 -> [T, N]."""
    return torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
