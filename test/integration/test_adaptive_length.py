"""Draft lengths that change from round to round, and that requests limit, change no token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import sglang.srt.speculative.frozen_kv_mtp_worker as worker_module
from fixtures.make_tiny_gemma4 import KINDS
from fixtures.scheduler_driver import SchedulerDriver
from sglang import Engine
from sglang.srt.managers.io_struct import TokenOut
from sglang.srt.model_executor.decode_loop import DecodeLoop
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.frozen_kv_mtp_worker import FrozenKVMTPWorker

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (1, 7, 23, 8, 40, 3)


def prompts() -> list[list[int]]:
    return [[4 + (31 * i + 7 * j) % 500 for j in range(num)] for i, num in enumerate(LENGTHS)]


def params(caps: tuple[int | None, ...] = (None,) * 6) -> list[SamplingParams]:
    temperatures = (0.0, 0.9, 0.0, 1.2, 0.0, 1.0)
    return [
        SamplingParams(
            temperature=t, max_new_tokens=24 - 3 * (i % 3), ignore_eos=True, sampling_seed=i, speculative_num_steps=cap
        )
        for i, (t, cap) in enumerate(zip(temperatures, caps, strict=True))
    ]


class Cycling:
    """Every length in turn, whatever it costs: the harshest thing a policy can do."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.lengths, self.turn = lengths, 0
        self.chosen: list[int] = []
        self.observed: list[tuple[int, Any, Any]] = []

    def choose(self, rids: Any, caps: Any) -> int:
        self.turn += 1
        self.chosen.append(self.lengths[self.turn * 7 % len(self.lengths)])
        return self.chosen[-1]

    def observe(self, num_drafts: int, rids: Any, accept_lens: Any, caps: Any) -> None:
        self.observed.append((num_drafts, list(accept_lens), list(caps)))

    def observe_time(self, num_rows: int, num_drafts: int, round_s: float, host_s: float | None) -> None:
        assert round_s > 0 and (host_s is None or host_s > 0)


def driver_of(folder: Path, kind: str, num_steps: int, **kwargs: object) -> tuple[SchedulerDriver, DecodeLoop]:
    driver = SchedulerDriver(folder / kind, folder / f"{kind}-assistant", num_steps, **kwargs)
    assert isinstance(driver.worker, FrozenKVMTPWorker)
    return driver, driver.worker.loop


@pytest.fixture(scope="module")
def alone(tiny_checkpoints: Path) -> dict[str, list[tuple[int, ...]]]:
    found = {}
    for kind in KINDS:
        plain = SchedulerDriver(tiny_checkpoints / kind, None, 0)
        found[kind] = [plain.tokens([p], [q])[0] for p, q in zip(prompts(), params(), strict=True)]
    return found


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_lengths_in_turn(kind: str, overlap: bool, alone: dict[str, Any], tiny_checkpoints: Path) -> None:
    """Steps that are padded are started one ahead."""
    options: dict[str, Any] = {"cuda_graph_bs": (2, 4, 8)} if overlap else {"disable_overlap_schedule": True}
    driver, loop = driver_of(tiny_checkpoints, kind, 5, **options)
    loop._length = cycling = Cycling((0, 1, 2, 3, 4, 5))
    for arrivals in ([0] * 6, [0, 1, 2, 4, 7, 9]):
        assert driver.tokens(prompts(), params(), arrivals=arrivals) == alone[kind]
    assert set(cycling.chosen) == set(range(6))
    gained = [lens for n, lens, _ in cycling.observed for lens in lens]
    assert max(gained) > 1 and all(max(lens) <= n + 1 for n, lens, _ in cycling.observed)


@pytest.mark.parametrize("extra", [{}, {"page_size": 16}, {"max_total_tokens": 110, "max_running_requests": 6}])
def test_the_policy_itself(extra: dict[str, object], alone: dict[str, Any], tiny_checkpoints: Path) -> None:
    options = {"schedule_conservativeness": 0.01, **extra}
    driver, _ = driver_of(tiny_checkpoints, "eseries", 4, speculative_adaptive=True, **options)
    for arrivals in ([0] * 6, [0, 1, 2, 4, 7, 9]):
        assert driver.tokens(prompts(), params(), arrivals=arrivals) == alone["eseries"]


