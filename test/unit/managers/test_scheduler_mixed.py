"""Extend steps that take the running requests along: same answers, nothing lost, also when memory is short."""

from __future__ import annotations

import random

import pytest

from fixtures.toy_worker import ToyEngine, ToyWorker, expected, serve_random_load


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("total_tokens", [512, 60])  # the second makes requests give way to each other
@pytest.mark.parametrize("seed", range(5))
def test_random_load(width: int, total_tokens: int, seed: int) -> None:
    rng = random.Random(seed)
    worker = ToyWorker(total_tokens, rng.choice([1, 4]), width, context_len=64, max_requests=6)
    engine = ToyEngine(worker, chunked_prefill_size=rng.choice([4, 8]), conservativeness=0.01, enable_mixed_chunk=True)
    serve_random_load(engine, rng)
    assert worker.num_mixed > 0


def test_a_mixed_step_that_fails_ends_the_requests_of_both_parts() -> None:
    engine = ToyEngine(enable_mixed_chunk=True)
    engine.add("running", [5, 6], num_tokens=30)
    engine.run(until=lambda: len(engine.scheduler.running.reqs) == 1)
    engine.add("prompt", [7, 8, 9], num_tokens=5)
    engine.worker.fail_rids = {"prompt"}
    engine.scheduler.step()
    engine.scheduler._send_outputs()
    assert {engine.final(rid).finish_reason.type for rid in ("running", "prompt")} == {"abort"}
    engine.worker.fail_rids = set()
    engine.add("after", [7, 8, 9], num_tokens=5)
    engine.run()
    assert engine.tokens("after") == expected([7, 8, 9], 5)
    engine.assert_balanced()
