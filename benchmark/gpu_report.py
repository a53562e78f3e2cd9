"""What the GPU benchmarks share: the line they write, timing, and the limits that figures are divided by.

One measured figure is one line of a ``.jsonl`` file (``benchmark/results/h200.jsonl`` holds the committed ones);
``results/README.md`` says what the fields mean. Everything also runs on a CPU, where figures only show that it does.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import command_line, commit, format_table, versions
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

logger = logging.getLogger(__name__)
TIME_UNITS = ("us", "ms", "s")


@dataclass(frozen=True, slots=True)
class Line:
    """One figure. ``limit`` is what it is measured against, in the same unit; ``ratio`` says how close it comes: value
    over limit for rates, limit over value for times, so that more is always better."""

    bench: str
    model: str
    batch: int
    context: int
    steps: int
    metric: str
    value: float
    unit: str
    limit: float | None
    ratio: float | None
    gpu: str
    versions: str
    commit: str
    command: str


def validate_line(values: Mapping[str, Any]) -> None:
    """``ValueError`` naming the field when ``values`` is not one well-formed line."""
    names = [field.name for field in fields(Line)]
    if list(values) != names:
        raise ValueError(f"a line has exactly the fields {', '.join(names)}, in this order, got {', '.join(values)}")
    for name in ("bench", "model", "metric", "unit", "gpu", "versions", "commit", "command"):
        if not isinstance(values[name], str) or not values[name]:
            raise ValueError(f"{name} must be a non-empty string, got {values[name]!r}")
    for name, low in (("batch", 1), ("context", 0), ("steps", 0)):
        if type(values[name]) is not int or values[name] < low:
            raise ValueError(f"{name} must be an integer of at least {low}, got {values[name]!r}")
    if (values["limit"] is None) != (values["ratio"] is None):
        raise ValueError(f"limit and ratio come together, got {values['limit']!r} and {values['ratio']!r}")
    for name in ("value", "limit", "ratio"):
        number = values[name]
        if name != "value" and number is None:
            continue
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number < float("inf"):
            raise ValueError(f"{name} must be a finite number of at least 0, got {number!r}")
    if " /" in values["command"] or values["model"].startswith("/"):
        raise ValueError(f"command and model must not hold an absolute path, got {values['command']!r}")


class Report:
    """Collects the lines of one run; with a path, appends each as it comes, so that a run cut short leaves its own."""

    def __init__(self, bench: str, args: argparse.Namespace) -> None:
        self.lines: list[Line] = []
        self._bench = bench
        self._path: Path | None = args.json_out
        self._facts: dict[str, Any] = {
            "gpu": torch.cuda.get_device_name() if args.device == "cuda" else "none, cpu",
            "versions": _versions(),
            "commit": args.commit or _commit(),
            "command": command_line(sys.argv),
        }

    def add(
        self,
        model: str,
        metric: str,
        value: float,
        unit: str,
        *,
        batch: int = 1,
        context: int = 0,
        steps: int = 0,
        limit: float | None = None,
    ) -> Line:
        ratio = None
        if limit is not None:
            ratio = _rounded(limit / value if unit in TIME_UNITS else value / limit)
            limit = _rounded(limit)
        cell = (self._bench, model, batch, context, steps, metric, _rounded(value), unit, limit, ratio)
        line = Line(*cell, **self._facts)
        validate_line(asdict(line))
        self.lines.append(line)
        print(" ".join(_cells(line)), flush=True)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(line), ensure_ascii=False) + "\n")
        return line

    def add_limits(self, limits: Limits) -> None:
        self.add("any", "read bandwidth", limits.bytes_per_s / 1e12, "TB/s")
        self.add("any", "matrix rate", limits.flops_per_s / 1e12, "TFLOP/s")


def table(lines: Sequence[Line]) -> str:
    header = ["bench", "model", "batch", "context", "steps", "metric", "value", "unit", "limit", "ratio"]
    return format_table(header, [_cells(line) for line in lines])


def _cells(line: Line) -> list[str]:
    numbers = ["-" if number is None else f"{number:g}" for number in (line.value, line.limit, line.ratio)]
    sizes = [str(size) for size in (line.batch, line.context, line.steps)]
    return [line.bench, line.model, *sizes, line.metric, numbers[0], line.unit, *numbers[1:]]


def _rounded(value: float) -> float:
    """Four significant digits: more would be noise."""
    return float(f"{value:.4g}")


def _versions() -> str:
    return f"{versions()}, triton {_triton_version()}"


def _triton_version() -> str:
    try:
        import triton
    except ModuleNotFoundError:
        return "none"
    return str(triton.__version__)


def _commit() -> str:
    try:
        return commit()
    except (OSError, subprocess.CalledProcessError) as err:
        raise ValueError("this copy of the sources has no git history: say with --commit which one it is") from err


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--json-out", type=Path, help="append one line per figure to this file")
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    parser.add_argument("--repeats", type=int, default=7, help="a figure is the median of as many")


def run_each(work: Iterable[tuple[str, Callable[[], None]]], device: str) -> list[str]:
    """Do all of ``work``; the names of what failed. A failure is logged and must not cost the figures of the others."""
    failed = []
    for name, measure in work:
        try:
            measure()
            continue
        except Exception:  # whatever a kernel or an engine raises
            logger.exception("%s failed", name)
            failed.append(name)
        free_memory(device)  # not earlier: the exception holds on to what it passed through
    return failed


def finish(report: Report, failed: Sequence[str]) -> int:
    """Print the run's figures and failures; the status to exit with."""
    print(table(report.lines))
    for name in failed:
        print(f"failed: {name}")
    return 1 if failed else 0


