"""`python -m sglang.bench_serving`: throughput and latency of a running server under a given load."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from sglang.benchmark.client import APIS, Outcome, RequestError, send_request
from sglang.benchmark.datasets import Prompt, PromptMaker
from sglang.benchmark.options import add_dataset_options, check_dataset_options, count, json_object
from sglang.benchmark.report import Run, details, figures, render
from sglang.srt.utils.hf_transformers.hub import resolve_model_path
from sglang.srt.utils.hf_transformers.tokenizer import load_tokenizer

_PORTS = {"vllm": 8000, "vllm-chat": 8000}
_PORT = 30000
# a request may wait for all others
_TIMEOUT_S = 6 * 3600.0


def run_benchmark(args: argparse.Namespace) -> dict[str, Any]:
    """Run what ``parse_args`` returned, print the report, and return what ``--output-file`` gets.

    ``ValueError`` for an option that cannot be followed, ``RequestError`` when no request succeeds.
    """
    return asyncio.run(_run(args))


async def _run(args: argparse.Namespace) -> dict[str, Any]:
    headers = dict(args.header or [])
    if args.api_key is not None:
        headers["Authorization"] = f"Bearer {args.api_key}"
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=args.base_url, headers=headers, limits=limits, timeout=_TIMEOUT_S) as client:
        args.model = args.model or await _served_model(client)
        tokenizer = await _tokenizer(client, args)
        prompts = PromptMaker(tokenizer, args).make()
        await _warm_up(client, prompts, args)
        before = await _spec_totals(client)
        outcomes, duration_s = await _send_all(client, prompts, args)
        run = Run(outcomes, duration_s, _accept_length(outcomes, before, await _spec_totals(client)))
    if not run.completed:
        raise RequestError(f"no request succeeded, the first one failed with: {outcomes[0].error}")
    retokenized = sum(len(tokenizer.encode(o.text, add_special_tokens=False)) for o in run.completed)
    record = _settings(args) | figures(run, retokenized)
    print(render(record))
    for error in sorted({outcome.error for outcome in outcomes if outcome.error})[:3]:
        print(f"failed: {error}", file=sys.stderr)
    if args.output_details:
        record |= details(run)
    if args.output_file is not None:
        with args.output_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    return record


async def _served_model(client: httpx.AsyncClient) -> str:
    try:
        models = (await client.get("/v1/models")).raise_for_status().json()["data"]
    except httpx.HTTPError as error:
        raise RequestError(f"{client.base_url} does not say what it serves ({error}): is a server there?") from error
    return str(models[0]["id"])


async def _tokenizer(client: httpx.AsyncClient, args: argparse.Namespace) -> PreTrainedTokenizerFast:
    """``--tokenizer``, else the server's if its files are on this machine, else that of the model's name."""
    name = args.tokenizer
    if name is None:
        info = await _get_json(client, "/model_info")
        path = info.get("tokenizer_path")
        name = path if isinstance(path, str) and Path(path).is_dir() else args.model
    try:
        return load_tokenizer(resolve_model_path(name, None, role="tokenizer", weights=False), trust_remote_code=False)
    except ValueError as error:
        raise ValueError(f"there is no tokenizer to measure prompts with, name one as --tokenizer: {error}") from error


async def _get_json(client: httpx.AsyncClient, path: str) -> Mapping[str, Any]:
    """What a server tells of itself; empty where it does not know the route."""
    reply = await client.get(path)
    value = reply.json() if reply.status_code == 200 else {}
    return value if isinstance(value, Mapping) else {}


async def _spec_totals(client: httpx.AsyncClient) -> tuple[int, int]:
    """Verifications and accepted drafts of a server since its start; zeros where it does not count."""
    states = (await _get_json(client, "/server_info")).get("internal_states") or [{}]
    totals = states[0].get("totals") or {}
    return totals.get("verify_ct", 0), sum(totals.get("accepted_by_position", ()))


def _accept_length(outcomes: Sequence[Outcome], before: tuple[int, int], after: tuple[int, int]) -> float | None:
    """From the streams if they say it, else from the server's own counts."""
    verified, accepted = sum(o.verify_ct for o in outcomes), sum(o.accepted for o in outcomes)
    if not verified:
        verified, accepted = after[0] - before[0], after[1] - before[1]
    return (verified + accepted) / verified if verified > 0 else None


