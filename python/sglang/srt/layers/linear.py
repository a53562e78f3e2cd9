"""Matrix products with weights stored [out, in]."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from sgl_kernel.packed_linear import PackedWeight, pack_weight, packed_linear


class Linear:
    """``y = x W^T`` without bias. ``widths`` are the row counts of the checkpoint tensors merged into one product.

    After ``finish_loading`` the weight may live in the layout of the fastest product only; ``part`` is for loading.
    """

    def __init__(self, in_features: int, widths: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.widths = tuple(widths)
        self._weight: torch.Tensor | None = torch.empty(sum(widths), in_features, dtype=dtype, device=device)
        self._packed: PackedWeight | None = None

    @property
    def weight(self) -> torch.Tensor:
        """[out, in], until ``finish_loading``."""
        assert self._weight is not None, "the weight has been re-laid already"
        return self._weight

    def part(self, index: int) -> torch.Tensor:
        """View of the rows that checkpoint tensor ``index`` fills."""
        start = sum(self.widths[:index])
        return self.weight[start : start + self.widths[index]]

    def finish_loading(self) -> None:
        self._packed = pack_weight(self.weight)
        if self._packed is not None:
            self._weight = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, in] -> [T, out]."""
        if self._packed is not None:
            return packed_linear(x, self._packed)
        return F.linear(x, self.weight)
