"""What a rank keeps of a checkpoint's tensors, and of the KV."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from sglang.srt.configs.model_config import KVLayout
from sglang.srt.distributed.parallel_state import TpGroup


@dataclass(frozen=True, slots=True)
class ShardedSlot:
    """Places for parts of a checkpoint tensor of ``shape``, along its axis ``dim``. ``parts``: where each begins in the
    file, and the view it fills."""

    shape: tuple[int, ...]
    dim: int
    parts: tuple[tuple[int, torch.Tensor], ...]

    def fill(self, read: Callable[[tuple[slice, ...]], torch.Tensor]) -> None:
        """``read`` returns the part of the tensor that an index picks."""
        for start, view in self.parts:
            before = (slice(None),) * self.dim
            view.copy_(read((*before, slice(start, start + view.shape[self.dim]))))


# the whole tensor, or parts of it
WeightSlot = torch.Tensor | ShardedSlot


def shard(view: torch.Tensor, dim: int, start: int, total: int) -> WeightSlot:
    """A slot for what ``view`` holds: from ``start`` on, of ``total`` along ``dim``."""
    if view.shape[dim] == total:
        return view
    shape = (*view.shape[:dim], total, *view.shape[dim + 1 :])
    return ShardedSlot(shape, dim, ((start, view),))


def shard_pair(view: torch.Tensor, dim: int, start: int, total: int) -> WeightSlot:
    """The same for two tensors of ``total`` each that are one behind the other along ``dim``, in the file and here."""
    num = view.shape[dim] // 2
    if num == total:
        return view
    first, second = view.split(num, dim)
    shape = (*view.shape[:dim], 2 * total, *view.shape[dim + 1 :])
    return ShardedSlot(shape, dim, ((start, first), (total + start, second)))


def slot_shape(slot: WeightSlot) -> tuple[int, ...]:
    """Of the checkpoint's tensor."""
    return tuple(slot.shape)


def slot_tensors(slot: WeightSlot) -> tuple[torch.Tensor, ...]:
    """What is to be filled."""
    return (slot,) if isinstance(slot, torch.Tensor) else tuple(view for _, view in slot.parts)


def shard_layout(layout: KVLayout, group: TpGroup) -> KVLayout:
    """The KV that a rank keeps: its heads of every layer."""
    specs = (replace(spec, num_kv_heads=len(group.kv_heads(spec.num_kv_heads))) for spec in layout.layers)
    return KVLayout(tuple(specs))
