"""One pair of models on a device, stepped by hand: the engine's scheduler and worker, without threads, text or HTTP.

Contexts are not computed but filled with random keys and values, and handed to the engine through its own prefix cache:
a request then finds all of its prompt but the last token there, whatever the length.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from gpu_report import synchronize, time_device
from model_shapes import Pair

from sglang.srt.distributed.parallel_state import TpGroup
from sglang.srt.managers.io_struct import AbortReq, FromScheduler, TokenizedGenerateReqInput, ToScheduler
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.managers.worker_factory import create_worker
from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner, EagerRunner, GraphProgram, Runner, Step
from sglang.srt.model_executor.decode_loop import DecodeLoop
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.server_args_resolution import resolve_server_args
from sglang.srt.speculative.frozen_kv_mtp_worker import FrozenKVMTPWorker
from sglang.srt.utils.device import make_device

# tokens a request may gain while it is measured
ANSWER = 512


class NoChannel:
    """Nobody asks and nobody listens."""

    def recv(self, timeout_s: float | None) -> list[ToScheduler]:
        return []

    def send(self, msg: FromScheduler) -> None:
        pass


@contextmanager
def simulated_acceptance(length: float | None) -> Iterator[None]:
    """Workers made inside accept ``length`` tokens per round on average, whatever is drafted."""
    if length is not None:
        os.environ["SGLANG_SIMULATE_ACC_LEN"] = str(length)
    try:
        yield
    finally:
        os.environ.pop("SGLANG_SIMULATE_ACC_LEN", None)


def engine_settings(pair: Pair, num_steps: int, device: str, dtype: str, batches: list[int]) -> dict[str, Any]:
    """Server arguments of random weights in the shape of ``pair``; ``num_steps`` 0 is plain decode."""
    settings: dict[str, Any] = {
        "model_path": str(pair.target_path),
        "load_format": "dummy",
        "device": device,
        "dtype": dtype,
        "random_seed": 1,
        "max_running_requests": max(batches),
    }
    if device == "cuda":
        settings["cuda_graph_bs"] = sorted(batches)
    if num_steps:
        settings |= {
            "speculative_algorithm": "FROZEN_KV_MTP",
            "speculative_draft_model_path": str(pair.assistant_path),
            "speculative_num_steps": num_steps,
        }
    return settings


class Timed:
    """``num_steps`` 0 steps plain passes, otherwise rounds of as many drafts. ``tokens`` is the size of the KV pool."""

    def __init__(
        self,
        pair: Pair,
        num_steps: int,
        device: str,
        dtype: str,
        batches: list[int],
        tokens: int,
        group: TpGroup | None = None,
        **more: Any,
    ) -> None:
        """``group``: the ranks that share the models, each of which makes one of these and does the same with it;
        ``more``: server arguments."""
        group = group or TpGroup()
        settings = engine_settings(pair, num_steps, device, dtype, batches)
        settings |= {"max_total_tokens": tokens, "tp_size": group.size, **more}
        args = resolve_server_args(ServerArgs.from_kwargs(settings))
        self.device = device
        self.num_steps = num_steps
        self.worker = create_worker(args, group)
        self.scheduler = Scheduler(
            self.worker,
            args.schedule_config(),
            NoChannel(),
            device=make_device(device, group.local_rank).torch_device,
            pieces=None,
            random_seed=1,
            group=group,
        )
        self._vocab_size = pair.target.text.vocab_size
        self._random = np.random.default_rng(1)
        self._fill_kv()

    @property
    def target(self) -> TpModelWorker:
        worker = self.worker
        if isinstance(worker, FrozenKVMTPWorker):
            return worker.target
        assert isinstance(worker, TpModelWorker)
        return worker

    @property
    def weight_bytes(self) -> int:
        """Of this rank, the assistant's included."""
        runners = {self.target.runner, self.worker.runner}
        return sum(runner.weight_bytes for runner in runners)

    def start(self, batch: int, context: int) -> None:
        """``batch`` requests with ``context`` committed tokens each, ready to decode."""
        self.stop()
        manager = self.scheduler.kv_manager
        params = SamplingParams(temperature=0.0, max_new_tokens=ANSWER, ignore_eos=True)
        for i in range(batch):
            ids = self._random.integers(3, self._vocab_size, context).tolist()
            kv = manager.open(ids)
            assert kv is not None, "no row is free"
            if not manager.grow(kv, context):
                raise ValueError(f"{batch} contexts of {context} tokens do not fit {manager.total_tokens} KV slots")
            manager.commit(kv, context)
            manager.close(kv, ids)
            self.scheduler.submit(TokenizedGenerateReqInput(str(i), tuple(ids), params, stream=False))
        while len(self.scheduler.running.reqs) < batch:
            self.step()

    def step(self) -> None:
        """One step of the engine as it serves: schedule, run, read the tokens, commit."""
        self.scheduler.step()

    def stop(self) -> None:
        """Abort what runs and forget every prefix."""
        self.scheduler.abort(AbortReq(None, abort_all=True))
        self.scheduler._outs.clear()
        flushed = self.scheduler.kv_manager.flush()
        assert flushed

    def num_tokens(self) -> int:
        """Tokens the running requests have, prompt included."""
        return sum(len(req.token_ids) for req in self.scheduler.running.reqs)

    def prefill(self, num_tokens: int) -> None:
        """Compute a prompt of random tokens and the token after it."""
        ids = self._random.integers(3, self._vocab_size, num_tokens).tolist()
        params = SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True)
        self.scheduler.submit(TokenizedGenerateReqInput("prompt", tuple(ids), params, stream=False))
        while self.scheduler.has_work:
            self.step()
        self.stop()

    @contextmanager
    def all_rows(self) -> Iterator[None]:
        """Prompts inside are computed without skipping rows in layers that share KV."""
        tail, prefill = self.target._tail, self.target._prefill
        self.target._tail = lambda *args: None  # type: ignore[assignment, method-assign]
        self.target._prefill = None  # which was captured with the skipping
        try:
            yield
        finally:
            self.target._tail, self.target._prefill = tail, prefill  # type: ignore[method-assign]

    def device_program(self) -> Callable[[], None]:
        """A step on the device alone, any number of times.

        Every run is the same step: the rows are told that they are padding, which stays where it is. The tokens
        it leaves are nobody's, so only ``stop`` may follow.
        """
        loop, step = self._loop, self._padding_step()

        def run() -> None:
            with torch.inference_mode():
                loop.runner.run(step)

        return run

    def device_seconds(self, repeats: int) -> dict[str, float]:
        """Seconds of ``device_program``, under "step", and of each stage of a round, by its name."""
        step, worker, found = self._padding_step(), self.worker, {}
        with torch.inference_mode():
            if isinstance(worker, FrozenKVMTPWorker):
                for program in (worker.round.draft, worker.round.verify):
                    found[program.name] = self._program_seconds(program, step, repeats)
            found["step"] = time_device(lambda: self._loop.runner.run(step), self.device, repeats)
        return found

    @property
    def _loop(self) -> DecodeLoop:
        assert isinstance(self.worker, TpModelWorker)
        return self.worker.loop

    def _padding_step(self) -> Step:
        while self.scheduler._ahead is not None:
            self.scheduler.step(run_ahead=False)
        self.scheduler._make_room()
        with torch.inference_mode():
            step = self._loop.prepare(self.scheduler.running.to_batch())
            self._loop._rows.device.live.zero_()
        return step

    def _program_seconds(self, program: GraphProgram, step: Step, repeats: int) -> float:
        """A stage by itself, in a graph where there are graphs."""
        runner: Runner = EagerRunner(program)
        if self.device == "cuda":
            runner = CudaGraphRunner(program, (step.size,), (step.width,))
        runner.capture()
        assert runner.can_run(step), f"{program.name} was captured for another step than {step}"
        return time_device(lambda: runner.run(step), self.device, repeats)

    def _fill_kv(self) -> None:
        """Alike on all ranks, since several may have the same KV head."""
        pool = self.target.memory.pool
        for spec in pool.layout.owners:
            for buffer in pool.get_kv_buffer(spec.layer_id):
                generator = torch.Generator(device=buffer.device).manual_seed(spec.layer_id)
                buffer.uniform_(-1.0, 1.0, generator=generator)
        synchronize(self.device)