@pytest.mark.parametrize("sizes", [None, (2, 4, 8)])
@pytest.mark.parametrize("adaptive", [False, True])
def test_requests_limit_their_own_drafts(
    adaptive: bool, sizes: tuple[int, ...] | None, alone: dict[str, Any], tiny_checkpoints: Path
) -> None:
    caps = (0, 1, None, 2, 99, 0)
    driver, _ = driver_of(tiny_checkpoints, "dense", 4, speculative_adaptive=adaptive, cuda_graph_bs=sizes)
    outs = driver.run(prompts(), params(caps))
    assert [out.token_ids for out in outs] == alone["dense"]
    for out, cap in zip(outs, caps, strict=True):
        check_cap(out, 4 if cap is None else min(cap, 4))
    if not adaptive:
        assert outs[2].spec is not None and outs[2].spec.accepted_tokens > 0, "others go on drafting"


def check_cap(out: TokenOut, cap: int) -> None:
    assert out.spec is not None
    assert not any(out.spec.accepted_by_position[cap:]) and not any(out.spec.drafted_by_position[cap:])
    assert out.spec.draft_tokens <= cap * out.spec.verify_ct
    # every token after the first came from a round; the last round may have had one behind the end
    assert out.spec.accepted_tokens + out.spec.verify_ct - (len(out.token_ids) - 1) in (0, 1)
    if cap == 0:
        assert out.spec.verify_ct == len(out.token_ids) - 1


def test_nobody_drafts_for_requests_that_do_not_want_drafts(tiny_checkpoints: Path) -> None:
    driver, loop = driver_of(tiny_checkpoints, "dense", 4)
    widths = []
    run = loop.runner.run
    loop.runner.run = lambda step: (widths.append(step.width), run(step))  # type: ignore[method-assign,assignment]
    driver.run(prompts()[:2], params((0, 0, 0, 0, 0, 0))[:2])
    assert set(widths) == {1}
    driver.run(prompts()[:2], params((0, 2, 0, 0, 0, 0))[:2])
    assert max(widths) == 3


def test_what_is_useful_is_what_requests_keep(tiny_checkpoints: Path) -> None:
    """Tokens behind the end of an answer are no gain, and drafts that lead there are not drafted."""
    driver, loop = driver_of(tiny_checkpoints, "dense", 4)
    loop._length = cycling = Cycling((4,))
    driver.run(prompts()[:1], params()[:1])
    driver.run(prompts()[1:2], params()[1:2])  # so that the last round of the first is judged
    observed, second = cycling.observed, params()[1].max_new_tokens
    assert second is not None
    first = observed[: next(i for i, (_, _, caps) in enumerate(observed) if i and caps == [second - 2])]
    assert sum(lens[0] for _, lens, _ in first) == params()[0].max_new_tokens - 1
    left = params()[0].max_new_tokens - 1
    for _, lens, caps in first:
        assert caps == [left - 1]
        left -= lens[0]


@pytest.mark.parametrize(("tokens", "measured"), [(4096, {1, 4, 8}), (300, {1, 2}), (100, {1})])
def test_measuring_leaves_the_pool_as_it_was(
    tokens: int, measured: set[int], tiny_checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds are timed over KV that nobody else has; a pool without room for any goes without."""
    monkeypatch.setattr(worker_module, "_MEASURED_KV_LEN", 120)
    options = {"max_total_tokens": tokens, "max_running_requests": 8, "speculative_adaptive": True}
    driver, _ = driver_of(tiny_checkpoints, "dense", 4, **options)
    assert isinstance(driver.worker, FrozenKVMTPWorker) and driver.worker._adaptive is not None
    seconds = driver.worker._adaptive.times._measured
    assert set(seconds) <= measured and (seconds[1][0] < 1.0) == (tokens > 100)
    stats = driver.worker.kv_manager.stats()
    assert stats.free == stats.total and stats.open_requests == 0
    driver.worker.kv_manager.check_integrity()


def test_lengths_adapt_by_default_and_no_answer_changes() -> None:
    params = {"temperature": 0.0, "max_new_tokens": 40, "ignore_eos": True}
    texts = ["Count from 3 to 30.", "The cat", "7 + 8 =", "one two three"]
    with Engine(model_path="tiny-gemma4", device="cpu", speculative_algorithm="FROZEN_KV_MTP") as engine:
        assert engine.server_args.speculative_adaptive
        replies = [engine.generate(texts, params | {"speculative": on}) for on in (True, True, False)]
    answers = [[reply["output_ids"] for reply in found] for found in replies]
    assert answers[0] == answers[1] == answers[2] and all(len(ids) == 40 for ids in answers[0])
