"""The whole engine on random weights: prompts in, tokens out, against another engine's figures and transformers.

    python benchmark/bench_engine.py                      # E4B and 31B, batch 1, 8, 32, and transformers
    python benchmark/bench_engine.py --model e4b --batch-size 1 --skip-transformers

Each request brings 1000 random tokens of its own and gets 256 greedy ones; prefill counts. A round drafts a chain of 3
and accepts 3.0 tokens on average, simulated. transformers answers the same prompts with random weights of the same
shape, fewer tokens each; on the shipped pair, whose weights are trained, it also runs its assisted generation.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

import bench_speculative
import torch
from gpu_report import Report, add_common_arguments, finish, free_memory, run_each, time_call
from model_shapes import MODELS, TINY, Pair, make_pair
from timed import engine_settings, simulated_acceptance
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from sglang import Engine

# sglang 0.5.17 on one H200 with random weights at these shapes and this work: (size, drafts, batch) -> tokens/s
FIELD: Mapping[tuple[str, int, int], float] = MappingProxyType(
    {
        ("e4b", 0, 1): 174,
        ("e4b", 3, 1): 226,
        ("e4b", 3, 8): 1692,
        ("e4b", 3, 32): 3963,
        ("31b", 0, 1): 53,
        ("31b", 0, 32): 807,
        ("31b", 3, 1): 92,
        ("31b", 3, 8): 482,
        ("31b", 3, 32): 684,
    }
)
# sizes that transformers also runs, and the most requests it is given
TRANSFORMERS_MODELS, TRANSFORMERS_BATCH = ("e4b", TINY), 8
TINY_TASKS = ["count", "code"]

Prompts = list[list[int]]


def random_prompts(batch: int, length: int, vocab_size: int) -> Prompts:
    draw = random.Random(batch)
    return [[draw.randrange(3, vocab_size) for _ in range(length)] for _ in range(batch)]


def make_engine(args: argparse.Namespace, pair: Pair, num_steps: int) -> Engine:
    settings = engine_settings(pair, num_steps, args.device, args.dtype, args.batch_size)
    slots = max(args.batch_size) * (args.input_len + args.output_len + 64)
    settings |= {"disable_radix_cache": True, "max_total_tokens": slots}
    with simulated_acceptance(args.accept_len if num_steps else None):
        return Engine(**settings)


def generate_seconds(engine: Engine, prompts: Prompts, num_tokens: int, args: argparse.Namespace) -> float:
    params = {"temperature": 0.0, "max_new_tokens": num_tokens, "ignore_eos": True}

    def run() -> None:
        outputs = engine.generate(input_ids=prompts, sampling_params=params)
        assert all(len(out["output_ids"]) == num_tokens for out in outputs)

    return time_call(run, args.device, args.repeats)


def measure_engine(args: argparse.Namespace, report: Report, pair: Pair) -> dict[tuple[int, int, int], float]:
    """Tokens per second by (drafts, batch, tokens per answer), reported against the field and plain decode."""
    found: dict[tuple[int, int, int], float] = {}
    lengths = [args.output_len]
    if pair.name in TRANSFORMERS_MODELS and not args.skip_transformers:
        lengths.append(args.transformers_len)
    for num_steps in (0, args.num_steps):
        with make_engine(args, pair, num_steps) as engine:
            for batch in args.batch_size:
                prompts = random_prompts(batch, args.input_len, pair.target.text.vocab_size)
                generate_seconds(engine, prompts, min(16, args.output_len), args)
                for length in lengths:
                    seconds = generate_seconds(engine, prompts, length, args)
                    found[num_steps, batch, length] = batch * length / seconds
                where = {"batch": batch, "context": args.input_len, "steps": num_steps}
                rate = found[num_steps, batch, args.output_len]
                field = FIELD.get((pair.name, num_steps, batch))
                metric = "throughput" if field is None else "throughput against sglang 0.5.17"
                report.add(pair.name, metric, rate, "tokens/s", limit=field, **where)
                if num_steps:
                    plain = found[0, batch, args.output_len]
                    report.add(pair.name, "throughput against no speculation", rate, "tokens/s", limit=plain, **where)
        free_memory(args.device)
    return found


def measure_model(args: argparse.Namespace, report: Report, pair: Pair) -> None:
    ours = measure_engine(args, report, pair)
    if pair.name in TRANSFORMERS_MODELS and not args.skip_transformers:
        measure_transformers(args, report, pair, ours)
        free_memory(args.device)


def build_transformers(pair: Pair, args: argparse.Namespace) -> PreTrainedModel:
    """The target's text model with random weights, made on the device."""
    config = AutoConfig.from_pretrained(pair.target_path).get_text_config()
    with torch.device(args.device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, args.dtype), attn_implementation="sdpa"
        ).eval()
    model.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=2, do_sample=False)
    return model


