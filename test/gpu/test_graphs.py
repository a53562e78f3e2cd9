"""Captured decode steps on a GPU: the same tokens as on a CPU, as without graphs, and with any way of cutting them."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from fixtures.make_tiny_gemma4 import KINDS
from fixtures.scheduler_driver import SchedulerDriver
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.managers.worker_factory import create_worker
from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner, GraphCaptureError, GraphPool, Step, StepKind
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.server_args_resolution import resolve_server_args
from sglang.srt.speculative.frozen_kv_mtp_cuda_graph_runner import FrozenKVMTPCudaGraphRunner
from sglang.srt.utils.device import make_device
from sglang.srt.utils.embedded import EmbeddedModel

pytestmark = pytest.mark.cuda

NUM_TOKENS = 20
SIZES = (1, 2, 4, 8)
LENGTHS = [1, 7, 23, 8, 40, 3]
PROMPTS = [[4 + (31 * i + 7 * j) % 500 for j in range(LENGTHS[i])] for i in range(6)]
GREEDY = [SamplingParams(temperature=0.0, max_new_tokens=NUM_TOKENS - 3 * (i % 3), ignore_eos=True) for i in range(6)]
SAMPLED = [
    SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True, sampling_seed=i, **kind)  # type: ignore[arg-type]
    for i, kind in enumerate(
        [
            {"temperature": 0.9, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
            {"temperature": 0.0},
            {"temperature": 1.0},
            {"temperature": 1.3, "top_p": 0.8},
            {"temperature": 0.7, "top_k": 20},
            {"temperature": 1.0, "min_p": 0.05},
        ]
    )
]


def gpu(target: Path, assistant: Path | None, num_steps: int, dtype: str, **kwargs: Any) -> SchedulerDriver:
    kwargs = {
        "device": "cuda",
        "dtype": dtype,
        "cuda_graph_bs": SIZES,
        "enable_deterministic_inference": True,
        "piecewise_cuda_graph_tokens": None if kwargs.get("disable_cuda_graph") else (32, 96),
        **kwargs,
    }
    return SchedulerDriver(target, assistant, num_steps, **kwargs)


def replays(driver: SchedulerDriver) -> list[bool]:
    """Filled while the driver runs: whether each step was a replay."""
    assert isinstance(driver.worker, TpModelWorker)
    runner, found = driver.worker.loop.runner, []
    run = runner.run

    def watched(step: Step) -> None:
        found.append(runner.can_run(step))
        run(step)

    runner.run = watched  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_float32_on_a_gpu_gives_the_tokens_of_a_cpu(kind: str, tiny_checkpoints: Path) -> None:
    target, assistant = tiny_checkpoints / kind, tiny_checkpoints / f"{kind}-assistant"
    expected = SchedulerDriver(target, None, 0).tokens(PROMPTS, GREEDY)
    for num_steps in (0, 3):
        driver = gpu(target, assistant, num_steps, "float32")
        replayed = replays(driver)
        assert driver.tokens(PROMPTS, GREEDY) == expected, f"{num_steps=}"
        assert replayed and all(replayed)


@pytest.mark.parametrize(
    "options",
    [
        {"speculative_eagle_topk": 2},
        {"speculative_eagle_topk": 3, "speculative_num_draft_tokens": 12, "page_size": 16},
        {"speculative_use_rejection_sampling": True},
    ],
    ids=["tree", "bushy tree", "sampled drafts"],
)
@pytest.mark.parametrize("kind", ["dense_keqv", "eseries"])
def test_trees_and_sampled_drafts_are_captured_too(kind: str, options: dict[str, Any], tiny_checkpoints: Path) -> None:
    target, assistant = tiny_checkpoints / kind, tiny_checkpoints / f"{kind}-assistant"
    expected = SchedulerDriver(target, None, 0).tokens(PROMPTS, GREEDY)
    driver = gpu(target, assistant, 3, "float32", **options)
    replayed = replays(driver)
    assert driver.tokens(PROMPTS, GREEDY) == expected
    eager = gpu(target, assistant, 3, "float32", disable_cuda_graph=True, **options)
    assert driver.tokens(PROMPTS, SAMPLED) == eager.tokens(PROMPTS, SAMPLED)
    assert replayed and all(replayed)


def test_the_trained_pair_answers_alike_on_cpu_and_gpu(trained_pair: EmbeddedModel) -> None:
    expected = SchedulerDriver(trained_pair.target, None, 0).tokens(PROMPTS, GREEDY)
    for num_steps in (0, 4):
        assert (
            gpu(trained_pair.target, trained_pair.assistant, num_steps, "float32").tokens(PROMPTS, GREEDY) == expected
        )


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_lossless_grid_is_bitwise_in_low_precision(
    kind: str, params: list[SamplingParams], tiny_checkpoints: Path
) -> None:
    target, assistant = tiny_checkpoints / kind, tiny_checkpoints / f"{kind}-assistant"
    plain = gpu(target, None, 0, "bfloat16")
    alone = [plain.tokens([prompt], [param])[0] for prompt, param in zip(PROMPTS, params, strict=True)]
    assert plain.tokens(PROMPTS, params) == alone
    accepted = 0
    for num_steps in (1, 3, 5):
        driver = gpu(target, assistant, num_steps, "bfloat16")
        for batch in (1, 2, 3, 6):
            driver.flush()
            outs = driver.run(PROMPTS[:batch], params[:batch])
            assert [out.token_ids for out in outs] == alone[:batch], f"{num_steps=} {batch=}"
            accepted += sum(out.spec.accepted_tokens for out in outs if out.spec is not None)
    assert accepted > 0, "no draft was ever accepted, so nothing was tested"


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_on_off_whole_and_separate(
    dtype: str, params: list[SamplingParams], tiny_checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, assistant = tiny_checkpoints / "eseries", tiny_checkpoints / "eseries-assistant"
    for num_steps in (0, 3):
        whole = gpu(target, assistant, num_steps, dtype)
        replayed = replays(whole)
        expected = whole.tokens(PROMPTS, params)
        assert all(replayed) and len(replayed) > 3
        eager = gpu(target, assistant, num_steps, dtype, disable_cuda_graph=True, cuda_graph_bs=None)
        assert eager.tokens(PROMPTS, params) == expected
        unpadded = gpu(target, assistant, num_steps, dtype, disable_cuda_graph_padding=True, cuda_graph_bs=(2, 3))
        replayed = replays(unpadded)
        assert unpadded.tokens(PROMPTS, params) == expected
        assert not all(replayed)
    monkeypatch.setenv("SGLANG_SPEC_SEPARATE_GRAPHS", "1")
    separate = gpu(target, assistant, 3, dtype)
    assert isinstance(separate.worker, TpModelWorker)
    runner = separate.worker.loop.runner
    assert isinstance(runner, FrozenKVMTPCudaGraphRunner) and len(runner.stages) == 3
    assert separate.tokens(PROMPTS, params) == expected


def test_requests_that_come_and_go_and_edit_logits(tiny_checkpoints: Path) -> None:
    target, assistant = tiny_checkpoints / "dense", tiny_checkpoints / "dense-assistant"
    params = [*GREEDY[:3], *SAMPLED[3:]]
    params[1] = SamplingParams(temperature=0.0, max_new_tokens=9, ignore_eos=True, frequency_penalty=1.5)
    plain = gpu(target, None, 0, "bfloat16")
    alone = [plain.tokens([prompt], [param])[0] for prompt, param in zip(PROMPTS, params, strict=True)]
    driver = gpu(target, assistant, 3, "bfloat16", chunked_prefill_size=11)
    replayed = replays(driver)
    for arrivals in ([0] * 6, [0, 1, 2, 3, 5, 8], [4, 0, 0, 6, 2, 0]):
        assert driver.tokens(PROMPTS, params, arrivals=arrivals) == alone
    assert any(replayed) and not all(replayed)
    assert not driver.worker.memory.req_to_token[-1].any(), "the dummy row points at the dummy page only"


def test_identical_runs_give_identical_bytes(tiny_checkpoints: Path) -> None:
    target, assistant = tiny_checkpoints / "moe", tiny_checkpoints / "moe-assistant"
    driver = gpu(target, assistant, 3, "bfloat16")
    first = None
    for _ in range(20):
        driver.flush()
        tokens = driver.tokens(PROMPTS, SAMPLED)
        pool = driver.worker.target.memory.pool  # type: ignore[attr-defined]
        # padding rows write the dummy page all at once
        layers = (pool.layer(spec.layer_id) for spec in pool.layout.owners)
        digest = [float(kv.key[1:].double().sum() + kv.value[1:].double().abs().sum()) for kv in layers]
        assert first is None or (tokens, digest) == first
        first = tokens, digest


class Broken:
    name, samples = "broken program", True

    def __init__(self) -> None:
        self.x = torch.ones(4, device="cuda")

    def run(self, step: Step) -> None:
        self.x.add_(1)
        if step.size == 3 and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("three is too few")


def test_what_cannot_be_captured_is_named() -> None:
    text = r"broken program \(sampled\) for batch size 3 failed .*three is too few.*--disable-cuda-graph"
    with pytest.raises(GraphCaptureError, match=text):
        CudaGraphRunner(Broken(), (1, 3, 8)).capture()
    torch.cuda.synchronize()
    assert torch.ones(1, device="cuda").item() == 1.0, "the device goes on"


def test_a_capture_without_memory_is_named() -> None:
    class Greedy:
        name, samples = "greedy program", False

        def run(self, step: Step) -> None:
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")

    with pytest.raises(GraphCaptureError, match="batch size 2 ran out of memory: lower --mem-fraction-static"):
        CudaGraphRunner(Greedy(), (2,)).capture()


def test_graphs_of_one_pool_share_memory() -> None:
    class Needs:
        name, samples = "a program with scratch", False

        def __init__(self, megabytes: int) -> None:
            self.num_bytes = megabytes << 20

        def run(self, step: Step) -> None:
            torch.empty(self.num_bytes, dtype=torch.uint8, device="cuda").fill_(step.size)

    def reserved() -> int:
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    pool, before = GraphPool.open(), reserved()
    runners = [CudaGraphRunner(Needs(megabytes), (1, 2), pool=pool) for megabytes in (64, 32)]
    taken = []
    for runner in runners:
        runner.capture()
        taken.append(reserved() - before)
    assert 64 << 20 <= taken[0] == taken[1] < 96 << 20


def test_memory_for_forwards_is_kept_before_the_pool_is_sized(tiny_checkpoints: Path) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    device = make_device("cuda")
    total, free, held = device.total_bytes(), device.available_bytes(), torch.cuda.memory_reserved()
    args = ServerArgs(
        model_path=str(tiny_checkpoints / "dense"),
        device="cuda",
        mem_fraction_static=1.0 - 0.9 * free / total,  # a small pool, while other tests take and free memory
        cuda_graph_max_bs=16,
        max_running_requests=16,
    )
    worker = create_worker(resolve_server_args(args))
    assert isinstance(worker, TpModelWorker)
    taken = torch.cuda.memory_reserved() - held
    pool = worker.memory.pool
    assert pool.size_tokens * pool.layout.elements_per_token * pool.dtype.itemsize < taken < 0.2 * free
    step = Step(16, StepKind.SAMPLED, None, width=1)
    assert worker.loop.runner.can_run(step)
