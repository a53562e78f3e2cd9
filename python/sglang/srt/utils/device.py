"""The one place that knows which device we run on. Everyone else receives a ``Device``."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Device:
    """A compute device, chosen once at start."""

    kind: str
    index: int
    supports_graphs: bool

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.kind, self.index) if self.kind == "cuda" else torch.device("cpu")

    def available_bytes(self) -> int:
        """Memory that can still be taken, in bytes."""
        if self.kind == "cuda":
            return torch.cuda.mem_get_info(self.index)[0]
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def set_compute_threads(wanted: int) -> int:
    """Threads of CPU operators of the calling thread; 0 leaves one core to the rest of the server. Returns the number.

    Operators wait for their slowest thread, so a thread that shares its core with another busy process slows every
    operator down by a scheduling quantum.
    """
    threads = wanted if wanted > 0 else max(1, len(os.sched_getaffinity(0)) - 1)
    torch.set_num_threads(threads)
    return threads


def make_device(kind: str) -> Device:
    """``kind`` is "auto", "cpu" or "cuda". Raises ``ValueError`` when CUDA is asked for and absent."""
    has_cuda = torch.cuda.is_available()
    if kind == "auto":
        kind = "cuda" if has_cuda else "cpu"
    if kind == "cuda" and not has_cuda:
        raise ValueError("--device cuda: no CUDA device is usable here; pass --device cpu or check the driver")
    return Device(kind=kind, index=0, supports_graphs=kind == "cuda")
