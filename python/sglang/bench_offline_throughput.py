"""`python -m sglang.bench_offline_throughput`: tokens per second of an engine that gets all its prompts at once."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang.benchmark.datasets import Prompt, PromptMaker
from sglang.benchmark.options import add_dataset_options, check_dataset_options, json_object
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.tokenizer_manager import SchedulerDiedError
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang.srt.server_args_resolution import resolve_server_args
from sglang.srt.utils.hf_transformers.tokenizer import load_tokenizer
from sglang.srt.utils.log import configure_logger

_WIDTH = 50
_WARMUP_PROMPTS, _WARMUP_TOKENS = 16, 16


def run_benchmark(args: argparse.Namespace, server_args: ServerArgs) -> dict[str, Any]:
    """Run what ``parse_args`` returned, print the report, and return what ``--result-filename`` gets.

    ``ValueError`` for an option that cannot be followed.
    """
    server_args = resolve_server_args(server_args)
    assert server_args.tokenizer_path is not None, "resolution has set it"
    tokenizer = load_tokenizer(Path(server_args.tokenizer_path), trust_remote_code=server_args.trust_remote_code)
    prompts = PromptMaker(tokenizer, args).make()
    with Engine(server_args=server_args) as engine:
        if not args.skip_warmup:
            few = [Prompt(p.prompt, p.prompt_len, min(p.output_len, _WARMUP_TOKENS)) for p in prompts[:_WARMUP_PROMPTS]]
            _generate(engine, few, args)
            # what the first prompts left behind would spare the measurement work
            engine.flush_cache()
        if args.profile:
            engine.start_profile()
        replies, duration_s = _generate(engine, prompts, args)
        if args.profile:
            print(f"trace: {engine.stop_profile()}")
        throughput = engine.get_server_info()["internal_states"][0]["last_gen_throughput"]
    record = _figures(args, replies, duration_s) | {"last_gen_throughput": throughput}
    print(_render(record))
    if args.result_filename is not None:
        with args.result_filename.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    return record


def _generate(
    engine: Engine, prompts: Sequence[Prompt], args: argparse.Namespace
) -> tuple[list[dict[str, Any]], float]:
    """Replies to all prompts, and the seconds they took."""
    params = [
        {"temperature": 0.0, "max_new_tokens": p.output_len, "ignore_eos": not args.disable_ignore_eos}
        | args.extra_request_body
        for p in prompts
    ]
    kinds = {type(p.prompt) for p in prompts}
    given: list[Any] = [p.prompt if isinstance(p.prompt, str) else list(p.prompt) for p in prompts]
    start_s = time.perf_counter()
    if kinds == {str}:
        replies = engine.generate(prompt=given, sampling_params=params)
    else:
        replies = engine.generate(input_ids=given, sampling_params=params)
    return replies, time.perf_counter() - start_s


def _figures(args: argparse.Namespace, replies: Sequence[dict[str, Any]], duration_s: float) -> dict[str, Any]:
    infos = [reply["meta_info"] for reply in replies]
    inputs, outputs = (sum(info[f"{side}_tokens"] for info in infos) for side in ("prompt", "completion"))
    verified = sum(info.get("spec_verify_ct", 0) for info in infos)
    accepted = sum(info.get("spec_accept_token_num", 0) for info in infos)
    return {
        "backend": args.backend,
        "dataset_name": args.dataset_name,
        "successful_requests": len(replies),
        "total_latency": duration_s,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(replies) / duration_s,
        "input_throughput": inputs / duration_s,
        "output_throughput": outputs / duration_s,
        "total_throughput": (inputs + outputs) / duration_s,
        "accept_length": (verified + accepted) / verified if verified else None,
    }


def _render(record: dict[str, Any]) -> str:
    lines = [f"{' Offline Throughput Benchmark Result ':=^{_WIDTH}}"]
    for label, name in (
        ("Backend:", "backend"),
        ("Successful requests:", "successful_requests"),
        ("Benchmark duration (s):", "total_latency"),
        ("Total input tokens:", "total_input_tokens"),
        ("Total generated tokens:", "total_output_tokens"),
        ("Last generation throughput (tok/s):", "last_gen_throughput"),
        ("Request throughput (req/s):", "request_throughput"),
        ("Input token throughput (tok/s):", "input_throughput"),
        ("Output token throughput (tok/s):", "output_throughput"),
        ("Total token throughput (tok/s):", "total_throughput"),
        ("Accept length:", "accept_length"),
    ):
        value = record[name]
        if value is not None:
            lines.append(f"{label:<40} {f'{value:.2f}' if isinstance(value, float) else value:<10}".rstrip())
    return "\n".join([*lines, "=" * _WIDTH])


def parse_args(argv: Sequence[str]) -> tuple[argparse.Namespace, ServerArgs]:
    """Options of the benchmark, and those of the engine, which are the server's flags. ``ValueError`` for a flag of
    neither, or a value that cannot be; exits with one sentence for an option of the benchmark that makes no sense."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang.bench_offline_throughput",
        description=f"{__doc__} Takes the server's flags too.",
        allow_abbrev=False,
    )
    add_dataset_options(parser)
    add = parser.add_argument_group("run and output").add_argument
    add("--backend", choices=("engine",), default="engine", help="an engine in this process is the only one")
    add("--result-filename", type=Path, help="file that gets one more line of JSON")
    add("--disable-ignore-eos", action="store_true", help="let answers end by themselves")
    add("--extra-request-body", type=json_object, default={}, metavar="JSON", help="sampling controls of every request")
    add("--skip-warmup", action="store_true", help="measure from the first request on")
    add("--profile", action="store_true", help="write a trace to SGLANG_TORCH_PROFILER_DIR")
    args, rest = parser.parse_known_args(argv)
    check_dataset_options(parser, args)
    return args, prepare_server_args(rest)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 2 when the arguments are at fault, 1 when the engine is."""
    try:
        args, server_args = parse_args(sys.argv[1:] if argv is None else argv)
        configure_logger(server_args.log_level)
        run_benchmark(args, server_args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except SchedulerDiedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