# --------------------------------------------------------------------------------------------------------------- timing


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def free_memory(device: str) -> None:
    """Give what nobody holds any more back to the device."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def time_call(call: Callable[[], object], device: str, repeats: int) -> float:
    """Median seconds on the clock of the host, the device's work included."""
    seconds = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def time_device(call: Callable[[], object], device: str, repeats: int) -> float:
    """Median seconds between two marks in the device's stream, around one call."""
    if device != "cuda":
        return time_call(call, device, repeats)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    seconds = []
    for _ in range(repeats):
        begin.record()
        call()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(seconds)


def time_kernels(calls: Sequence[Callable[[], object]], device: str, repeats: int, launches: int = 20) -> float:
    """Median seconds of one call, in a CUDA graph that runs ``calls`` in turn at least ``launches`` times.

    Give as many calls over distinct weights as it takes to find none of them in the cache.
    """
    rounds = -(-launches // len(calls))
    if device != "cuda":
        calls[0]()
        return time_call(lambda: [call() for call in calls], device, repeats) / len(calls)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            for call in calls:
                call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    return time_device(graph.replay, device, repeats) / (rounds * len(calls))


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel that ran: its name, and when, in microseconds."""

    name: str
    start_us: float
    end_us: float


def trace_kernels(call: Callable[[], object], device: str) -> list[Kernel]:
    """Every kernel of one call, in order of start; copies and fills are not kernels. Empty on a CPU."""
    if device != "cuda":
        return []
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        call()
        torch.cuda.synchronize()
    found = [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in prof.events()
        if event.device_type == DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset"))
    ]
    return sorted(found, key=lambda kernel: kernel.start_us)


# --------------------------------------------------------------------------------------------------------------- limits


@dataclass(frozen=True, slots=True)
class Limits:
    """What this device does at best, measured."""

    bytes_per_s: float
    flops_per_s: float


def measure_limits(device: str, dtype: torch.dtype) -> Limits:
    """Of several ways to read several GB once the fastest, and of the vendor's matrix products a large one."""
    limits = _measure_limits(device, dtype)
    free_memory(device)
    return limits


def _measure_limits(device: str, dtype: torch.dtype) -> Limits:
    big = device == "cuda"
    rows, width, square = (1 << 19, 4096, 8192) if big else (1 << 12, 512, 512)
    memory = torch.empty(rows, width, dtype=dtype, device=device).uniform_(-1, 1)
    vectors = torch.ones(8, width, dtype=dtype, device=device)
    out = torch.empty(8, rows, dtype=dtype, device=device)
    reads = [
        [lambda: memory.sum()],
        [lambda: F.linear(vectors[:1], memory)],
        [lambda: torch.mm(vectors, memory.t(), out=out)],
    ]
    seconds = min(time_kernels(calls, device, repeats=5, launches=2) for calls in reads)
    a, b = (torch.randn(square, square, dtype=dtype, device=device) for _ in range(2))
    product = time_kernels([lambda: torch.mm(a, b)], device, repeats=5, launches=5)
    return Limits(memory.numel() * memory.element_size() / seconds, 2 * square**3 / product)
