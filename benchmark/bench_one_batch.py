"""Time of one target pass and of one speculative round at the five published sizes, on random weights.

    python benchmark/bench_one_batch.py --model e4b                              # batch 1, 1k context
    python benchmark/bench_one_batch.py --model e4b 31b --batch-size 1 8 32 --context-len 1024 16384 --accept-len 3
    python benchmark/bench_one_batch.py --model e2b --batch-size --prefill-len 2048 8192 32768

Figures are medians of whole steps of the engine, scheduling and reading the tokens included. Percentages are of the
read bandwidth and matrix rate that the device reaches in the same run. Acceptance is simulated with --accept-len.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from gpu_report import (
    Limits,
    Report,
    add_common_arguments,
    finish,
    free_memory,
    measure_limits,
    run_each,
    synchronize,
    time_call,
    trace_kernels,
)
from model_shapes import MODELS, Pair, Traffic, make_pair, parameter_count, pass_traffic, prefill_flops, round_traffic
from timed import ANSWER, Timed, simulated_acceptance

WARM_UP = 3
# left free beside weights and KV: activations of a prefill chunk, graphs, the libraries' workspaces
SPARE_BYTES = 14e9


@dataclass(frozen=True, slots=True)
class Setup:
    """What the figures of one run have in common."""

    args: argparse.Namespace
    report: Report
    limits: Limits

    @property
    def itemsize(self) -> int:
        return torch.empty(0, dtype=getattr(torch, self.args.dtype)).element_size()

    @property
    def variant(self) -> str:
        """What the names of figures say of a server that is not started as usual."""
        largest = self.args.piecewise_cuda_graph_max_tokens
        graphs = "" if largest is None else f", graphs of {largest}"
        return (", deterministic" if self.args.enable_deterministic_inference else "") + graphs

    def adder(self, pair: Pair, **where: int) -> Callable[..., None]:
        """``add(metric, value, unit, limit=None)`` for the figures of one ``where``."""

        def add(metric: str, value: float, unit: str, limit: float | None = None) -> None:
            self.report.add(pair.name, metric + self.variant, value, unit, limit=limit, **where)

        return add


def kv_tokens(args: argparse.Namespace, batch: int, context: int) -> int:
    return batch * (context + 2 * ANSWER)


def cells_that_fit(setup: Setup, pair: Pair) -> list[tuple[int, int]]:
    """(batch, context) of every cell whose KV fits beside the weights; the others are named."""
    args = setup.args
    cells = [(batch, context) for context in args.context_len for batch in args.batch_size]
    if args.device == "cpu":
        return cells
    weights = (parameter_count(pair.target) + parameter_count(pair.assistant)) * setup.itemsize
    free = torch.cuda.mem_get_info()[0] - weights - SPARE_BYTES
    per_token = pair.target.text.kv_layout.elements_per_token * setup.itemsize
    fit = [cell for cell in cells if kv_tokens(args, *cell) * per_token <= free]
    for batch, context in sorted(set(cells) - set(fit)):
        need = kv_tokens(args, batch, context) * per_token / 1e9
        print(f"{pair.name}: {batch} x {context} tokens need {need:.0f} GB of KV, {free / 1e9:.0f} are left: skipped")
    return fit


def build(setup: Setup, pair: Pair, num_steps: int, cells: list[tuple[int, int]]) -> Timed:
    args = setup.args
    tokens = max([kv_tokens(args, *cell) for cell in cells] + [length + ANSWER for length in args.prefill_len])
    batches = sorted({batch for batch, _ in cells} | {1})
    return Timed(
        pair, num_steps, args.device, args.dtype, batches, tokens,
        context_length=args.context_length,
        enable_deterministic_inference=args.enable_deterministic_inference,
        piecewise_cuda_graph_max_tokens=args.piecewise_cuda_graph_max_tokens,
        disable_piecewise_cuda_graph=not args.prefill_len,
    )  # fmt: skip


def step_seconds(timed: Timed, repeats: int) -> tuple[float, float]:
    """Median seconds of a step, and tokens gained per step and request."""
    for _ in range(WARM_UP):
        timed.step()
    synchronize(timed.device)
    before, seconds = timed.num_tokens(), []
    for _ in range(repeats):
        start = time.perf_counter()
        timed.step()
        seconds.append(time.perf_counter() - start)
    gained = timed.num_tokens() - before
    return statistics.median(seconds), gained / repeats / len(timed.scheduler.running.reqs)


def measure_cell(setup: Setup, pair: Pair, timed: Timed, batch: int, context: int) -> None:
    """Time, rate and launches of a step; of a round also its parts."""
    steps, limits = timed.num_steps, setup.limits
    timed.start(batch, context)
    seconds, gained = step_seconds(timed, setup.args.repeats)
    traffic = step_traffic(setup, pair, steps, batch, context)

    add = setup.adder(pair, batch=batch, context=context, steps=steps)
    what, limit = "round" if steps else "pass", traffic.total / limits.bytes_per_s * 1e3
    add(f"{what} time", seconds * 1e3, "ms", limit)
    add(f"{what} throughput", batch * gained / seconds, "tokens/s")
    add(f"{what} bytes", traffic.total / 1e9, "GB")
    kernels = trace_kernels(timed.step, timed.device)
    if kernels:
        add(f"{what} kernel launches", len(kernels), "launches")
        add(f"{what} kernels busy", sum(k.end_us - k.start_us for k in kernels) / 1e3, "ms")
    parts = timed.device_seconds(setup.args.repeats)
    whole = parts.pop("step")
    add(f"{what} time on the device", whole * 1e3, "ms", limit)
    if steps:
        add("accept length", gained, "tokens")
        verify_bytes = pass_traffic(pair.target, batch, steps + 1, context, setup.itemsize).total
        for (name, part), num_bytes in zip(parts.items(), (traffic.total - verify_bytes, verify_bytes), strict=True):
            add(f"{name} time", part * 1e3, "ms", num_bytes / limits.bytes_per_s * 1e3)
        verify = parts["target verify"]
        add("rest time", max(0.0, whole - sum(parts.values())) * 1e3, "ms")
        add("share of the round outside verify", max(0.0, 1.0 - verify / whole), "share")
    timed.stop()


def step_traffic(setup: Setup, pair: Pair, steps: int, batch: int, context: int) -> Traffic:
    if steps:
        return round_traffic(pair, steps, batch, context, setup.itemsize)
    return pass_traffic(pair.target, batch, 1, context, setup.itemsize)


def measure_prefill(setup: Setup, pair: Pair, timed: Timed, length: int) -> None:
    """Tokens per second and share of the matrix rate; where layers share KV, also what skipping their rows gains."""
    text = pair.target.text

    def seconds(skip: bool) -> float:
        with nullcontext() if skip else timed.all_rows():
            timed.prefill(length)
            return time_call(lambda: timed.prefill(length), timed.device, min(3, setup.args.repeats))

    add = setup.adder(pair, context=length)
    skipping = seconds(True)
    add("prefill throughput", length / skipping, "tokens/s")
    add("prefill rate", prefill_flops(text, length) / skipping / 1e12, "TFLOP/s", setup.limits.flops_per_s / 1e12)
    if text.shares_kv:
        add("prefill throughput against all rows", length / skipping, "tokens/s", length / seconds(False))


def measure_model(setup: Setup, pair: Pair) -> None:
    args = setup.args
    cells = cells_that_fit(setup, pair)
    steps = pair.num_steps if args.num_steps is None else args.num_steps
    variants = [0] if steps == 0 or not cells else [0, steps]
    for num_steps in variants:
        with simulated_acceptance(args.accept_len if num_steps else None):
            timed = build(setup, pair, num_steps, cells)
        for batch, context in cells:
            measure_cell(setup, pair, timed, batch, context)
        if num_steps == 0:
            for length in args.prefill_len:
                measure_prefill(setup, pair, timed, length)
        del timed
        free_memory(args.device)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["e4b"], choices=MODELS)
    parser.add_argument("--batch-size", nargs="*", type=int, default=[1])
    parser.add_argument("--context-len", nargs="+", type=int, default=[1024], help="committed tokens per request")
    parser.add_argument("--num-steps", type=int, help="drafts per round; 0: passes only; default: the model's own")
    parser.add_argument("--accept-len", type=float, help="simulated tokens per round; default: what is accepted")
    parser.add_argument("--prefill-len", nargs="*", type=int, default=[], help="also measure prompts of these lengths")
    parser.add_argument("--context-length", type=int, help="longest sequence to start for; default: the model's")
    parser.add_argument("--enable-deterministic-inference", action="store_true", help="as of the server")
    parser.add_argument("--piecewise-cuda-graph-max-tokens", type=int, help="as of the server")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    add_common_arguments(parser)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    setup = Setup(args, Report("one_batch", args), measure_limits(args.device, getattr(torch, args.dtype)))
    setup.report.add_limits(setup.limits)
    with tempfile.TemporaryDirectory() as folder:
        pairs = [make_pair(name, Path(folder)) for name in args.model]
        failed = run_each(((pair.name, partial(measure_model, setup, pair)) for pair in pairs), args.device)
    return finish(setup.report, failed)


if __name__ == "__main__":
    sys.exit(main())
