"""The output head, of which every rank holds the rows of a part of the vocabulary.

Shapes: R rows, D hidden width, V vocabulary.
"""

from __future__ import annotations

import torch

from sgl_kernel.activation import softcap_
from sgl_kernel.head_argmax import head_argmax, row_argmax
from sgl_kernel.linear import MAX_SKINNY_ROWS, linear
from sgl_kernel.packed_linear import PackedWeight, pack_weight, packed_linear
from sglang.srt.distributed.parallel_state import TpGroup


class ParallelLMHead:
    """``weight`` [V / ranks, D]; ``row_invariant``: a row's result must not depend on how many rows there are."""

    def __init__(self, weight: torch.Tensor, group: TpGroup, *, row_invariant: bool) -> None:
        self.weight = weight
        self._group = group
        self._row_invariant = row_invariant
        self._packed: PackedWeight | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [R, D] -> logits of the whole vocabulary, [R, V]."""
        return self._group.concat(self._part(x))

    def best(self, x: torch.Tensor, softcap: float | None) -> torch.Tensor:
        """``x`` [R, D] -> the token with the highest logit, of equal ones the lowest, [R] int64.

        On a GPU without forming logits, unless there are so many rows that they would read the head more than once.
        Ranks exchange their best token and its logit, and no other.
        """
        if x.is_cuda and (self._row_invariant or x.shape[0] <= MAX_SKINNY_ROWS):
            ids, values, _ = head_argmax(x, self.weight, softcap)
        else:
            logits = self._part(x)
            values, ids = row_argmax(logits if softcap is None else softcap_(logits, softcap))
        if self._group.size == 1:
            return ids
        # in float64 both are exact, so that one exchange does
        ids = ids + self._group.rank * self.weight.shape[0]
        of_ranks = self._group.gather(torch.stack((values.double(), ids.double())))
        winner = of_ranks[:, 0].argmax(dim=0, keepdim=True)
        return of_ranks[:, 1].gather(0, winner)[0].long()

    def pack(self) -> None:
        """Lay the weight out for the fastest product; again after every change of it."""
        self._packed = pack_weight(self.weight)

    def _part(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is not None:
            return packed_linear(x, self._packed)
        return linear(x, self.weight, row_invariant=self._row_invariant)
