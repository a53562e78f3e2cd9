"""Captured extend steps on a GPU: the tokens, and in low precision the bytes, of steps that run kernel by kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fixtures.make_tiny_gemma4 import KINDS
from fixtures.scheduler_driver import SchedulerDriver
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner, GraphCaptureError, Step
from sglang.srt.model_executor.prefill_programs import PrefillProgram, PrefillSteps
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.frozen_kv_mtp_worker import FrozenKVMTPWorker

pytestmark = pytest.mark.cuda

LENGTHS = (5, 100, 700, 33, 64, 210)
PROMPTS = [[4 + (31 * i + 7 * j) % 500 for j in range(length)] for i, length in enumerate(LENGTHS)]
SIZES = (16, 64, 128, 256, 768, 1280)
BATCHES = [PROMPTS[:1], PROMPTS[1:2], PROMPTS[2:3], PROMPTS[:3], PROMPTS]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_k=30, max_new_tokens=8, ignore_eos=True, sampling_seed=5)


def gpu(folder: Path, kind: str, num_steps: int, dtype: str, **kwargs: Any) -> SchedulerDriver:
    kwargs = {
        "device": "cuda",
        "dtype": dtype,
        "enable_deterministic_inference": True,
        "cuda_graph_bs": (1, 4),
        "piecewise_cuda_graph_tokens": SIZES if not kwargs.get("disable_cuda_graph") else None,
        **kwargs,
    }
    return SchedulerDriver(folder / kind, folder / f"{kind}-assistant", num_steps, **kwargs)


def target_of(driver: SchedulerDriver) -> TpModelWorker:
    worker = driver.worker.target if isinstance(driver.worker, FrozenKVMTPWorker) else driver.worker
    assert isinstance(worker, TpModelWorker)
    return worker


def steps_of(driver: SchedulerDriver) -> PrefillSteps:
    steps = target_of(driver)._prefill
    assert steps is not None
    return steps


def replays(driver: SchedulerDriver) -> list[bool]:
    """Filled while the driver runs: whether each extend step was a replay."""
    steps, found = steps_of(driver), []
    run = steps.run

    def watched(batch: ScheduleBatch) -> Any:
        out = run(batch)
        found.append(out is not None)
        return out

    steps.run = watched  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("num_steps", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_float32_gives_the_tokens_of_eager_steps(kind: str, num_steps: int, tiny_checkpoints: Path) -> None:
    """Alone, mixed, cut into chunks, and behind a cached prefix."""
    for options in ({}, {"chunked_prefill_size": 256}, {"page_size": 16}):
        captured = gpu(tiny_checkpoints, kind, num_steps, "float32", **options)
        eager = gpu(tiny_checkpoints, kind, num_steps, "float32", disable_cuda_graph=True, **options)
        assert target_of(eager)._prefill is None
        assert isinstance(steps_of(captured).runner, CudaGraphRunner)
        replayed = replays(captured)
        for prompts in BATCHES:
            captured.flush()
            eager.flush()
            for longer in ([], [9, 8, 7]):
                asked = [[*prompt, *longer] for prompt in prompts]
                params = [GREEDY, SAMPLED] * len(asked)
                assert captured.tokens(asked, params) == eager.tokens(asked, params), f"{options=}"
        assert replayed and all(replayed)


@pytest.mark.parametrize("num_steps", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_low_precision_gives_the_bytes_of_eager_steps(kind: str, num_steps: int, tiny_checkpoints: Path) -> None:
    captured = gpu(tiny_checkpoints, kind, num_steps, "bfloat16", chunked_prefill_size=512)
    target, steps, sizes = target_of(captured), steps_of(captured), []
    run = steps.run

    def both(batch: ScheduleBatch) -> Any:
        out = run(batch)
        assert out is not None and out.hidden_states is not None
        logits, kv = out.next_token_logits.clone(), pool_of(target)
        exact = target.runner.model.forward(target._extend_batch(batch, None))
        assert torch.equal(logits, exact.next_token_logits)
        if num_steps:
            assert torch.equal(out.hidden_states, exact.hidden_states)
        assert all(torch.equal(mine, other) for mine, other in zip(kv, pool_of(target), strict=True))
        sizes.append(steps.sizes.fit(sum(batch.extend_lens)))
        return out

    steps.run = both  # type: ignore[method-assign]
    eager = gpu(tiny_checkpoints, kind, num_steps, "bfloat16", chunked_prefill_size=512, disable_cuda_graph=True)
    for prompts in BATCHES:
        captured.flush()
        eager.flush()
        params = [GREEDY, SAMPLED] * len(prompts)
        assert captured.tokens(prompts, params) == eager.tokens(prompts, params)
    assert set(sizes) >= {16, 128, 256, 768}


def pool_of(worker: TpModelWorker) -> list[torch.Tensor]:
    """The contents of the KV pool but for the dummy page."""
    pool: Any = worker.memory.pool
    return [buffer[1:].clone() for spec in pool.layout.owners for buffer in pool.get_kv_buffer(spec.layer_id)]


def test_what_has_no_graph_runs_eagerly(tiny_checkpoints: Path) -> None:
    eager = gpu(tiny_checkpoints, "eseries", 3, "bfloat16", disable_cuda_graph=True)
    expected = eager.tokens(PROMPTS, [GREEDY] * 6)
    for options, some in (
        ({"piecewise_cuda_graph_max_tokens": 256, "piecewise_cuda_graph_tokens": None}, True),
        ({"piecewise_cuda_graph_tokens": (32, 100)}, True),
        ({"disable_piecewise_cuda_graph": True}, False),
    ):
        driver = gpu(tiny_checkpoints, "eseries", 3, "bfloat16", **options)
        replayed = replays(driver) if some else []
        assert driver.tokens(PROMPTS, [GREEDY] * 6, arrivals=[0, 3, 6, 9, 12, 15]) == expected
        assert (True in replayed and False in replayed) == some
        assert (target_of(driver)._prefill is not None) == some


def test_prompts_between_steps_of_running_requests(tiny_checkpoints: Path) -> None:
    """Graphs of both kinds share memory: neither may leave anything in it that the other one needs."""
    params = [SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True)] * 6
    for num_steps in (0, 3):
        eager = gpu(tiny_checkpoints, "eseries", num_steps, "bfloat16", disable_cuda_graph=True)
        alone = [eager.tokens([prompt], params[:1])[0] for prompt in PROMPTS]
        driver = gpu(tiny_checkpoints, "eseries", num_steps, "bfloat16", cuda_graph_bs=(1, 2, 3, 4, 6))
        replayed = replays(driver)
        assert driver.tokens(PROMPTS, params, arrivals=[0, 2, 3, 5, 8, 13]) == alone
        assert len(replayed) > 3 and all(replayed)  # prompts that wait together share a step


def test_what_cannot_be_captured_names_the_flags(tiny_checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = PrefillProgram.run

    def broken(self: PrefillProgram, step: Step) -> None:
        if step.size == 64 and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("sixty-four is enough")
        run(self, step)

    monkeypatch.setattr(PrefillProgram, "run", broken)
    text = "capturing prompts .greedy. for tokens 64 failed.*leave the size out with --piecewise-cuda-graph-tokens"
    with pytest.raises(GraphCaptureError, match=text):
        gpu(tiny_checkpoints, "dense", 0, "bfloat16")


def test_a_replay_waits_for_nothing(tiny_checkpoints: Path) -> None:
    driver = gpu(tiny_checkpoints, "moe", 0, "bfloat16")
    steps, done = steps_of(driver), []
    run = steps.run

    def strict(batch: ScheduleBatch) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            done.append(run(batch))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return done[-1]

    steps.run = strict  # type: ignore[method-assign]
    driver.run(PROMPTS, [GREEDY] * len(PROMPTS), arrivals=[0, 0, 2, 2, 2, 9])
    assert len(done) == 3 and None not in done
