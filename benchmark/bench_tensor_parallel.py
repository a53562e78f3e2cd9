"""What a second GPU brings: passes and speculative rounds on ranks that share a model, against one rank alone.

    python benchmark/bench_tensor_parallel.py --model 31b 26b-a4b e4b          # 1 and 2 ranks, batches 1, 8 and 32
    python benchmark/bench_tensor_parallel.py --model 31b --tp-size 1 4 --batch-size 1

Weights and contexts are random, acceptance is simulated. Figures of the first --tp-size are the limit of the others',
so that a ratio is a speed-up. Times are medians of whole steps of the engine on rank 0. What the collectives take is
counted among the kernels of a step, and has the wait for the slower rank in it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from bench_one_batch import kv_tokens, step_seconds
from gpu_report import Report, add_common_arguments, finish, free_memory, run_each, time_device, trace_kernels
from model_shapes import MODELS, Pair, make_pair
from timed import Timed, simulated_acceptance

from fixtures.tp_ranks import run_ranks
from sglang.srt.distributed.parallel_state import TpGroup

# how the kernels of collectives are called: NCCL's, and those that read other ranks' memory
COLLECTIVES = ("nccl", "all_reduce")
# after one in which the ranks meet
TRACED_STEPS = 3
# for the ranks of one model
DEADLINE_S = 240.0


@dataclass(frozen=True, slots=True)
class Work:
    """What the ranks of one model are asked for. ``variants``: drafts of a round, 0 for passes."""

    args: argparse.Namespace
    pair: Pair
    variants: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Collectives:
    """Of one step: how many, and microseconds of them and of all kernels."""

    number: int
    busy_us: float
    all_us: float


@dataclass(frozen=True, slots=True)
class Cell:
    """One batch size. ``gained``: tokens per step and request; ``peak_bytes``: of all tensors on the rank's device."""

    num_steps: int
    batch: int
    seconds: float
    device_seconds: float
    gained: float
    collectives: Collectives | None
    weight_bytes: int
    peak_bytes: int

    @property
    def throughput(self) -> float:
        """Tokens per second, of all requests."""
        return self.batch * self.gained / self.seconds


def measure_rank(group: TpGroup, work: Work) -> list[Cell]:
    """All ranks do the same; each has its own figures."""
    args, cells = work.args, list[Cell]()
    tokens = kv_tokens(args, max(args.batch_size), args.context_len)
    for num_steps in work.variants:
        if args.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        with simulated_acceptance(args.accept_len if num_steps else None):
            timed = Timed(work.pair, num_steps, args.device, args.dtype, args.batch_size, tokens, group)
        cells += [measure_cell(timed, args, batch) for batch in args.batch_size]
        del timed
        free_memory(args.device)
    return cells


def measure_cell(timed: Timed, args: argparse.Namespace, batch: int) -> Cell:
    timed.start(batch, args.context_len)
    seconds, gained = step_seconds(timed, args.repeats)
    run = timed.device_program()
    cell = Cell(
        num_steps=timed.num_steps,
        batch=batch,
        seconds=seconds,
        device_seconds=time_device(run, timed.device, args.repeats),
        gained=gained,
        collectives=collectives_of(timed.device, run),
        weight_bytes=timed.weight_bytes,
        peak_bytes=torch.cuda.max_memory_allocated() if args.device == "cuda" else 0,
    )
    timed.stop()
    return cell


def collectives_of(device: str, run: Callable[[], None]) -> Collectives | None:
    """None where there are no kernels. The first step is left out: tracing does not begin at once on all ranks."""

    def steps() -> None:
        for _ in range(1 + TRACED_STEPS):
            run()

    kernels = trace_kernels(steps, device)
    if not kernels:
        return None
    kernels = kernels[len(kernels) // (1 + TRACED_STEPS) :]
    found = [kernel for kernel in kernels if any(word in kernel.name.lower() for word in COLLECTIVES)]
    busy, whole = (sum(kernel.end_us - kernel.start_us for kernel in some) for some in (found, kernels))
    return Collectives(round(len(found) / TRACED_STEPS), busy / TRACED_STEPS, whole / TRACED_STEPS)


def report_cell(report: Report, work: Work, size: int, cell: Cell, alone: Cell) -> None:
    """``alone``: the same on the fewest ranks."""
    what, compare = "round" if cell.num_steps else "pass", alone is not cell
    kind = ", NCCL only" if size > 1 and work.args.disable_custom_all_reduce else ""

    def add(metric: str, value: float, unit: str, limit: float | None = None) -> None:
        where = {"batch": cell.batch, "context": work.args.context_len, "steps": cell.num_steps}
        report.add(work.pair.name, f"{metric}, tp {size}{kind}", value, unit, limit=limit if compare else None, **where)

    add(f"{what} time", cell.seconds * 1e3, "ms", alone.seconds * 1e3)
    add(f"{what} time on the device", cell.device_seconds * 1e3, "ms", alone.device_seconds * 1e3)
    add(f"{what} throughput", cell.throughput, "tokens/s", alone.throughput)
    if cell.num_steps:
        add("accept length", cell.gained, "tokens")
    if cell.collectives is not None:
        add(f"{what} collectives", cell.collectives.number, "launches")
        add(f"{what} collectives busy", cell.collectives.busy_us / 1e3, "ms")
        add(f"{what} share of kernel time in collectives", cell.collectives.busy_us / cell.collectives.all_us, "share")
    if cell.batch == work.args.batch_size[0]:
        add(f"{what} weights per rank", cell.weight_bytes / 1e9, "GB")
        if cell.peak_bytes:
            add(f"{what} memory per rank", cell.peak_bytes / 1e9, "GB")


def measure_model(args: argparse.Namespace, report: Report, pair: Pair) -> None:
    steps = pair.num_steps if args.num_steps is None else args.num_steps
    work = Work(args, pair, (0, steps) if steps else (0,))
    alone: list[Cell] = []
    for size in args.tp_size:
        custom = not args.disable_custom_all_reduce
        cells = run_ranks(size, measure_rank, work, {}, args.device, DEADLINE_S, custom)[0]
        alone = alone or cells
        for cell, least in zip(cells, alone, strict=True):
            report_cell(report, work, size, cell, least)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["31b"], choices=MODELS)
    parser.add_argument("--tp-size", nargs="+", type=int, default=[1, 2], help="ranks, each with a device")
    parser.add_argument("--batch-size", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--context-len", type=int, default=1024, help="committed tokens per request")
    parser.add_argument("--num-steps", type=int, help="drafts per round; 0: passes only; default: the model's own")
    parser.add_argument("--accept-len", type=float, default=2.5, help="simulated tokens per round")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--disable-custom-all-reduce", action="store_true", help="as of the server")
    add_common_arguments(parser)
    args = parser.parse_args(argv)
    if args.device == "cuda" and max(args.tp_size) > torch.cuda.device_count():
        parser.error(f"--tp-size {max(args.tp_size)} needs as many GPUs, there are {torch.cuda.device_count()}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    report = Report("tensor_parallel", args)
    with tempfile.TemporaryDirectory() as folder:
        pairs = [make_pair(name, Path(folder)) for name in args.model]
        failed = run_each(((pair.name, partial(measure_model, args, report, pair)) for pair in pairs), args.device)
    return finish(report, failed)


if __name__ == "__main__":
    sys.exit(main())
