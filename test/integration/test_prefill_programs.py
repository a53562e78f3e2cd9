"""Extend steps as programs of fixed shape, run on a CPU the way a GPU captures them: padded, and blind to the host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fixtures.make_tiny_gemma4 import KINDS
from fixtures.scheduler_driver import SchedulerDriver
from sglang.srt.managers.memory_probe import Workload, measure_reserve_bytes
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.cuda_graph_runner import Step
from sglang.srt.model_executor.prefill_programs import MAX_REQUESTS, PrefillSteps, prefill_sizes
from sglang.srt.sampling.logprobs import LogprobOptions
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args_slices import GraphConfig, MemoryConfig
from sglang.srt.speculative.frozen_kv_mtp_worker import FrozenKVMTPWorker
from sglang.srt.utils.device import Device

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = (16, 24, 64, 128)
LENGTHS = (5, 16, 100, 37, 2, 61, 8, 24, 11, 3)
PROMPTS = [[4 + (31 * i + 7 * j) % 500 for j in range(length)] for i, length in enumerate(LENGTHS)]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=6, ignore_eos=True)


class Driver(SchedulerDriver):
    """Remembers the logits of every extend step, and which steps ran as programs; padding starts from garbage."""

    def __init__(self, folder: Path, kind: str, num_steps: int, **kwargs: Any) -> None:
        super().__init__(folder / kind, folder / f"{kind}-assistant", num_steps, **kwargs)
        worker = self.worker.target if isinstance(self.worker, FrozenKVMTPWorker) else self.worker
        assert isinstance(worker, TpModelWorker)
        self.target = worker
        self.sizes: list[int | None] = []
        if worker._prefill is not None:
            self._run, self._run_program = worker._prefill.run, worker._prefill.runner.run
            worker._prefill.run = self._watched_run  # type: ignore[method-assign]
            worker._prefill.runner.run = self._watched_program  # type: ignore[method-assign]

    @property
    def steps(self) -> PrefillSteps:
        assert self.target._prefill is not None
        return self.target._prefill

    def _watched_run(self, batch: ScheduleBatch) -> Any:
        before = len(self.sizes)
        out = self._run(batch)
        if out is None:
            assert len(self.sizes) == before
            self.sizes.append(None)
        return out

    def _watched_program(self, step: Step) -> None:
        self.sizes.append(step.size)
        for name in ("logits", "hidden"):
            getattr(self.steps._out, name).fill_(float("nan"))
        for spec in self.target.memory.pool.layout.owners:
            for buffer in self.target.memory.pool.get_kv_buffer(spec.layer_id):  # type: ignore[attr-defined]
                buffer[0] = float("nan")
        self._run_program(step)
        assert not self.target.memory.req_to_token[-1].any(), "the dummy row points at the dummy page only"

    def kv(self) -> list[torch.Tensor]:
        """The pool's contents but for the dummy page."""
        pool: Any = self.target.memory.pool
        return [buffer[1:].clone() for spec in pool.layout.owners for buffer in pool.get_kv_buffer(spec.layer_id)]


