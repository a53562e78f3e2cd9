"""Decode steps as programs of fixed shape, run on a CPU the way a GPU captures them: padded, and blind to the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fixtures.make_tiny_gemma4 import KINDS
from fixtures.scheduler_driver import SchedulerDriver
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.cuda_graph_runner import Step, StepKind
from sglang.srt.model_executor.decode_loop import DecodeLoop
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.frozen_kv_mtp_info import FrozenKVMTPDraftInput
from sglang.srt.speculative.frozen_kv_mtp_utils import simulated_accept_lens
from sglang.srt.speculative.frozen_kv_mtp_worker import FrozenKVMTPWorker

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_TOKENS = 16
SIZES = (2, 4, 8)  # nearly every batch of 1 to 6 is padded


def prompts_of(num: int) -> list[list[int]]:
    lengths = [1, 7, 23, 8, 40, 3]
    return [[4 + (31 * i + 7 * j) % 500 for j in range(lengths[i])] for i in range(num)]


def greedy_params(num: int) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=0.0, max_new_tokens=NUM_TOKENS - 3 * (i % 3), ignore_eos=True) for i in range(num)
    ]


def sampled_params(num: int) -> list[SamplingParams]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.9, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 0.7, "top_k": 20},
        {"temperature": 1.0, "min_p": 0.05},
    ]
    return [
        SamplingParams(max_new_tokens=NUM_TOKENS - 3 * (i % 3), ignore_eos=True, sampling_seed=i, **kinds[i % 6])
        for i in range(num)
    ]


class Driver(SchedulerDriver):
    """Watches every step: padding rows start from garbage, and nothing of theirs gets out."""

    def __init__(self, folder: Path, kind: str, num_steps: int, sizes: Sequence[int] = SIZES, **kwargs: object) -> None:
        super().__init__(folder / kind, folder / f"{kind}-assistant", num_steps, cuda_graph_bs=sizes, **kwargs)
        assert isinstance(self.worker, TpModelWorker)
        self.loop: DecodeLoop = self.worker.loop
        self.steps: list[Step] = []
        self.num_loads = 0
        self._run, self._load = self.loop.runner.run, self.loop._rows.load
        self.loop.runner.run = self._watched_run  # type: ignore[method-assign]
        self.loop._rows.load = self._watched_load  # type: ignore[method-assign]

    @property
    def pool(self) -> Any:
        worker = self.worker.target if isinstance(self.worker, FrozenKVMTPWorker) else self.worker
        return worker.memory.pool

    def _watched_load(self, reqs: Any, size: int, *, sampling: bool) -> None:
        self.num_loads += 1
        self._load(reqs, size, sampling=sampling)

    def _watched_run(self, step: Step) -> None:
        self.steps.append(step)
        rows, out = self.loop._rows.device, self.loop._out
        live = int(rows.live.sum())
        assert (rows.req_pool_indices[live : step.size] == self.worker.memory.dummy_row).all()
        for name in type(out).specs():
            buffer = getattr(out, name)[live:]
            buffer.fill_(float("nan") if buffer.is_floating_point() else 7)
        for spec in self.pool.layout.owners:
            for buffer in self.pool.get_kv_buffer(spec.layer_id):
                buffer[0] = float("nan")
        self._run(step)
        assert (rows.committed_lens[live : step.size] == 1).all() and not rows.live[live : step.size].any()
        assert not self.worker.memory.req_to_token[-1].any(), "the dummy row points at the dummy page only"


@pytest.mark.parametrize("params_of", [greedy_params, sampled_params])
@pytest.mark.parametrize("kind", KINDS)
def test_padded_programs_give_the_tokens_of_exact_steps(kind: str, params_of: Any, tiny_checkpoints: Path) -> None:
    prompts, params = prompts_of(6), params_of(6)
    plain = SchedulerDriver(tiny_checkpoints / kind, None, 0)
    alone = [plain.tokens([prompt], [param])[0] for prompt, param in zip(prompts, params, strict=True)]
    for num_steps in (0, 1, 4):
        driver = Driver(tiny_checkpoints, kind, num_steps)
        for batch in range(1, 7):
            driver.flush()
            assert driver.tokens(prompts[:batch], params[:batch]) == alone[:batch], f"{num_steps=} {batch=}"
        assert driver.tokens(prompts, params, arrivals=[0, 1, 2, 4, 7, 9]) == alone, f"{num_steps=}"
        assert all(step.batch is None and step.size in SIZES for step in driver.steps)


ROUNDS = {
    "tree": {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6},
    "bushy tree": {"speculative_eagle_topk": 3, "speculative_num_draft_tokens": 12, "page_size": 16},
    "sampled": {"speculative_use_rejection_sampling": True},
}


@pytest.mark.parametrize("params_of", [greedy_params, sampled_params])
@pytest.mark.parametrize("options", ROUNDS.values(), ids=ROUNDS)
@pytest.mark.parametrize("kind", ["dense_keqv", "eseries"])
def test_other_rounds_padded(kind: str, options: dict[str, Any], params_of: Any, tiny_checkpoints: Path) -> None:
    prompts, params = prompts_of(6), params_of(6)
    exact = SchedulerDriver(tiny_checkpoints / kind, tiny_checkpoints / f"{kind}-assistant", 3, **options)
    alone = [exact.tokens([prompt], [param])[0] for prompt, param in zip(prompts, params, strict=True)]
    if params_of is greedy_params or "speculative_use_rejection_sampling" not in options:
        plain = SchedulerDriver(tiny_checkpoints / kind, None, 0)
        assert alone == plain.tokens(prompts, params)
    driver = Driver(tiny_checkpoints, kind, 3, **options)
    for batch in (1, 3, 5):
        driver.flush()
        assert driver.tokens(prompts[:batch], params[:batch]) == alone[:batch], f"{batch=}"
    assert driver.tokens(prompts, params, arrivals=[0, 1, 2, 4, 7, 9]) == alone
    assert all(step.batch is None and step.size in SIZES for step in driver.steps)


def test_rows_are_sent_only_when_the_batch_is_another(tiny_checkpoints: Path) -> None:
    params = [
        SamplingParams(temperature=t, max_new_tokens=40, ignore_eos=True, sampling_seed=1) for t in (0.0, 1.0, 0.0)
    ]
    for num_steps in (0, 3):
        for sizes in (SIZES, None):
            driver = Driver(tiny_checkpoints, "dense", num_steps, sizes)  # type: ignore[arg-type]
            driver.run(prompts_of(3), params)
            assert driver.num_loads <= 3 < len(driver.steps), "one for each change: all, then two, then one"


def test_steps_that_ask_the_host_run_unpadded_among_others(tiny_checkpoints: Path) -> None:
    params = [
        SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True),
        SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True, frequency_penalty=1.5, min_new_tokens=3),
        SamplingParams(temperature=0.8, max_new_tokens=16, ignore_eos=True, logit_bias=((9, 4.0),), sampling_seed=1),
    ]
    prompts = prompts_of(3)
    plain = SchedulerDriver(tiny_checkpoints / "eseries", None, 0)
    alone = [plain.tokens([prompt], [param])[0] for prompt, param in zip(prompts, params, strict=True)]
    for num_steps in (0, 3):
        driver = Driver(tiny_checkpoints, "eseries", num_steps)
        assert driver.tokens(prompts, params, arrivals=[0, 3, 3]) == alone
        kinds = [step.kind for step in driver.steps]
        assert kinds[0] is kinds[-1] is StepKind.GREEDY and StepKind.EDITED in kinds
        assert all((step.batch is None) == (step.kind is not StepKind.EDITED) for step in driver.steps)


def test_batches_without_a_size_run_as_they_are(tiny_checkpoints: Path) -> None:
    prompts, params = prompts_of(6), greedy_params(6)
    plain = SchedulerDriver(tiny_checkpoints / "dense", None, 0)
    alone = plain.tokens(prompts, params)
    for extra in ({}, {"disable_cuda_graph_padding": True}):
        driver = Driver(tiny_checkpoints, "dense", 2, (2, 3), disable_overlap_schedule=True, **extra)
        assert driver.tokens(prompts, params) == alone
        padded = {step.size for step in driver.steps if step.batch is None}
        exact = {step.size for step in driver.steps if step.batch is not None}
        assert 6 in exact and padded <= {2, 3} and (1 in exact) == bool(extra)


@pytest.mark.parametrize("topk", [1, 3])
@pytest.mark.parametrize("page_size", [1, 16])
def test_the_draft_program_changes_no_kv(page_size: int, topk: int, tiny_checkpoints: Path) -> None:
    driver = Driver(tiny_checkpoints, "eseries", 4, page_size=page_size, speculative_eagle_topk=topk)
    worker = driver.worker
    assert isinstance(worker, FrozenKVMTPWorker)
    draft, digests = worker.round.draft.run, []

    def watched(step: Step) -> None:
        before = driver.pool.digest()
        draft(step)
        digests.append(before == driver.pool.digest())

    worker.round.draft.run = watched  # type: ignore[method-assign]
    driver.run(prompts_of(3), greedy_params(3))
    assert len(digests) == len(driver.steps) > 3 and all(digests)


class NoHostReads(TorchDispatchMode):
    """Operators that have to know values before they can go on."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "bincount", "is_nonzero")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masks = name.startswith("index") and any(t is not None and t.dtype is torch.bool for t in _indices(args))
        repeats = name == "repeat_interleave" and len(args) == 1
        assert name not in self.FORBIDDEN and not masks and not repeats, f"{func} reads values"
        return func(*args, **(kwargs or {}))


