"""Accept length by task, depth, kind of draft and temperature: what drafts are worth, whatever they cost.

Counts do not depend on the machine's speed, only on the weights, the questions and the seeds, so one run is enough.

    python benchmark/bench_accept_length.py                          # the shipped pair, steps 1 to 7
    python benchmark/bench_accept_length.py --steps 3 --tasks code   # one depth, one task
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import RESULTS, Record, append_records, format_table, run_facts

from oracle.corpus_prompts import prompt_ids, questions
from sglang import Engine
from sglang.srt.utils.hf_transformers.hub import embedded_assistant, resolve_model_path
from sglang.srt.utils.hf_transformers.tokenizer import load_tokenizer

TASKS = ("count", "code", "story", "recall", "arithmetic", "copy_passage")
KINDS: Mapping[str, dict[str, Any]] = {
    "chain": {},
    "topk2": {"speculative_eagle_topk": 2},
    "topk3": {"speculative_eagle_topk": 3},
    "sampled": {"speculative_use_rejection_sampling": True},
}
SEED = 7
# (task or "all", kind, temperature, steps) -> tokens per round
Lengths = dict[tuple[str, str, float, int], float]


def accept_length(outputs: Sequence[Mapping[str, Any]]) -> float:
    """Tokens per round; the first token of an answer comes from its prefill."""
    metas = [out["meta_info"] for out in outputs]
    return 1 + sum(m["spec_accept_token_num"] for m in metas) / sum(m["spec_verify_ct"] for m in metas)


def measure(
    engine: Engine, prompts: Mapping[str, list[list[int]]], temperature: float, tokens: int
) -> dict[str, float]:
    """By task, and for all of them together."""
    found, together = {}, []
    for task, asked in prompts.items():
        params = [
            {"temperature": temperature, "sampling_seed": seed, "max_new_tokens": tokens} for seed in range(len(asked))
        ]
        outputs = engine.generate(input_ids=asked, sampling_params=params)
        found[task] = accept_length(outputs)
        together += outputs
    found["all"] = accept_length(together)
    return found


def run_benchmark(args: argparse.Namespace) -> Lengths:
    target = resolve_model_path(args.model_path, None, role="model")
    draft = args.draft_model_path or embedded_assistant(str(args.model_path))
    tokenizer = load_tokenizer(target, trust_remote_code=False)
    prompts = {
        task: [prompt_ids(tokenizer, question.text) for question in questions(task, args.prompts, SEED)]
        for task in args.tasks
    }
    lengths: Lengths = {}
    for steps in args.steps:
        for kind in args.kinds:
            options = {
                "speculative_algorithm": "FROZEN_KV_MTP",
                "speculative_draft_model_path": str(draft),
                "speculative_num_steps": steps,
                **KINDS[kind],
            }
            with Engine(model_path=str(target), dtype="float32", device=args.device, **options) as engine:
                for temperature in args.temperatures:
                    if kind == "sampled" and temperature == 0.0:
                        continue  # greedy requests never sample
                    for task, length in measure(engine, prompts, temperature, args.tokens).items():
                        lengths[task, kind, temperature, steps] = length
    return lengths


def report(lengths: Lengths, steps: Sequence[int]) -> str:
    """One row per task, temperature and kind; one column per depth."""
    rows = sorted({(task, temperature, kind) for task, kind, temperature, _ in lengths})
    cells = [
        [task, kind, f"{temperature:g}", *(f"{lengths[task, kind, temperature, n]:.2f}" for n in steps)]
        for task, temperature, kind in rows
    ]
    return format_table(["task", "drafts", "temperature", *(f"{n} steps" for n in steps)], cells)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default="tiny-gemma4")
    parser.add_argument("--draft-model-path", type=Path, help="default: the assistant that ships with the model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, nargs="+", default=list(range(1, 8)))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--prompts", type=int, default=8, help="per task")
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of an answer")
    parser.add_argument("--out", type=Path, default=RESULTS / "accept_length.jsonl")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    facts = asdict(run_facts(args.device))
    lengths = run_benchmark(args)
    print(report(lengths, args.steps))
    append_records(
        args.out,
        [
            Record(
                bench="accept_length",
                model=Path(args.model_path).name,
                task=task,
                batch=args.prompts,
                metric=f"{kind}_steps{steps}_temperature{temperature:g}",
                value=round(length, 4),
                unit="tokens/round",
                versus=None,
                ratio=None,
                **facts,
            )
            for (task, kind, temperature, steps), length in lengths.items()
        ],
    )


if __name__ == "__main__":
    main()
