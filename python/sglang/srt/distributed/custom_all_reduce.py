"""Sums of small tensors over the GPUs of one machine, each in one kernel that reads the memory of all of them.

What is added after a layer of a decode step is a few rows: a library's collective takes longer to begin than to move
them, twice a layer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from sglang.srt.utils.env import disable_multicast

logger = logging.getLogger(__name__)

# every rank reads the tensors of all; the library moves more than this faster
_READ_BYTES = 2 << 20
_ALIGNMENT = 16
_DTYPES = (torch.float32, torch.bfloat16)


class CustomAllReduce:
    """``buffer``: uint8, memory of this rank that the others of the process group ``name`` see."""

    def __init__(self, buffer: torch.Tensor, name: str) -> None:
        self._buffer = buffer
        self._name = name

    def takes(self, x: torch.Tensor) -> bool:
        """Whether ``x`` is of a type and a size for this; of all ranks or of none, since theirs are like it."""
        num_bytes = x.numel() * x.element_size()
        return x.dtype in _DTYPES and 0 < num_bytes <= self._buffer.numel() and num_bytes % _ALIGNMENT == 0

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's ``x``: ranks are added in their order, in the type of ``x``, on every rank alike."""
        here = self._buffer[: x.numel() * x.element_size()].view(x.dtype).view(x.shape)
        total: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(here, x.contiguous(), "sum", self._name)
        return total

    def is_right(self, rank: int, gather: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        """Whether trial sums have the bits they should. All ranks must ask; they may find different answers."""
        found = []
        for dtype in _DTYPES:
            num = self._buffer.numel() // dtype.itemsize
            for size in (num, _ALIGNMENT // dtype.itemsize, num // 8):
                x = _trial(rank, size, dtype).to(self._buffer.device)
                found.append(self._is(x, sum_in_order(gather(x))))
        return all(found)

    def _is(self, x: torch.Tensor, want: torch.Tensor) -> bool:
        try:
            return torch.equal(self.total(x), want)
        except (RuntimeError, AttributeError) as error:  # what this device or this version does not have
            logger.warning("small tensors are not added without the library: %s", error)
            return False


def sum_in_order(parts: torch.Tensor) -> torch.Tensor:
    """``parts`` [ranks, ...], of one rank each -> their sum, added one after the other."""
    total, *others = parts.unbind(0)
    for part in others:
        total = total + part
    return total


def _trial(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of which float32 sums depend on the order, and sums of whole numbers in a narrower type do not."""
    generator = torch.Generator().manual_seed(rank)
    if dtype is torch.float32:
        return torch.randn(size, generator=generator) ** 3
    return torch.randint(-16, 17, (size,), generator=generator).to(dtype)


def see_each_other(devices: Sequence[int], own: int) -> bool:
    """Whether GPU ``own`` can read the memory of all ``devices``."""
    return all(torch.cuda.can_device_access_peer(own, device) for device in devices if device != own)


def open_custom_all_reduce(size: int, device: torch.device) -> CustomAllReduce | None:
    """Of all ``size`` ranks, on as many GPUs that see each other. None, and why in the log, when there is none."""
    # not at the top: on a CPU there is nothing of it
    from torch.distributed import _symmetric_memory as symmetric_memory

    group = dist.group.WORLD
    assert group is not None, "no ranks have met"
    disable_multicast()
    try:
        num_bytes = _READ_BYTES // size // (8 * _ALIGNMENT) * 8 * _ALIGNMENT  # an eighth is aligned, too
        buffer = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
        symmetric_memory.rendezvous(buffer, group.group_name)
    except (RuntimeError, AttributeError) as error:  # no such memory here, or not in this version
        logger.warning("no memory is shared by the GPUs: %s", error)
        return None
    return CustomAllReduce(buffer, group.group_name)
