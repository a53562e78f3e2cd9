"""Decode steps that are started before the one before them is read: same answers, nothing lost."""

from __future__ import annotations

import random

import pytest

from fixtures.toy_worker import ToyEngine, ToyWorker, expected, serve_random_load
from sglang.srt.model_executor.forward_batch_info import ForwardMode

WIDTHS = pytest.mark.parametrize("width", [1, 3])


@WIDTHS
@pytest.mark.parametrize("total_tokens", [512, 60])  # the second makes requests give way to each other
@pytest.mark.parametrize("seed", range(6))
def test_random_load(width: int, total_tokens: int, seed: int) -> None:
    rng = random.Random(seed)
    worker = ToyWorker(total_tokens, rng.choice([1, 4]), width, context_len=64, max_requests=6, overlap=True)
    engine = ToyEngine(worker, chunked_prefill_size=rng.choice([None, 8]), conservativeness=0.01)
    serve_random_load(engine, rng)
    assert worker.num_ahead > 0


@WIDTHS
def test_alone_every_step_but_the_first_starts_early(width: int) -> None:
    engine = ToyEngine(ToyWorker(512, width=width, overlap=True))
    engine.add("one", [5, 6, 7], num_tokens=30)
    engine.run()
    assert engine.tokens("one") == expected([5, 6, 7], 30)
    decodes = sum(mode is ForwardMode.DECODE for mode, *_ in engine.worker.batches)
    assert engine.worker.num_ahead == decodes - 1
    if width == 1:  # the length of the answer is known: no step is started for nothing
        assert decodes == 29
    engine.assert_balanced()


def test_a_prompt_that_waits_is_not_kept_waiting() -> None:
    engine = ToyEngine(ToyWorker(512, overlap=True))
    engine.add("one", [5], num_tokens=30)
    engine.run(until=lambda: engine.worker.num_ahead == 3)
    engine.add("two", [6], num_tokens=5)
    del engine.worker.batches[:]
    engine.run(until=lambda: len(engine.worker.batches) == 2)
    assert engine.worker.batches[0][0] is ForwardMode.EXTEND, "the step under way is read, then the prompt runs"
    engine.run()
    assert engine.tokens("two") == expected([6], 5) and engine.tokens("one") == expected([5], 30)


@WIDTHS
def test_a_failed_step_takes_the_one_behind_it_along(width: int) -> None:
    engine = ToyEngine(ToyWorker(512, width=width, overlap=True))
    engine.add("bad", [5], num_tokens=60)
    engine.run(until=lambda: engine.worker.num_ahead == 3)
    engine.worker.fail_rids = {"bad"}
    engine.run()
    assert engine.final("bad").finish_reason.status == 500
    engine.worker.fail_rids = set()
    engine.add("good", [6], num_tokens=9)
    engine.run()
    assert engine.tokens("good") == expected([6], 9)
    engine.assert_balanced()
