"""Adaptive draft length against every fixed length and no speculation, in one run.

Greedy answers of the same questions. Contenders take turns after every few requests, and tasks after every turn, so
that a slow moment of the machine meets all contenders and the load keeps changing; ratios are medians over those of
each repetition. Time is the processor's by default, so that other processes count little. ``mixed`` has every kind of
question in every batch; the rows ``all`` are the tasks of a batch size together.

    python benchmark/bench_adaptive_length.py
    python benchmark/bench_adaptive_length.py --batch 16 --tasks arithmetic --fixed 1 4 --clock wall
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import chain

import torch
from bench_speculative import PLAIN, SEED, TASKS, THROUGHPUT, Cell, Contender, Run, merge_tasks
from common import RESULTS, Record, append_records, format_table, run_facts

from oracle.corpus_prompts import prompt_ids, questions
from sglang import Engine
from sglang.srt.utils.hf_transformers.hub import resolve_model_path
from sglang.srt.utils.hf_transformers.tokenizer import load_tokenizer

MODEL, ADAPTIVE, MIXED, ALL = "tiny-gemma4", "adaptive", "mixed", "all"
OUTPUT = RESULTS / "adaptive.jsonl"
LEAST_PROMPTS = 4
CLOCKS: dict[str, Callable[[], float]] = {"cpu": time.process_time, "wall": time.perf_counter}


def contender(engine: Engine, clock: Callable[[], float]) -> Contender:
    def run(prompts: list[list[int]], batch: int, num_tokens: int) -> Run:
        params, start = {"temperature": 0.0, "max_new_tokens": num_tokens}, clock()
        outputs = engine.generate(input_ids=prompts, sampling_params=params)
        seconds = clock() - start
        verify_ct = sum(out["meta_info"].get("spec_verify_ct", 0) for out in outputs)
        return Run([list(out["output_ids"]) for out in outputs], seconds, verify_ct)

    return run


def texts_of(task: str, num: int) -> list[str]:
    if task != MIXED:
        return [question.text for question in questions(task, num, SEED)]
    each = [questions(name, -(-num // len(TASKS)), SEED + 1) for name in TASKS]
    return [question.text for question in chain.from_iterable(zip(*each, strict=True))][:num]


def measure(
    contenders: dict[str, Contender], prompts: dict[str, list[list[int]]], batch: int, args: argparse.Namespace
) -> list[Cell]:
    """Every task at one batch size."""
    cells = [Cell(task, batch, {name: [] for name in contenders}) for task in prompts]
    names = list(contenders)
    for repeat in range(-1, args.repeats):  # the first is for warmth
        for cell in cells:
            asked, found = prompts[cell.task], dict[str, list[Run]]()
            for first in range(0, len(asked), batch):
                names = [*names[1:], names[0]]
                for name in names:
                    run = contenders[name](asked[first : first + batch], batch, 16 if repeat < 0 else args.tokens)
                    found.setdefault(name, []).append(run)
            if repeat >= 0:
                for name, runs in found.items():
                    cell.runs[name].append(together(runs))
    return cells


def together(runs: list[Run]) -> Run:
    tokens = [row for run in runs for row in run.tokens]
    return Run(tokens, sum(run.seconds for run in runs), sum(run.verify_ct for run in runs))


def ratio(cell: Cell, name: str, base: str) -> float:
    """Of throughputs. Both took turns in each repetition, so what slowed one slowed the other: by repetition."""
    pairs = zip(cell.runs[name], cell.runs[base], strict=True)
    return statistics.median(run.throughput / other.throughput for run, other in pairs)


def best_fixed(cell: Cell) -> str:
    return max((name for name in cell.runs if name != ADAPTIVE), key=lambda name: ratio(cell, name, PLAIN))


def row_of(cell: Cell) -> list[str]:
    best, fixed = best_fixed(cell), [name for name in cell.runs if name != PLAIN]
    equal = all(cell.equal_share(name, PLAIN) == 1.0 for name in fixed)
    shares = [f"{cell.throughput(PLAIN):.0f}", *(f"{ratio(cell, name, PLAIN):.2f}" for name in fixed)]
    accept = statistics.median(run.accept_length for run in cell.runs[ADAPTIVE])
    end = [f"{accept:.2f}", best, *(f"{ratio(cell, ADAPTIVE, base):.3f}" for base in (best, PLAIN))]
    return [str(cell.batch), cell.task, *shares, *end, str(equal)]


def report(cells: list[Cell]) -> str:
    header = ["batch", "task", *cells[0].runs, "accept", "best", "adaptive/best", "adaptive/off", "equal"]
    overall = [cell for cell in cells if cell.task == ALL]
    shares = [ratio(cell, ADAPTIVE, best_fixed(cell)) for cell in overall]
    off_overall, off_task = (min(ratio(cell, ADAPTIVE, PLAIN) for cell in found) for found in (overall, cells))
    lines = [
        format_table(header, [row_of(cell) for cell in cells if cell.task != ALL]),
        format_table(header, [row_of(cell) for cell in overall]),
        f"{PLAIN} in tokens/s, the others as a multiple of it; accept: tokens per round of {ADAPTIVE}",
        f"adaptive against the best fixed setting, least of all batch sizes: {min(shares):.3f}",
        f"adaptive against no speculation, least of all batch sizes: {off_overall:.3f}",
        f"the same, least of all batch sizes and tasks: {off_task:.3f}",
    ]
    return "\n".join(lines)


def records_of(cell: Cell, facts: dict[str, str]) -> list[Record]:

    def record(name: str, base: str | None) -> Record:
        value, metric = cell.throughput(name), f"{name}_{THROUGHPUT}".replace(" ", "_")
        share = None if base is None else round(ratio(cell, name, base), 3)
        versus = None if base is None else f"{base}_{THROUGHPUT}".replace(" ", "_")
        return Record(
            "adaptive", MODEL, cell.task, cell.batch, metric, round(value, 3), "tokens/s", versus, share, **facts
        )

    records = [record(name, None if name == PLAIN else PLAIN) for name in cell.runs]
    return [*records, record(ADAPTIVE, best_fixed(cell))]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--tasks", nargs="+", default=["count", "arithmetic", "story", MIXED])
    parser.add_argument("--fixed", nargs="*", type=int, default=list(range(1, 8)))
    parser.add_argument("--most", type=int, default=7, help="longest adaptive length")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=100, help="most tokens per answer")
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="cpu")
    parser.add_argument("--append", action="store_true", help=f"add lines to {OUTPUT.name}")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    torch.set_num_threads(1)
    facts = asdict(run_facts("cpu"))  # before the run: the commit may move while it lasts
    tokenizer = load_tokenizer(resolve_model_path(MODEL, None, role="model"), trust_remote_code=False)
    common = {"model_path": MODEL, "device": "cpu", "disable_radix_cache": True, "log_level": "error"}
    common["max_running_requests"] = max(args.batch)
    spec = {"speculative_algorithm": "FROZEN_KV_MTP"}
    engines = {PLAIN: Engine(**common)}
    engines |= {f"fixed {n}": Engine(**common, **spec, speculative_num_steps=n) for n in args.fixed}
    engines[ADAPTIVE] = Engine(**common, **spec, speculative_num_steps=args.most, speculative_adaptive=True)
    contenders = {name: contender(engine, CLOCKS[args.clock]) for name, engine in engines.items()}
    gc.collect()
    gc.freeze()  # what lives for the whole run is not looked through in somebody's turn
    cells: list[Cell] = []
    for batch in args.batch:
        prompts = {
            task: [prompt_ids(tokenizer, text) for text in texts_of(task, max(LEAST_PROMPTS, batch))]
            for task in args.tasks
        }
        found = measure(contenders, prompts, batch, args)
        cells += [*found, merge_tasks(found, batch)]
        print(f"measured batch {batch}", file=sys.stderr, flush=True)
    print(report(cells))
    if args.append:
        append_records(OUTPUT, [record for cell in cells for record in records_of(cell, facts)])
    for engine in engines.values():
        engine.shutdown()
    return 0 if all(cell.equal_share(name, PLAIN) == 1.0 for cell in cells for name in cell.runs) else 1


if __name__ == "__main__":
    sys.exit(main())
