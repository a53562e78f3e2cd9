"""Matrix products with weights stored [out, in]."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from sgl_kernel.activation import gelu_tanh_and_mul, gelu_tanh_mul
from sgl_kernel.linear import gate_up_gelu, gated_projection, linear, linear_parts
from sgl_kernel.packed_linear import PackedWeight, pack_weight, packed_linear
from sglang.srt.distributed.parallel_state import TpGroup


class Linear:
    """``y = x W^T`` without bias. ``widths`` are the row counts of the checkpoint tensors merged into one product.

    After ``finish_loading`` the weight may live in the layout of the fastest product only; ``weight`` and ``part`` are
    for loading, also of other values later, and serve no product before the next ``finish_loading``.
    ``row_invariant``: a row's result must not depend on how many rows there are.
    """

    def __init__(
        self, in_features: int, widths: Sequence[int], dtype: torch.dtype, device: torch.device, *, row_invariant: bool
    ) -> None:
        self.widths = tuple(widths)
        self._row_invariant = row_invariant
        self._make_weight = partial(torch.empty, sum(widths), in_features, dtype=dtype, device=device)
        self._weight: torch.Tensor | None = self._make_weight()
        self._packed: PackedWeight | None = None

    @property
    def weight(self) -> torch.Tensor:
        """[out, in], to be filled."""
        if self._weight is None:  # it was re-laid: other values need a place of their own until they are, too
            self._weight = self._make_weight()
        return self._weight

    def part(self, index: int) -> torch.Tensor:
        """View of the rows that checkpoint tensor ``index`` fills."""
        start = sum(self.widths[:index])
        return self.weight[start : start + self.widths[index]]

    def finish_loading(self) -> None:
        self._packed = pack_weight(self.weight)
        if self._packed is not None:
            self._weight = None

    @property
    def whole_panels(self) -> PackedWeight | None:
        """The weight for a compiled operator; None where it is not in panels, or its product is not all there is."""
        return self._packed if self._packed is not None and self._packed.panels is not None else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, in] -> [T, out]."""
        if self._packed is not None:
            return packed_linear(x, self._packed)
        return linear(x, self.weight, row_invariant=self._row_invariant)

    def parts(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, in] -> [T, out], or parts [S, T, out] float32 that the consumer sums; see ``sgl_kernel.linear``."""
        if self._packed is not None:
            return packed_linear(x, self._packed)
        return linear_parts(x, self.weight, row_invariant=self._row_invariant)

    def gated_gelu(self, x: torch.Tensor) -> torch.Tensor:
        """For a merged gate and up projection: ``x`` [T, in] -> gelu_tanh(gate) * up, [T, out / 2]."""
        if self._packed is not None:
            return gelu_tanh_and_mul(packed_linear(x, self._packed))
        return gate_up_gelu(x, self.weight, row_invariant=self._row_invariant)

    def of_gated(self, gate: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """The product of gelu_tanh(gate) * factor: ``gate`` [T, in] or parts, ``factor`` [T, in] -> as ``parts``."""
        if self._packed is not None:
            return packed_linear(gelu_tanh_mul(gate, factor), self._packed)
        return gated_projection(gate, factor, self.weight)


class RowParallelLinear(Linear):
    """One rank's columns of a weight, which take those columns of ``x``; ``parts`` is the sum over the ranks."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        device: torch.device,
        group: TpGroup,
        *,
        row_invariant: bool,
    ) -> None:
        super().__init__(in_features, (out_features,), dtype, device, row_invariant=row_invariant)
        self._group = group

    @property
    def whole_panels(self) -> PackedWeight | None:
        return super().whole_panels if self._group.size == 1 else None

    def parts(self, x: torch.Tensor) -> torch.Tensor:
        return self._group.sum(self.parts_here(x))

    def parts_here(self, x: torch.Tensor) -> torch.Tensor:
        """What this rank adds to ``parts``."""
        return super().parts(x)
