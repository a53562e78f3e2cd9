"""Where the time of a decode step goes: by phase on the clock, then by operator under torch's profiler.

Drives the scheduler step by step in this thread, with the same objects as the server but no channel and no HTTP.

    python benchmark/profile_step.py                    # speculation, batch 1
    python benchmark/profile_step.py --plain --batch 16
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import format_table
from torch.profiler import ProfilerActivity, profile

from oracle.corpus_prompts import prompt_ids, questions
from sglang.srt.managers.io_struct import FromScheduler, TokenizedGenerateReqInput, ToScheduler
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.worker_factory import create_worker
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.server_args_resolution import resolve_server_args
from sglang.srt.speculative.frozen_kv_mtp_worker import FrozenKVMTPWorker
from sglang.srt.utils.device import make_device, set_compute_threads
from sglang.srt.utils.hf_transformers.tokenizer import load_tokenizer


class NoChannel:
    """Nobody asks and nobody listens."""

    def recv(self, timeout_s: float | None) -> list[ToScheduler]:
        return []

    def send(self, msg: FromScheduler) -> None:
        pass


class Clock:
    """Seconds per phase; a phase inside another one is taken off the outer one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    def wrap(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            start = time.perf_counter()
            result = function(*args, **kwargs)
            elapsed = time.perf_counter() - start
            self.seconds[phase] += elapsed - self._inner.pop()
            self._inner[-1] += elapsed
            return result

        return timed


def engine_args(args: argparse.Namespace) -> ServerArgs:
    kwargs: dict[str, Any] = {"model_path": args.model_path, "dtype": args.dtype, "device": args.device}
    kwargs["max_running_requests"] = args.batch
    if not args.plain:
        kwargs |= {"speculative_algorithm": "FROZEN_KV_MTP", "speculative_num_steps": args.num_steps}
        kwargs["speculative_draft_model_path"] = args.draft
    return resolve_server_args(ServerArgs(**kwargs))


def make_scheduler(server_args: ServerArgs) -> Scheduler:
    device = make_device(server_args.device).torch_device
    worker, config = create_worker(server_args), server_args.schedule_config()
    return Scheduler(worker, config, NoChannel(), device=device, pieces=None, random_seed=0)


def start_requests(scheduler: Scheduler, tokenizer_path: str, task: str, batch: int) -> None:
    """Submit ``batch`` requests that do not end by themselves, and step until all of them decode."""
    tokenizer = load_tokenizer(Path(tokenizer_path), trust_remote_code=False)
    params = SamplingParams(temperature=0.0, max_new_tokens=4000, ignore_eos=True)
    for i, question in enumerate(questions(task, batch, seed=7)):
        ids = tuple(prompt_ids(tokenizer, question.text))
        scheduler.submit(TokenizedGenerateReqInput(f"request-{i}", ids, params, stream=False))
    while len(scheduler.running.reqs) < batch:
        scheduler.step()


def watch_phases(scheduler: Scheduler) -> Clock:
    """Time the functions a step consists of. What no other phase covers is the scheduler's own work."""
    clock = Clock()
    worker = scheduler.worker
    target = worker.target if isinstance(worker, FrozenKVMTPWorker) else worker
    scheduler.step = clock.wrap("schedule and reply", scheduler.step)  # type: ignore[method-assign]
    worker.forward_batch_generation = clock.wrap("worker: rest", worker.forward_batch_generation)  # type: ignore[method-assign]
    if isinstance(worker, FrozenKVMTPWorker):
        stages = worker.round
        stages.draft.run = clock.wrap("draft: plan and loop", stages.draft.run)
        stages.verify.run = clock.wrap("target: plan and sample", stages.verify.run)
        stages.accept.run = clock.wrap("accept and seed", stages.accept.run)
        worker.runner.model.forward = clock.wrap("draft: assistant forward", worker.runner.model.forward)
        worker.runner.model.draft_argmax = clock.wrap("draft: head and argmax", worker.runner.model.draft_argmax)
    else:
        program = worker.loop.runner.program
        program.run = clock.wrap("target: plan and sample", program.run)
    model = target.runner.model
    model.forward = clock.wrap("target: forward", model.forward)
    model.greedy_tokens = clock.wrap("target: forward", model.greedy_tokens)
    return clock


def run_steps(scheduler: Scheduler, num_steps: int) -> tuple[float, int]:
    """Wall seconds, and tokens gained."""
    known = sum(len(req.token_ids) for req in scheduler.running.reqs)
    start = time.perf_counter()
    for _ in range(num_steps):
        scheduler.step()
    seconds = time.perf_counter() - start
    return seconds, sum(len(req.token_ids) for req in scheduler.running.reqs) - known


def phase_table(clock: Clock, seconds: float, num_steps: int) -> str:
    rows = [
        [phase, f"{1e6 * spent / num_steps:.0f}", f"{spent / seconds:.1%}"]
        for phase, spent in sorted(clock.seconds.items(), key=lambda item: -item[1])
    ]
    rows.append(["step", f"{1e6 * seconds / num_steps:.0f}", "100.0%"])
    return format_table(["phase (without what is listed apart)", "us/step", "share"], rows)


def operator_table(events: Any, num_steps: int, limit: int) -> str:
    """Operators by self time. Small ones cost mostly their call; the profiler adds about a microsecond to each."""
    found = sorted((e for e in events if e.self_cpu_time_total > 0), key=lambda e: -e.self_cpu_time_total)
    total = sum(e.self_cpu_time_total for e in found)
    rows = [
        [
            e.key[:48],
            f"{e.count / num_steps:.1f}",
            f"{e.self_cpu_time_total / num_steps:.0f}",
            f"{e.self_cpu_time_total / e.count:.1f}",
            f"{e.self_cpu_time_total / total:.1%}",
        ]
        for e in found[:limit]
    ]
    rows.append(["all operators", f"{sum(e.count for e in found) / num_steps:.0f}", f"{total / num_steps:.0f}", "", ""])
    return format_table(["operator", "calls/step", "self us/step", "us/call", "share"], rows)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default="tiny-gemma4")
    parser.add_argument("--draft", help="the assistant; default: the one that ships with the model")
    parser.add_argument("--plain", action="store_true", help="without speculation")
    parser.add_argument("--num-steps", type=int, default=4, help="drafts per round")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--task", default="story")
    parser.add_argument("--steps", type=int, default=100, help="decode steps to measure")
    parser.add_argument("--top", type=int, default=25, help="rows of the operator table")
    parser.add_argument("--python", action="store_true", help="also list Python functions by their own time")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; default: the engine's own choice")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    server_args = engine_args(args)
    scheduler = make_scheduler(server_args)
    set_compute_threads(args.threads)
    start_requests(scheduler, str(server_args.tokenizer_path), args.task, args.batch)
    run_steps(scheduler, 20)
    seconds, tokens = run_steps(scheduler, args.steps)
    per_step = f"{tokens / args.steps / args.batch:.2f} tokens per step and request"
    step_us = f"{1e6 * seconds / args.steps:.0f} us per step"
    print(f"{tokens / seconds:.0f} tokens/s, {per_step}, {step_us}, {torch.get_num_threads()} torch threads\n")
    if args.python:
        with cProfile.Profile() as python:
            run_steps(scheduler, args.steps)
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        run_steps(scheduler, args.steps)
    clock = watch_phases(scheduler)
    seconds, _ = run_steps(scheduler, args.steps)
    print(phase_table(clock, seconds, args.steps), end="\n\n")
    print(operator_table(prof.key_averages(), args.steps, args.top))
    if args.python:
        pstats.Stats(python).sort_stats("tottime").print_stats(args.top)


if __name__ == "__main__":
    main()
