"""Matrix products with weights re-laid for the CPU library.

For the few rows of a decode step the library's product with a plain [N, K] weight reaches a fraction of the memory
bandwidth. Two other layouts of float32 weights come closer: blocked for two rows and more, transposed for one row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# below this many elements the call overhead of the blocked product is larger than what it saves
_MIN_ELEMENTS = 1 << 15
_ROWS_HINT = 64
# a second layout doubles the memory of a weight, so large weights do without it
_MAX_TRANSPOSED_ELEMENTS = 1 << 21


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """``blocked``: opaque to everyone but the product; ``transposed`` [K, N] or None."""

    blocked: torch.Tensor
    transposed: torch.Tensor | None


def pack_weight(weight: torch.Tensor) -> PackedWeight | None:
    """``weight`` [N, K] for ``packed_linear``; None where that would not help."""
    suits = weight.device.type == "cpu" and weight.dtype is torch.float32 and weight.numel() >= _MIN_ELEMENTS
    if not suits or not torch.backends.mkldnn.is_available():
        return None
    small = weight.numel() <= _MAX_TRANSPOSED_ELEMENTS
    return PackedWeight(
        torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT),
        weight.t().contiguous() if small else None,
    )


def packed_linear(x: torch.Tensor, packed: PackedWeight) -> torch.Tensor:
    """``x`` [T, K] float32 -> [T, N]."""
    if x.shape[0] == 1 and packed.transposed is not None:
        return torch.mm(x, packed.transposed)
    return torch.ops.mkldnn._linear_pointwise(x, packed.blocked, None, "none", [], "")