@pytest.mark.parametrize("num_steps", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_padded_programs_do_what_exact_steps_do(kind: str, num_steps: int, tiny_checkpoints: Path) -> None:
    """One prompt, several, cut into chunks, behind a cached prefix: tokens, and the KV in every slot of the pool."""
    for chunk, used in ((128, {16, 128}), (40, {16, 24, 64})):
        exact = Driver(tiny_checkpoints, kind, num_steps, chunked_prefill_size=chunk)
        padded = Driver(
            tiny_checkpoints, kind, num_steps, chunked_prefill_size=chunk, piecewise_cuda_graph_tokens=SIZES
        )
        assert exact.target._prefill is None
        for prompts in ([PROMPTS[0]], [PROMPTS[1]], [PROMPTS[2]], PROMPTS[2:5], PROMPTS[4:8]):
            padded.flush()
            exact.flush()
            params = [GREEDY] * len(prompts)
            assert padded.tokens(prompts, params) == exact.tokens(prompts, params)
            longer = [[*prompt, 9, 8, 7, 6] for prompt in prompts]
            assert padded.tokens(longer, params) == exact.tokens(longer, params)
        for mine, other in zip(padded.kv(), exact.kv(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
        assert set(padded.sizes) == used, "every step fits, exactly or padded"


@pytest.mark.parametrize("kind", ["dense", "eseries", "moe"])
def test_logits_and_hidden_states_are_those_of_exact_steps(kind: str, tiny_checkpoints: Path) -> None:
    driver = Driver(tiny_checkpoints, kind, 3, piecewise_cuda_graph_tokens=SIZES)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    run, extend_batch = driver.steps.run, driver.target._extend_batch

    def both(batch: ScheduleBatch) -> Any:
        out = run(batch)
        exact = driver.target.runner.model.forward(extend_batch(batch, None))
        torch.testing.assert_close(out.next_token_logits, exact.next_token_logits, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(out.hidden_states, exact.hidden_states, rtol=1e-4, atol=1e-5)
        seen.append((out.hidden_states, exact.hidden_states))
        return out

    driver.steps.run = both  # type: ignore[method-assign]
    driver.run(PROMPTS[3:6], [GREEDY] * 3)
    driver.run(PROMPTS[1:2], [GREEDY])
    assert driver.sizes == [128, 16]
    for hidden, exact in seen:  # a seed is kept while other prompts are computed
        torch.testing.assert_close(hidden, exact, rtol=1e-4, atol=1e-5)


def test_what_does_not_fit_runs_as_it_is(tiny_checkpoints: Path) -> None:
    """Too many tokens, too many requests, or rows that a program does not keep."""
    many: dict[str, Any] = {"max_running_requests": len(PROMPTS)}
    exact = Driver(tiny_checkpoints, "eseries", 0, **many)
    padded = Driver(tiny_checkpoints, "eseries", 0, piecewise_cuda_graph_tokens=(16, 64), **many)
    params = [GREEDY] * len(PROMPTS)
    assert len(PROMPTS) > MAX_REQUESTS
    short = [prompt[:4] for prompt in PROMPTS]
    for prompts in (PROMPTS[2:3], short):
        some = params[: len(prompts)]
        assert padded.tokens(prompts, some) == exact.tokens(prompts, some)
    assert padded.sizes == [None, None]
    wish = {"logprobs": LogprobOptions(start_len=0, top_num=2, token_ids=())}
    (mine,), (other,) = (d.run(PROMPTS[3:4], [GREEDY], wishes=[wish]) for d in (padded, exact))
    assert mine.token_ids == other.token_ids and padded.sizes == [None, None], "nor was the program asked"


def test_requests_that_edit_logits_start_from_a_program(tiny_checkpoints: Path) -> None:
    params = [
        SamplingParams(temperature=0.0, max_new_tokens=6, ignore_eos=True, logit_bias=((9, 100.0),)),
        SamplingParams(temperature=0.9, max_new_tokens=6, ignore_eos=True, sampling_seed=3, top_k=9),
        GREEDY,
    ]
    exact = Driver(tiny_checkpoints, "dense", 3)
    padded = Driver(tiny_checkpoints, "dense", 3, piecewise_cuda_graph_tokens=SIZES)
    expected = exact.tokens(PROMPTS[3:6], params)
    assert expected[0][0] == 9
    assert padded.tokens(PROMPTS[3:6], params) == expected
    assert padded.sizes == [128]


def test_sizes() -> None:
    """At most a quarter of a step is padding, beyond those that the host bounds anyway."""

    def sizes(largest: int, **kwargs: Any) -> tuple[int, ...]:
        given = {"capture": True, "prefill_max_size": largest, **kwargs}
        return prefill_sizes(GraphConfig(sizes=None, max_size=1, pad=True, overlap=True, **given))

    found = sizes(2048)
    assert len(found) == 16 and found == tuple(sorted(set(found))) and found[-1] == 2048
    pairs = list(zip(found, found[1:], strict=False))
    assert all(5 * (below + 1) >= 4 * size for below, size in pairs if below >= 512)
    assert sizes(100) == (16, 32, 64, 100) and sizes(16) == (16,) and sizes(7) == (7,)
    assert sizes(0) == () == sizes(2048, capture=False)
    assert sizes(64, capture=False, prefill_sizes=(64, 8)) == (8, 64)


@pytest.mark.parametrize(("decode", "prompts", "kept"), [(300, 100, 300), (100, 250, 250)])
def test_memory_of_graphs_is_kept_once(
    decode: int, prompts: int, kept: int, tiny_checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs share it. The peaks are those of a GPU, so here they are made up; what is measured does run."""
    driver = Driver(tiny_checkpoints, "eseries", 3)
    worker, peaks = driver.target, [1000, decode, prompts]

    def peak_bytes(device: Device, run: Callable[[], object]) -> int:
        run()
        return peaks.pop(0)

    monkeypatch.setattr(Device, "peak_bytes", peak_bytes)
    config = MemoryConfig(0.5, None, None, page_size=1, context_length=512, disable_radix_cache=False)

    def measure(sizes: tuple[int, ...]) -> int:
        load = Workload(prefill_tokens=96, batch_size=4, width=4, num_graphs=0, prefill_sizes=sizes)
        return measure_reserve_bytes(worker.runner, type(worker.backend), config, load)

    with_prompts = measure((16, 48))
    assert not peaks
    peaks = [1000, decode]
    assert with_prompts - measure(()) == kept - decode
