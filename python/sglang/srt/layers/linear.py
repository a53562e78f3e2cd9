"""Matrix products with weights stored [out, in]."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from sgl_kernel.activation import gelu_tanh_and_mul, gelu_tanh_mul
from sgl_kernel.linear import gate_up_gelu, gated_projection, linear, linear_parts
from sgl_kernel.packed_linear import PackedWeight, pack_weight, packed_linear

# weights of one arena start at multiples of this
_ALIGN_BYTES = 256


class Linear:
    """``y = x W^T`` without bias. ``widths`` are the row counts of the checkpoint tensors merged into one product.

    The weight comes with ``place``; after ``finish_loading`` it may live in the layout of the fastest product only, and
    ``part`` is for loading. ``row_invariant``: a row's result must not depend on how many rows there are.
    """

    def __init__(self, in_features: int, widths: Sequence[int], *, row_invariant: bool) -> None:
        self.in_features = in_features
        self.widths = tuple(widths)
        self._row_invariant = row_invariant
        self._weight: torch.Tensor | None = None
        self._packed: PackedWeight | None = None
        self._prefetch_bytes = 0

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return sum(self.widths), self.in_features

    def place(self, weight: torch.Tensor, prefetch_bytes: int) -> None:
        """``weight`` [out, in]; behind it in memory lie ``prefetch_bytes`` bytes that are needed next."""
        self._weight, self._prefetch_bytes = weight, prefetch_bytes

    @property
    def weight(self) -> torch.Tensor:
        """[out, in], from ``place`` until ``finish_loading``."""
        assert self._weight is not None, "the weight has no place yet, or has been re-laid already"
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
        return linear(x, self.weight, row_invariant=self._row_invariant)

    def parts(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, in] -> [T, out], or parts [S, T, out] float32 for the consumer to sum (see ``sgl_kernel.linear``)."""
        if self._packed is not None:
            return packed_linear(x, self._packed)
        return linear_parts(x, self.weight, row_invariant=self._row_invariant, prefetch_bytes=self._prefetch_bytes)

    def gated_gelu(self, x: torch.Tensor) -> torch.Tensor:
        """For a merged gate and up projection: ``x`` [T, in] -> gelu_tanh(gate) * up, [T, out / 2]."""
        if self._packed is not None:
            return gelu_tanh_and_mul(packed_linear(x, self._packed))
        return gate_up_gelu(x, self.weight, row_invariant=self._row_invariant, prefetch_bytes=self._prefetch_bytes)

    def of_gated(self, gate: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """The product of gelu_tanh(gate) * factor: ``gate`` [T, in] or parts, ``factor`` [T, in] -> as ``parts``."""
        if self._packed is not None:
            return packed_linear(gelu_tanh_mul(gate, factor), self._packed)
        return gated_projection(gate, factor, self.weight)


def place_linears(linears: Iterable[Linear], dtype: torch.dtype, device: torch.device, prefetch_limit: int) -> None:
    """Give every product its weight. On CUDA they lie in one arena in the order given, which is the order of use: each
    product can then ask for what lies behind it (at most ``prefetch_limit`` bytes) while it still runs."""
    products = tuple(linears)
    if device.type != "cuda":
        for product in products:
            product.place(torch.empty(product.shape, dtype=dtype, device=device), 0)
        return
    align = _ALIGN_BYTES // dtype.itemsize
    sizes = [-(-out * width // align) * align for out, width in (product.shape for product in products)]
    arena = torch.empty(sum(sizes), dtype=dtype, device=device)
    start = 0
    for product, size in zip(products, sizes, strict=True):
        out, width = product.shape
        behind = min(prefetch_limit, (arena.numel() - start - size) * dtype.itemsize)
        # a weight that is padded does not touch the next one
        behind = behind if size == out * width else 0
        product.place(arena[start : start + out * width].view(out, width), behind)
        start += size
