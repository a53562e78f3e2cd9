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


def make_device(kind: str) -> Device:
    """``kind`` is "auto", "cpu" or "cuda". Raises ``ValueError`` when CUDA is asked for and absent."""
    has_cuda = torch.cuda.is_available()
    if kind == "auto":
        kind = "cuda" if has_cuda else "cpu"
    if kind == "cuda" and not has_cuda:
        raise ValueError("--device cuda: no CUDA device is usable here; pass --device cpu or check the driver")
    return Device(kind=kind, index=0, supports_graphs=kind == "cuda")
