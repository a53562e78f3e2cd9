"""What a rank keeps of a checkpoint's tensors, and which models can be cut into so many ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from sglang.srt.configs.model_config import KVLayout, TextConfig
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


def check_shards(text: TextConfig, size: int) -> None:
    """``ValueError`` naming every dimension of the model that cannot be cut into ``size`` parts."""
    dims = {
        "num_attention_heads": text.num_heads,
        "vocab_size": text.vocab_size,
        **{f"intermediate_size of layer {i}": text.mlp_width(i) for i in range(text.num_layers)},
    }
    if text.moe is not None:
        dims["moe_intermediate_size"] = text.moe.intermediate_size
    if text.per_layer_input_size:
        dims["vocab_size_per_layer_input"] = text.per_layer_vocab_size
    wrong = [f"{name} {total}" for name, total in dims.items() if total % size]
    for kind, heads in sorted({(spec.kind, spec.num_kv_heads) for spec in text.kv_layout.layers}):
        if heads % size and size % heads:
            wrong.append(f"KV heads of {kind} layers {heads} (which must divide it or be divided by it)")
    if wrong:
        raise ValueError(f"--tp-size {size} does not divide the model's {', '.join(wrong)}: choose another")