def measure_transformers(
    args: argparse.Namespace, report: Report, pair: Pair, ours: dict[tuple[int, int, int], float]
) -> None:
    """Our throughput over that of ``generate``, same prompts and as many tokens."""
    model = build_transformers(pair, args)
    length = args.transformers_len
    for batch in [batch for batch in args.batch_size if batch <= TRANSFORMERS_BATCH]:
        prompts = random_prompts(batch, args.input_len, pair.target.text.vocab_size)
        theirs = batch * length / transformers_seconds(model, prompts, length, args)
        for num_steps in (0, args.num_steps):
            rate = ours[num_steps, batch, length]
            where = {"batch": batch, "context": args.input_len, "steps": num_steps}
            report.add(pair.name, "throughput against transformers", rate, "tokens/s", limit=theirs, **where)


def transformers_seconds(model: PreTrainedModel, prompts: Prompts, length: int, args: argparse.Namespace) -> float:
    ids = torch.tensor(prompts, device=args.device)
    mask = torch.ones_like(ids)

    def run() -> None:
        model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=length, min_new_tokens=length)

    with torch.inference_mode():
        run()
        return time_call(run, args.device, min(2, args.repeats))


def measure_tiny(args: argparse.Namespace, report: Report) -> None:
    """The trained pair in float32 on real questions: acceptance is what it is, and transformers assists as well."""
    settings = argparse.Namespace(
        model_path=TINY,
        draft=None,
        tasks=TINY_TASKS,
        batch=[1, TRANSFORMERS_BATCH],
        num_steps=4,
        tokens=args.transformers_len,
        repeats=min(2, args.repeats),
        skip_transformers=False,
        device=args.device,
    )
    for cell in bench_speculative.run_benchmark(settings):
        if cell.task != "all":
            continue
        names = (
            ("plain", bench_speculative.PLAIN, bench_speculative.HF_PLAIN, 0),
            ("assisted", bench_speculative.SPEC, bench_speculative.HF_ASSISTED, settings.num_steps),
        )
        for theirs, ours, other, steps in names:
            rate, limit = cell.throughput(ours), cell.throughput(other)
            metric = f"trained, throughput against transformers {theirs}"
            report.add(TINY, metric, rate, "tokens/s", batch=cell.batch, steps=steps, limit=limit)
            share = cell.equal_share(ours, other)
            report.add(
                TINY, f"trained, tokens equal transformers {theirs}", share, "share", batch=cell.batch, steps=steps
            )


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["e4b", "31b", TINY], choices=MODELS)
    parser.add_argument("--batch-size", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--input-len", type=int, default=1000)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--num-steps", type=int, default=3, help="drafts per round")
    parser.add_argument("--accept-len", type=float, default=3.0, help="simulated tokens per round")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--skip-transformers", action="store_true")
    parser.add_argument("--transformers-len", type=int, default=64, help="tokens per answer when it is compared")
    add_common_arguments(parser)
    parser.set_defaults(repeats=2)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    report = Report("engine", args)
    with tempfile.TemporaryDirectory() as folder:
        pairs = [make_pair(name, Path(folder)) for name in args.model]
        work = [(pair.name, partial(measure_model, args, report, pair)) for pair in pairs]
        if TINY in args.model and not args.skip_transformers:
            work.append((f"{TINY}, trained", partial(measure_tiny, args, report)))
        failed = run_each(work, args.device)
    return finish(report, failed)


if __name__ == "__main__":
    sys.exit(main())