async def _warm_up(client: httpx.AsyncClient, prompts: Sequence[Prompt], args: argparse.Namespace) -> None:
    for _ in range(args.warmup_requests):
        outcome = await send_request(client, prompts[0], args)
        if outcome.error:
            raise RequestError(f"the first request failed, nothing was measured: {outcome.error}")
    if args.flush_cache:
        (await client.post("/flush_cache")).raise_for_status()


async def _send_all(
    client: httpx.AsyncClient, prompts: Sequence[Prompt], args: argparse.Namespace
) -> tuple[list[Outcome], float]:
    """Send every prompt at its time; outcomes in the order of sending, and the seconds all took."""
    room = asyncio.Semaphore(args.max_concurrency or len(prompts))
    gaps = random.Random(args.seed)
    start_s = time.perf_counter()
    with tqdm(total=len(prompts), disable=args.disable_tqdm) as bar:

        async def one(prompt: Prompt) -> Outcome:
            async with room:
                outcome = await send_request(client, prompt, args)
            bar.update()
            return outcome

        tasks = []
        for prompt in prompts:
            tasks.append(asyncio.ensure_future(one(prompt)))
            # the gaps between independent arrivals are exponential
            await asyncio.sleep(gaps.expovariate(args.request_rate) if args.request_rate < float("inf") else 0)
        outcomes = list(await asyncio.gather(*tasks))
    return outcomes, time.perf_counter() - start_s


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    names = ["backend", "model", "dataset_name", "num_prompts", "max_concurrency", "seed", "sharegpt_output_len"]
    names += ["random_input_len", "random_output_len", "random_range_ratio"]
    rate = "inf" if args.request_rate == float("inf") else args.request_rate
    return {"request_rate": rate, **{name: getattr(args, name) for name in names}}


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; exits with one sentence where it makes no sense."""
    parser = argparse.ArgumentParser(prog="python -m sglang.bench_serving", description=__doc__, allow_abbrev=False)
    _add_server_options(parser)
    add_dataset_options(parser)
    _add_load_options(parser)
    args = parser.parse_args(argv)
    if args.base_url is None:
        args.base_url = f"http://{args.host}:{args.port or _PORTS.get(args.backend, _PORT)}"
    if not args.request_rate > 0:
        parser.error(f"--request-rate must be above 0, got {args.request_rate}")
    check_dataset_options(parser, args)
    if args.tokenize_prompt and args.backend.endswith("-chat"):
        parser.error("--tokenize-prompt makes token ids, which a chat cannot take: use another --backend")
    return args


def _add_server_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("server").add_argument
    add("--backend", choices=tuple(APIS), default="sglang", help="which API to ask: /generate, completions or chat")
    add("--base-url", help="address of the server; default: from --host and --port")
    add("--host", default="127.0.0.1")
    add("--port", type=count, help="default: 30000, or 8000 for vllm")
    add("--model", help="name to send; default: what the server says it serves")
    add("--tokenizer", help="directory, Hugging Face id or embedded model; default: the server's")
    add("--api-key", help="key to send as a bearer token")
    add("--header", nargs="+", type=_header, metavar="NAME=VALUE", help="further headers")
    add("--extra-request-body", type=json_object, default={}, metavar="JSON", help="fields to add to every request")
    add("--disable-stream", action="store_true", help="ask for whole replies; there are no times of tokens then")
    add("--disable-ignore-eos", action="store_true", help="let answers end by themselves")


def _add_load_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("load and output").add_argument
    add("--request-rate", type=float, default=float("inf"), help="requests per second, at random times; inf: at once")
    add("--max-concurrency", type=count, help="most requests under way; default: no limit")
    add("--warmup-requests", type=int, default=1, help="requests before the measurement")
    add("--flush-cache", action="store_true", help="empty the server's prefix cache before the measurement")
    add("--output-file", type=Path, help="file that gets one more line of JSON")
    add("--output-details", action="store_true", help="add lengths, times and texts of every request to that line")
    add("--disable-tqdm", action="store_true", help="show no progress")


def _header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text!r}")
    return name, value


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 when every request succeeded."""
    args = parse_args(sys.argv[1:] if argv is None else argv)
    try:
        record = run_benchmark(args)
    except (ValueError, RequestError, httpx.HTTPError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 1 if record["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
