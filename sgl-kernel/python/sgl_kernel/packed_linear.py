"""Matrix products with weights re-laid for a CPU.

For the few rows of a decode step the library's product with a plain [N, K] weight reaches a fraction of the memory
bandwidth. Small float32 weights are therefore kept in panels of 32 rows, which one stream reads in order and one thread
multiplies faster than the library does; large ones in the library's own blocked layout, which uses every thread.

Weights that were bfloat16 in their checkpoint, as Gemma 4's are, are bfloat16 again in their panels: the same values
from half the bytes. Sums are float32 in either case and in the same order, so results are the same to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sgl_kernel.cpu_ops import cpu_ops

# below this many elements the call overhead of the blocked product is larger than what it saves
_MIN_BLOCKED_ELEMENTS = 1 << 15
_ROWS_HINT = 64
_MAX_PANEL_ELEMENTS = 1 << 21


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """One of: ``panels`` [N / 32, K, 32] float32, or [N / 32, K, 16, 2] bfloat16 with rows i and i + 16 of a panel side
    by side; ``blocked`` (opaque to all but its product); ``plain`` [N, K]."""

    num_rows: int
    plain: torch.Tensor | None
    blocked: torch.Tensor | None
    panels: torch.Tensor | None


def pack_weight(weight: torch.Tensor) -> PackedWeight | None:
    """``weight`` [N, K] for ``packed_linear``; None where the plain product is best (not float32, not on a CPU)."""
    if weight.device.type != "cpu" or weight.dtype is not torch.float32:
        return None
    n, k = weight.shape
    if has_panels(weight):
        return PackedWeight(n, None, None, _panels(weight))
    if weight.numel() >= _MIN_BLOCKED_ELEMENTS and torch.backends.mkldnn.is_available():
        blocked = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)
        return PackedWeight(n, None, blocked, None)
    return PackedWeight(n, weight, None, None)


def _panels(weight: torch.Tensor) -> torch.Tensor:
    n, k = weight.shape
    narrow = weight.bfloat16()
    if torch.equal(narrow.float(), weight):
        return narrow.view(n // 32, 2, 16, k).permute(0, 3, 2, 1).contiguous()
    return weight.view(n // 32, 32, k).transpose(1, 2).contiguous()


def has_panels(weight: torch.Tensor) -> bool:
    """Whether a few rows times ``weight`` [N, K] can run at the speed of memory."""
    n, k = weight.shape
    suits = weight.is_cpu and weight.dtype is torch.float32 and n % 32 == 0 and k % 2 == 0
    return suits and weight.numel() <= _MAX_PANEL_ELEMENTS and cpu_ops() is not None


def packed_linear_groups(x: torch.Tensor, packed: PackedWeight, groups: torch.Tensor, per_group: int) -> torch.Tensor:
    """``x`` [B, K] times the weight's rows of its own groups: ``groups`` [B, G] int64, group g being rows
    ``g * per_group`` and on (a multiple of 32) -> [B, G * per_group]. Needs panels."""
    ops = cpu_ops()
    assert ops is not None and packed.panels is not None and per_group % 32 == 0, f"{per_group=}"
    x, groups = x.contiguous(), groups.contiguous()
    batch, count = groups.shape
    y = torch.empty((batch, count * per_group))
    is_narrow = packed.panels.dtype is torch.bfloat16
    (ops.sgl_linear_groups_bf16 if is_narrow else ops.sgl_linear_groups)(
        x.data_ptr(), packed.panels.data_ptr(), groups.data_ptr(), y.data_ptr(), batch, count, per_group, x.shape[1]
    )
    return y


def packed_linear(x: torch.Tensor, packed: PackedWeight) -> torch.Tensor:
    """``x`` [T, K] float32 -> [T, N]."""
    rows, width = x.shape
    if packed.panels is not None:
        ops = cpu_ops()
        assert ops is not None
        x = x.contiguous()
        y = torch.empty((rows, packed.num_rows))
        product = ops.sgl_linear_bf16 if packed.panels.dtype is torch.bfloat16 else ops.sgl_linear
        product(x.data_ptr(), packed.panels.data_ptr(), y.data_ptr(), rows, packed.num_rows, width)
        return y
    if packed.blocked is not None:
        return torch.ops.mkldnn._linear_pointwise(x, packed.blocked, None, "none", [], "")
    assert packed.plain is not None
    return torch.nn.functional.linear(x, packed.plain)
