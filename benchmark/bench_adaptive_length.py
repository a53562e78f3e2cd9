"""Adaptive draft length against fixed lengths and no speculation, in one run.

Greedy answers of the same questions; repetitions of all contenders are interleaved and medians reported. Time is the
processor's by default, so that a busy machine does not decide.

    python benchmark/bench_adaptive_length.py
    python benchmark/bench_adaptive_length.py --batch 16 --tasks arithmetic --fixed 1 4 --clock wall
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch
from bench_speculative import PLAIN, Cell, Contender, Run, measure, merge_tasks
from common import format_table

from oracle.corpus_prompts import prompt_ids, questions
from sglang import Engine
from sglang.srt.utils.hf_transformers.hub import resolve_model_path
from sglang.srt.utils.hf_transformers.tokenizer import load_tokenizer

MODEL, SEED, ADAPTIVE = "tiny-gemma4", 7, "adaptive"
CLOCKS: dict[str, Callable[[], float]] = {"cpu": time.process_time, "wall": time.perf_counter}


def contender(engine: Engine, clock: Callable[[], float]) -> Contender:
    def run(prompts: list[list[int]], batch: int, num_tokens: int) -> Run:
        params, start = {"temperature": 0.0, "max_new_tokens": num_tokens}, clock()
        outputs = []
        for first in range(0, len(prompts), batch):
            outputs += engine.generate(input_ids=prompts[first : first + batch], sampling_params=params)
        verify_ct = sum(out["meta_info"].get("spec_verify_ct", 0) for out in outputs)
        return Run([list(out["output_ids"]) for out in outputs], clock() - start, verify_ct)

    return run


def row_of(cell: Cell, names: list[str]) -> list[str]:
    rates = {name: cell.throughput(name) for name in names}
    best = max((name for name in names if name != ADAPTIVE), key=lambda name: rates[name])
    equal = all(cell.equal_share(name, PLAIN) == 1.0 for name in names)
    shares = [f"{rates[name]:.0f}" if name == PLAIN else f"{rates[name] / rates[PLAIN]:.2f}" for name in names]
    return [str(cell.batch), cell.task, *shares, f"{rates[ADAPTIVE] / rates[best]:.2f} ({best})", str(equal)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--tasks", nargs="+", default=["count", "arithmetic", "story"])
    parser.add_argument("--fixed", nargs="*", type=int, default=[1, 2, 4, 7])
    parser.add_argument("--most", type=int, default=7, help="longest adaptive length")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=100, help="most tokens per answer")
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(resolve_model_path(MODEL, None, role="model"), trust_remote_code=False)
    common = {"model_path": MODEL, "device": "cpu", "disable_radix_cache": True, "log_level": "error"}
    common["max_running_requests"] = max(args.batch)
    spec = {"speculative_algorithm": "FROZEN_KV_MTP"}
    engines = {PLAIN: Engine(**common)}
    engines |= {f"fixed {n}": Engine(**common, **spec, speculative_num_steps=n) for n in args.fixed}
    engines[ADAPTIVE] = Engine(**common, **spec, speculative_num_steps=args.most, speculative_adaptive=True)
    contenders = {name: contender(engine, CLOCKS[args.clock]) for name, engine in engines.items()}
    rows = []
    for batch in args.batch:
        cells = []
        for task in args.tasks:
            asked = questions(task, max(4, batch), SEED)
            prompts = [prompt_ids(tokenizer, question.text) for question in asked]
            cells.append(measure(contenders, prompts, task, batch, args))
        rows += [row_of(cell, list(engines)) for cell in (*cells, merge_tasks(cells, batch))]
        print(f"measured batch {batch}", file=sys.stderr, flush=True)
    print(format_table(["batch", "task", *engines, "adaptive/best", "equal"], rows))
    print("plain in tokens/s, the others as a multiple of it")
    for engine in engines.values():
        engine.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