def _indices(args: Sequence[Any]) -> Iterator[torch.Tensor | None]:
    return iter(args[1]) if len(args) > 1 and isinstance(args[1], (list, tuple)) else iter(())


@contextmanager
def no_host_reads(driver: Driver) -> Iterator[None]:
    run = driver.loop.runner.run

    def guarded(step: Step) -> None:
        with NoHostReads():
            run(step)

    driver.loop.runner.run = guarded  # type: ignore[method-assign]
    yield
    driver.loop.runner.run = run  # type: ignore[method-assign]


@pytest.mark.parametrize("params_of", [greedy_params, sampled_params])
@pytest.mark.parametrize("kind", ["dense", "dense_keqv", "eseries", "unified"])
def test_a_program_reads_nothing_back(kind: str, params_of: Any, tiny_checkpoints: Path) -> None:
    """But for attention, which plans on the host with this backend, and experts, whose reference does."""
    for num_steps, options in ((0, {}), *((3, options) for options in ({}, *ROUNDS.values()))):
        driver = Driver(tiny_checkpoints, kind, num_steps, **options)
        driver._watched_run = driver._run  # type: ignore[method-assign]  # which itself reads
        driver.loop.runner.run = driver._run  # type: ignore[method-assign]
        with no_host_reads(driver):
            driver.run(prompts_of(3), params_of(3))


