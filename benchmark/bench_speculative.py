"""Throughput and accept length with speculation on and off, against transformers plain and assisted, in one run.

All four answer the same questions with the same weights in float32, greedily, and stop at the model's stop tokens.
Repetitions of the four are interleaved, so that a slow moment of the machine meets all of them; medians are reported.
Transformers' assisted generation takes one prompt at a time, so at a larger batch its prompts run one after another.

    python benchmark/bench_speculative.py   # the shipped pair, every task, batch 1 and 16
    python benchmark/bench_speculative.py --tasks count code --batch 1 --skip-transformers
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, Record, append_records, format_table, run_facts

from oracle.corpus_prompts import prompt_ids, questions
from oracle.hf_reference import HFReference
from sglang import Engine
from sglang.srt.utils.hf_transformers.hub import embedded_assistant, resolve_model_path
from sglang.srt.utils.hf_transformers.tokenizer import load_tokenizer

TASKS = ("count", "code", "story", "recall", "arithmetic", "copy_passage")
PROMPTS_AT_BATCH_1 = 4
LONGEST_PROMPT = 1024
SEED = 7

PLAIN, SPEC = "plain", "spec"
HF_PLAIN, HF_ASSISTED = "transformers_plain", "transformers_assisted"
# every throughput is divided by these of the same task and batch, where they were measured
VERSUS = {PLAIN: (HF_PLAIN, HF_ASSISTED), SPEC: (PLAIN, HF_PLAIN, HF_ASSISTED), HF_PLAIN: (), HF_ASSISTED: (HF_PLAIN,)}
THROUGHPUT, ACCEPT = "throughput", "accept_length"


@dataclass(frozen=True, slots=True)
class Run:
    """One pass over the prompts of a cell: tokens per prompt, wall seconds, and verification passes (0 when none)."""

    tokens: list[list[int]]
    seconds: float
    verify_ct: int

    @property
    def throughput(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds

    @property
    def accept_length(self) -> float:
        """Tokens per verification pass; the first token of each prompt comes from its prefill."""
        return sum(len(t) - 1 for t in self.tokens) / self.verify_ct


# a contender answers prompts: (prompts, requests in flight, most tokens) -> Run
Contender = Callable[[list[list[int]], int, int], Run]


@dataclass(frozen=True, slots=True)
class Cell:
    """All runs of one task and batch: ``runs[contender]`` has one entry per repetition."""

    task: str
    batch: int
    runs: dict[str, list[Run]]

    def throughput(self, name: str) -> float:
        return statistics.median(run.throughput for run in self.runs[name])

    def equal_share(self, one: str, other: str) -> float:
        """Share of prompts, over all repetitions, for which both generated the same tokens."""
        pairs = [
            a == b
            for mine, theirs in zip(self.runs[one], self.runs[other], strict=True)
            for a, b in zip(mine.tokens, theirs.tokens, strict=True)
        ]
        return sum(pairs) / len(pairs)


def engine_contender(engine: Engine) -> Contender:
    def run(prompts: list[list[int]], batch: int, num_tokens: int) -> Run:
        params = {"temperature": 0.0, "max_new_tokens": num_tokens}
        start = time.perf_counter()
        outputs: list[dict[str, Any]] = []
        for first in range(0, len(prompts), batch):
            outputs += engine.generate(input_ids=prompts[first : first + batch], sampling_params=params)
        seconds = time.perf_counter() - start
        verify_ct = sum(out["meta_info"].get("spec_verify_ct", 0) for out in outputs)
        return Run([list(out["output_ids"]) for out in outputs], seconds, verify_ct)

    return run


def hf_contender(hf: HFReference, stop_ids: Sequence[int], num_drafts: int | None) -> Contender:
    """Transformers; ``num_drafts`` None means without its assistant."""

    def run(prompts: list[list[int]], batch: int, num_tokens: int) -> Run:
        start = time.perf_counter()
        if num_drafts is None:
            groups = [prompts[i : i + batch] for i in range(0, len(prompts), batch)]
            tokens = [row for group in groups for row in hf.greedy(group, num_tokens, stop_ids)]
        else:
            tokens = [hf.assisted(prompt, num_tokens, num_drafts, stop_ids) for prompt in prompts]
        return Run(tokens, time.perf_counter() - start, 0)

    return run


def measure(
    contenders: dict[str, Contender], prompts: list[list[int]], task: str, batch: int, args: argparse.Namespace
) -> Cell:
    """Warm every contender up, then run all of them ``args.repeats`` times, taking turns."""
    for contender in contenders.values():
        contender(prompts[:batch], batch, min(args.tokens, 16))
    runs: dict[str, list[Run]] = {name: [] for name in contenders}
    for _ in range(args.repeats):
        for name, contender in contenders.items():
            runs[name].append(contender(prompts, batch, args.tokens))
    return Cell(task, batch, runs)


def merge_tasks(cells: Sequence[Cell], batch: int) -> Cell:
    """The runs of all tasks at one batch as if they were one: tokens and times add up per repetition."""
    same = [cell for cell in cells if cell.batch == batch]
    runs = {}
    for name in same[0].runs:
        repeats = zip(*(cell.runs[name] for cell in same), strict=True)
        runs[name] = [
            Run([t for r in rs for t in r.tokens], sum(r.seconds for r in rs), sum(r.verify_ct for r in rs))
            for rs in repeats
        ]
    return Cell("all", batch, runs)


def cell_records(cell: Cell, model: str, facts: dict[str, str]) -> list[Record]:
    def record(metric: str, value: float, unit: str, versus: str | None = None, base: float = 1.0) -> Record:
        ratio = None if versus is None else round(value / base, 3)
        return Record(
            "speculative", model, cell.task, cell.batch, metric, round(value, 3), unit, versus, ratio, **facts
        )

    records = []
    for name in cell.runs:
        value, metric = cell.throughput(name), f"{name}_{THROUGHPUT}"
        bases = [other for other in VERSUS[name] if other in cell.runs]
        records += [
            record(metric, value, "tokens/s", f"{other}_{THROUGHPUT}", cell.throughput(other)) for other in bases
        ] or [record(metric, value, "tokens/s")]
    records.append(record(f"{SPEC}_{ACCEPT}", statistics.median(r.accept_length for r in cell.runs[SPEC]), "tokens"))
    records.append(record("tokens_equal", cell.equal_share(SPEC, PLAIN), "share"))
    if HF_PLAIN in cell.runs:
        records.append(record("tokens_equal_transformers", cell.equal_share(SPEC, HF_PLAIN), "share"))
    return records


def report(cells: Sequence[Cell]) -> str:
    header = ["task", "batch", PLAIN, SPEC, "accept", "hf plain", "hf assisted", "plain/hf", "spec/hf", "spec/plain"]
    header += ["equal", "= hf"]
    rows = []
    for cell in cells:
        plain, spec = cell.throughput(PLAIN), cell.throughput(SPEC)
        accept = statistics.median(run.accept_length for run in cell.runs[SPEC])
        row = [cell.task, str(cell.batch), f"{plain:.0f}", f"{spec:.0f}", f"{accept:.2f}"]
        if HF_PLAIN in cell.runs:
            hf_plain, hf_assisted = cell.throughput(HF_PLAIN), cell.throughput(HF_ASSISTED)
            row += [f"{hf_plain:.0f}", f"{hf_assisted:.0f}", f"{plain / hf_plain:.2f}", f"{spec / hf_assisted:.2f}"]
            equal_hf = f"{cell.equal_share(SPEC, HF_PLAIN):.0%}"
        else:
            row += ["-"] * 4
            equal_hf = "-"
        rows.append([*row, f"{spec / plain:.2f}", f"{cell.equal_share(SPEC, PLAIN):.0%}", equal_hf])
    notes = "tokens/s, medians; plain/hf against hf plain, spec/hf against hf assisted; equal: tokens on = off"
    return f"{format_table(header, rows)}\n{notes}"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default="tiny-gemma4", help="name of a shipped model, a folder or a hub id")
    parser.add_argument("--draft", help="the assistant; default: the one that ships with the model")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), metavar="TASK")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 16], help="requests in flight")
    parser.add_argument("--num-steps", type=int, default=4, help="drafts per round, for the engine and transformers")
    parser.add_argument("--tokens", type=int, default=200, help="most tokens per answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, help="torch threads; default: torch's own choice, all cores")
    parser.add_argument("--skip-transformers", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS / "speculative.jsonl", help="file that lines go to")
    parser.add_argument("--no-output", action="store_true", help="print only")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    return parser.parse_args()


def draft_path(args: argparse.Namespace) -> Path:
    if args.draft is not None:
        return resolve_model_path(args.draft, None, role="draft")
    shipped = embedded_assistant(args.model_path)
    if shipped is None:
        raise ValueError(f"--model-path {args.model_path!r} has no shipped assistant: name one with --draft")
    return shipped


def run_benchmark(args: argparse.Namespace) -> list[Cell]:
    target, draft = resolve_model_path(args.model_path, None, role="model"), draft_path(args)
    tokenizer = load_tokenizer(target, trust_remote_code=False)
    common = {
        "model_path": str(target),
        "dtype": "float32",
        "device": args.device,
        "disable_radix_cache": True,  # repetitions must not get their prefill for nothing
        "max_running_requests": max(args.batch),
        # two engines share the device, and the first must not take all of its memory
        "max_total_tokens": max(args.batch) * (LONGEST_PROMPT + args.tokens),
    }
    spec = {
        "speculative_algorithm": "FROZEN_KV_MTP",
        "speculative_draft_model_path": str(draft),
        "speculative_num_steps": args.num_steps,
    }
    with Engine(**common) as plain_engine, Engine(**common, **spec) as spec_engine:
        contenders = {PLAIN: engine_contender(plain_engine), SPEC: engine_contender(spec_engine)}
        if not args.skip_transformers:
            hf = HFReference(target, draft, attn_implementation="sdpa", device=args.device)
            contenders[HF_PLAIN] = hf_contender(hf, hf.stop_token_ids, None)
            contenders[HF_ASSISTED] = hf_contender(hf, hf.stop_token_ids, args.num_steps)
        cells = []
        for batch in args.batch:
            for task in args.tasks:
                asked = questions(task, PROMPTS_AT_BATCH_1 if batch == 1 else batch, SEED)
                prompts = [prompt_ids(tokenizer, question.text) for question in asked]
                cells.append(measure(contenders, prompts, task, batch, args))
                print(f"measured {task} at batch {batch}", file=sys.stderr, flush=True)
        return cells + [merge_tasks(cells, batch) for batch in args.batch]


def main() -> int:
    args = parse_args()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    facts = asdict(run_facts(args.device))  # before the run: the commit may move while it lasts
    cells = run_benchmark(args)
    model = args.model_path if "/" not in args.model_path else Path(args.model_path).name
    print(report(cells))
    if not args.no_output:
        append_records(args.output, [record for cell in cells for record in cell_records(cell, model, facts)])
    different = [f"{cell.task} at batch {cell.batch}" for cell in cells if cell.equal_share(SPEC, PLAIN) < 1.0]
    if different:
        print(f"speculation changed tokens: {', '.join(different)}", file=sys.stderr)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
