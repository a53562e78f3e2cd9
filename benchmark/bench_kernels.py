"""Every kernel on the shapes of the published sizes, against its floor and against the vendor's operation.

    python benchmark/bench_kernels.py --model e4b --rows 1 4
    python benchmark/bench_kernels.py --model 31b --family attention --rows 8 --context-len 32768

The floor is the longest of: what must be moved at the measured read bandwidth, what must be computed at the measured
matrix rate, and the launch of an empty kernel. Calls run inside a CUDA graph over enough distinct inputs that none is
found in the L2 cache.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from gpu_report import Limits, Report, add_common_arguments, finish, measure_limits, run_each, time_kernels
from kernel_cases import FAMILIES, Bench, Case, Inputs
from model_shapes import MODELS, make_pair

# the L2 cache holds about 50 MB
ROTATED_BYTES = 200e6
MOST_COPIES, MOST_INPUT_BYTES = 24, 40e9


def launch_seconds(device: str, repeats: int) -> float:
    """An element-wise kernel over one number, in a graph."""
    number = torch.zeros(1, device=device)
    return time_kernels([lambda: number.add_(1.0)], device, repeats)


def floor_seconds(case: Case, limits: Limits, launch: float) -> float:
    return max(case.num_bytes / limits.bytes_per_s, case.flops / limits.flops_per_s, launch)


def make_inputs(case: Case, device: str) -> list[Inputs]:
    """As many sets as it takes to read ``ROTATED_BYTES`` before the first comes round again."""
    if device != "cuda":
        return [case.make()]
    before = torch.cuda.memory_allocated()
    inputs = [case.make()]
    size = torch.cuda.memory_allocated() - before
    copies = min(MOST_COPIES, -(-int(ROTATED_BYTES) // int(case.num_bytes)), int(MOST_INPUT_BYTES) // max(size, 1))
    return inputs + [case.make() for _ in range(copies - 1)]


def measure_case(case: Case, bench: Bench, report: Report, floor: float, repeats: int) -> None:
    """Microseconds of the kernel against its floor, and against the vendor's operation on the same inputs."""
    inputs = make_inputs(case, bench.device)
    with torch.inference_mode():
        ours = time_kernels([lambda i=i: case.run(*i) for i in inputs], bench.device, repeats)  # type: ignore[misc]
        where = {"batch": case.batch, "context": case.context}
        report.add(bench.pair.name, case.kernel, ours * 1e6, "us", limit=floor * 1e6, **where)
        if case.vendor is not None:
            calls = [lambda i=i: case.vendor(*i) for i in inputs]  # type: ignore[misc]
            vendor = time_kernels(calls, bench.device, repeats)
            report.add(bench.pair.name, f"{case.kernel} against vendor", ours * 1e6, "us", limit=vendor * 1e6, **where)


def all_cases(
    args: argparse.Namespace, report: Report, limits: Limits, folder: Path
) -> Iterator[tuple[str, Callable[[], None]]]:
    """(name, how to measure it) of every case asked for."""
    launch = launch_seconds(args.device, args.repeats)
    report.add("any", "empty kernel in a graph", launch * 1e6, "us")
    for name in args.model:
        pair = make_pair(name, folder)
        for rows in args.rows:
            bench = Bench(pair, rows, args.device, getattr(torch, args.dtype), tuple(args.context_len))
            for case in (case for family in args.family for case in FAMILIES[family](bench)):
                floor = floor_seconds(case, limits, launch)
                what = f"{name}: {case.kernel} with {rows} rows"
                yield what, partial(measure_case, case, bench, report, floor, args.repeats)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["e4b", "31b"], choices=MODELS)
    parser.add_argument("--family", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 8, 16], help="rows, or requests of attention")
    parser.add_argument("--context-len", nargs="+", type=int, default=[1024], help="of attention")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    add_common_arguments(parser)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    report, limits = Report("kernels", args), measure_limits(args.device, getattr(torch, args.dtype))
    report.add_limits(limits)
    with tempfile.TemporaryDirectory() as folder:
        failed = run_each(all_cases(args, report, limits, Path(folder)), args.device)
    return finish(report, failed)


if __name__ == "__main__":
    sys.exit(main())