def test_the_watch_sees_host_reads() -> None:
    x = torch.arange(4)
    for read in (lambda: x[x > 1], lambda: x.sum().item(), lambda: x.nonzero(), lambda: x.repeat_interleave(x)):
        with NoHostReads(), pytest.raises(AssertionError, match="reads values"):
            read()


def test_a_seed_that_was_overwritten_is_refused(tiny_checkpoints: Path) -> None:
    driver = Driver(tiny_checkpoints, "dense", 2)
    out, rows = driver.loop._out, driver.loop._rows.device
    seed = out.next_seed(rows, 1)
    assert isinstance(seed, FrozenKVMTPDraftInput)
    with pytest.raises(AssertionError, match="overwritten"):
        out.load_seed(seed)
    out.load_seed(FrozenKVMTPDraftInput(seed.bonus_tokens.clone(), seed.hidden_states + 1))
    assert (seed.hidden_states == 1).all()


@pytest.mark.parametrize("sizes", [SIZES, None])
@pytest.mark.parametrize("length", [1.0, 2.5, 4.0])
def test_acceptance_can_be_simulated(
    length: float, sizes: Sequence[int] | None, tiny_checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", str(length))
    driver = Driver(tiny_checkpoints, "dense", 3, sizes)  # type: ignore[arg-type]
    params = [SamplingParams(temperature=0.0, max_new_tokens=201, ignore_eos=True, sampling_seed=i) for i in range(3)]
    outs = driver.run(prompts_of(3), params)
    spec = [out.spec for out in outs if out.spec is not None]
    assert len(spec) == 3
    measured = sum(s.accepted_tokens + s.verify_ct for s in spec) / sum(s.verify_ct for s in spec)
    assert measured == pytest.approx(length, abs=0.15 if length % 1 else 0.02)


def test_a_simulated_length_that_cannot_be(tiny_checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("0.5", "4.5", "nan"):
        monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", text)
        with pytest.raises(ValueError, match=f"SGLANG_SIMULATE_ACC_LEN={text} must be from 1 to 4"):
            Driver(tiny_checkpoints, "dense", 3)


def test_simulated_lengths_have_the_mean_that_is_asked_for() -> None:
    seeds, committed = torch.arange(40).repeat_interleave(100), torch.arange(100).repeat(40)
    for mean in (1.0, 1.25, 2.9, 5.0):
        lens = simulated_accept_lens(mean, seeds, committed)
        assert set(lens.tolist()) <= {int(mean), int(mean) + 1} and lens.dtype is torch.int64
        assert lens.float().mean().item() == pytest.approx(mean, abs=0.03)
        assert torch.equal(lens[:7], simulated_accept_lens(mean, seeds[:7], committed[:7])), "a row's own affair"
