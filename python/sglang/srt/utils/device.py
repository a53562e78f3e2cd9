"""The one place that knows which device we run on. Everyone else receives a ``Device``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
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
            torch.cuda.empty_cache()
            return torch.cuda.mem_get_info(self.index)[0]
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def total_bytes(self) -> int:
        """All memory of the device, in bytes."""
        if self.kind == "cuda":
            return torch.cuda.mem_get_info(self.index)[1]
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    @property
    def clock(self) -> Callable[[], float]:
        """Seconds that work takes here. A CPU is shared with others, whose turns are no part of it."""
        return time.perf_counter if self.kind == "cuda" else time.thread_time

    def synchronize(self) -> None:
        """Wait for what was started."""
        if self.kind == "cuda":
            torch.cuda.synchronize(self.index)

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """Memory that ``run`` takes at its height beyond what is taken already, in bytes. CUDA only."""
        assert self.kind == "cuda", "the allocator of a CPU keeps no count"
        torch.cuda.synchronize(self.index)
        torch.cuda.reset_peak_memory_stats(self.index)
        before = torch.cuda.memory_allocated(self.index)
        run()
        torch.cuda.synchronize(self.index)
        return torch.cuda.max_memory_allocated(self.index) - before


class Staging:
    """Host memory that is filled, then sent to a device in one copy. On a CPU it is the device's memory itself.

    The copy runs while the host goes on, so memory under way must not be changed: ``wait`` first.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_pinned = device.type == "cuda"
        self._sent = torch.cuda.Event() if self.is_pinned else None  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Until what was sent has left the host memory."""
        if self._sent is not None:
            self._sent.synchronize()

    def send(self, host: torch.Tensor, device: torch.Tensor) -> None:
        """``host`` must be pinned when the device is not a CPU."""
        device.copy_(host, non_blocking=True)
        if self._sent is not None:
            self._sent.record()


class Readback:
    """The one way results come to the host: one copy, one wait. Two copies may be under way."""

    def __init__(self, source: torch.Tensor) -> None:
        """``source`` is the largest tensor that will be read."""
        self._slots: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        if source.is_cuda:
            for _ in range(2):
                pinned = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
                self._slots.append((pinned, torch.cuda.Event()))  # type: ignore[no-untyped-call]

    def start(self, source: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to copy ``source``, dense and a part of what this was made for; the result waits for the copy."""
        if not self._slots:
            copy = source.clone()
            return lambda: copy
        pinned, done = self._slots[0]
        self._slots.reverse()
        target = pinned.view(-1)[: source.numel()].view(source.shape)
        target.copy_(source, non_blocking=True)
        done.record()

        def wait() -> torch.Tensor:
            done.synchronize()
            return target.clone()

        return wait


def set_compute_threads(wanted: int, num_processes: int = 1) -> int:
    """Threads of CPU operators of the calling thread; 0 leaves one core to the rest of the server, and the others to
    ``num_processes`` like this one. Returns the number.

    Operators wait for their slowest thread, so a thread that shares its core with another busy process slows every
    operator down by a scheduling quantum.
    """
    threads = wanted if wanted > 0 else max(1, (len(os.sched_getaffinity(0)) - 1) // num_processes)
    torch.set_num_threads(threads)
    return threads


def make_device(kind: str, index: int = 0) -> Device:
    """``kind`` is "auto", "cpu" or "cuda"; ``index``: which of several. ``ValueError`` when CUDA is asked for and
    there is no such device."""
    has_cuda = torch.cuda.is_available()
    if kind == "auto":
        kind = "cuda" if has_cuda else "cpu"
    if kind == "cuda" and not has_cuda:
        raise ValueError("--device cuda: no CUDA device is usable here; pass --device cpu or check the driver")
    if index > 0 and kind == "cuda" and index >= torch.cuda.device_count():
        raise ValueError(f"--device cuda: there is no GPU {index} here, only {torch.cuda.device_count()}")
    return Device(kind=kind, index=index, supports_graphs=kind == "cuda")
