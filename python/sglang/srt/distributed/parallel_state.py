"""Which part of a model this process holds, and how the processes of one model put their parts together.

A *rank* is one process with one device. All ranks run the same steps in the same order; rank 0 decides whatever is not
the same everywhere by itself (see ``lockstep``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from sglang.srt.distributed.custom_all_reduce import (
    CustomAllReduce,
    open_custom_all_reduce,
    see_each_other,
    sum_in_order,
)
from sglang.srt.distributed.lockstep import Lockstep, open_lockstep

logger = logging.getLogger(__name__)

_CPU_BACKEND, _CUDA_BACKENDS = "gloo", "cpu:gloo,cuda:nccl"
# one operation, whose name changed
_all_gather: Callable[[torch.Tensor, torch.Tensor], object] = (
    dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
)


@dataclass(frozen=True, slots=True)
class TpRank:
    """Where a process stands. ``local_rank``: its device among the ``ranks_here`` of its machine, those of other
    replicas included; ``rendezvous``: the URL under which the ranks find each other, ``file://`` or ``tcp://``;
    ``custom_all_reduce``: whether GPUs may add small tensors by themselves, without the library."""

    rank: int
    size: int
    local_rank: int
    ranks_here: int
    rendezvous: str
    timeout_s: float
    custom_all_reduce: bool = True


class TpGroup:
    """The ranks of one model. Made without arguments it is a group of one, whose collectives change nothing."""

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        *,
        local_rank: int = 0,
        ranks_here: int = 1,
        lockstep: Lockstep | None = None,
        small_sums: CustomAllReduce | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.local_rank = local_rank
        self.ranks_here = ranks_here
        self.small_sums = small_sums
        self._lockstep = Lockstep() if lockstep is None else lockstep

    @property
    def leads(self) -> bool:
        """Whether this rank decides, and talks to the outside."""
        return self.rank == 0

    def part(self, total: int) -> range:
        """This rank's part of ``total`` equal things, in the order of ranks."""
        assert total % self.size == 0, f"{total} is not {self.size} equal parts"
        num = total // self.size
        return range(self.rank * num, (self.rank + 1) * num)

    def kv_heads(self, total: int) -> range:
        """The KV heads that this rank's part of the query heads reads; with fewer of them than ranks, several have the
        same."""
        if total >= self.size:
            return self.part(total)
        first = self.rank * total // self.size
        return range(first, first + 1)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [...] of every rank, in their order: [size, ...]."""
        if self.size == 1:
            return x[None]
        x = x.contiguous()
        parts = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        _all_gather(parts.view(-1), x.view(-1))
        return parts

    def concat(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, n] of every rank side by side: [T, size * n]."""
        if self.size == 1:
            return x
        return self.gather(x).transpose(0, 1).reshape(x.shape[0], -1)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's product: ``x`` [T, N], or parts [S, T, N] as ``sgl_kernel.linear`` has them.

        Parts stay parts, one a rank, for the consumer to add in their order; [T, N] is added as ``total`` does.
        """
        if x.dim() == 3 and self.size > 1:
            x = x[0] if x.shape[0] == 1 else x.sum(0)
            small = self._small(x)
            return self.gather(x) if small is None else small.total(x)[None]
        return self.total(x)

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's ``x``, in its shape and type. May change ``x``.

        Ranks are added in their order and in float32, so that all of them get the same bits, and a row the same
        whatever rows are beside it; a ring adds in an order that depends on the size of the whole. Only the many rows
        of a prefill on CUDA, whose products depend on their number in any case and are not in float32, are added in
        their type, and unless they are small by the library.
        """
        if self.size == 1:
            return x
        if (small := self._small(x)) is not None:
            return small.total(x)
        if x.is_cuda and x.dtype is not torch.float32:
            dist.all_reduce(x)
            return x
        return sum_in_order(self.gather(x.float())).to(x.dtype)

    def pick(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of tensors of which every element is zero on all ranks but one: no rounding. May change ``x``."""
        if self.size == 1:
            return x
        if (small := self._small(x)) is not None:
            return small.total(x)
        dist.all_reduce(x)
        return x

    def _small(self, x: torch.Tensor) -> CustomAllReduce | None:
        """What adds tensors like ``x`` without the library."""
        return self.small_sums if self.small_sums is not None and self.small_sums.takes(x) else None

    def least(self, value: int) -> int:
        """The smallest ``value`` of all ranks."""
        return int(self.gather(torch.tensor(value)).min())

    def same(self, x: torch.Tensor) -> bool:
        """Whether ``x`` is equal on all ranks; for checks, since the host waits."""
        return self.size == 1 or bool((self.gather(x) == x).all())

    def share(self, make: Callable[[], bytes]) -> bytes:
        """What rank 0 makes, on every rank. The others wait for it without using a CPU."""
        return self._lockstep.share(make)

    def share_number(self, make: Callable[[], float]) -> float:
        """``share`` of a number. Integers up to 2 ** 53 stay exact."""
        return float.fromhex(self.share(lambda: float(make()).hex().encode()).decode())

    def close(self) -> None:
        """Leave. NCCL's communicators stay until the process ends, since captured graphs use them."""
        if self.size == 1:
            return
        if dist.get_backend() != _CPU_BACKEND:
            torch.cuda.synchronize()  # the other ranks may need what this one still computes
        self._lockstep.close()
        if dist.get_backend() == _CPU_BACKEND:
            dist.destroy_process_group()


def join_group(rank: TpRank, device: torch.device) -> TpGroup:
    """Meet the other ranks; returns when all of them are here. ``ValueError`` when one does not come in time."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if rank.size == 1:
        return TpGroup(local_rank=rank.local_rank, ranks_here=rank.ranks_here)
    try:
        group = _join(rank, device)
    except (RuntimeError, OSError) as error:
        raise ValueError(
            f"rank {rank.rank} did not meet the other {rank.size - 1} at {rank.rendezvous} ({error}): start every "
            "machine, with the same --dist-init-addr, a free port of machine 0"
        ) from error
    if device.type == "cuda":
        group.small_sums = _small_sums(rank, device, group)
        logger.info("Small tensors are added by %s", "NCCL" if group.small_sums is None else "a kernel of all ranks")
    return group


def _join(rank: TpRank, device: torch.device) -> TpGroup:
    dist.init_process_group(
        _CUDA_BACKENDS if device.type == "cuda" else _CPU_BACKEND,
        init_method=rank.rendezvous,
        rank=rank.rank,
        world_size=rank.size,
        timeout=timedelta(seconds=rank.timeout_s),
    )
    lockstep = open_lockstep(rank.rank, rank.size, rank.rendezvous, rank.timeout_s, _first_of_all)
    group = TpGroup(rank.rank, rank.size, local_rank=rank.local_rank, ranks_here=rank.ranks_here, lockstep=lockstep)
    # communicators are made by their first collective, which must not be a captured one
    group.gather(torch.zeros(1, device=device))
    return group


def _small_sums(rank: TpRank, device: torch.device, group: TpGroup) -> CustomAllReduce | None:
    """None where the library adds everything; the same on all ranks."""
    if not rank.custom_all_reduce or rank.ranks_here < rank.size:
        return None
    first = rank.local_rank - rank.rank
    if not group.least(see_each_other(range(first, first + rank.size), rank.local_rank)):
        return None
    made = open_custom_all_reduce(rank.size, device)
    if not group.least(made is not None) or made is None:
        return None
    return made if group.least(made.is_right(rank.rank, group.gather)) else None


def _first_of_all(text: bytes) -> bytes:
    """Rank 0's ``text`` (at most 255 bytes) on every rank, before there is a lockstep."""
    sent = torch.zeros(256, dtype=torch.uint8)
    sent[: len(text) + 1] = torch.frombuffer(bytearray([len(text), *text]), dtype=torch.uint8)
    dist.broadcast(sent, src=0)
    return bytes(sent[1 : 1 + int(sent[0])].tolist())
