"""Extend steps that take the running requests along: same answers, nothing lost, also when memory is short."""

from __future__ import annotations

import random

import pytest

from fixtures.toy_worker import ToyEngine, ToyWorker, expected


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("total_tokens", [512, 60])  # the second makes requests give way to each other
@pytest.mark.parametrize("seed", range(5))
def test_random_load(width: int, total_tokens: int, seed: int) -> None:
    rng = random.Random(seed)
    worker = ToyWorker(total_tokens, rng.choice([1, 4]), width, context_len=64, max_requests=6)
    engine = ToyEngine(worker, chunked_prefill_size=rng.choice([4, 8]), conservativeness=0.01, enable_mixed_chunk=True)
    prompts, lengths, aborted = {}, {}, set()
    for i in range(14):
        rid = f"r{i}"
        prompts[rid], lengths[rid] = [rng.randrange(1, 90) for _ in range(rng.randrange(1, 20))], rng.randrange(10, 36)
        engine.add(rid, prompts[rid], num_tokens=lengths[rid])
        for _ in range(rng.randrange(6)):
            if engine.scheduler.has_work:
                engine.scheduler.step()
        if rng.random() < 0.2:
            victim = f"r{rng.randrange(i + 1)}"
            aborted.add(victim)
            engine.abort(victim)
        engine.scheduler._send_outputs()
    engine.run()
    for rid, prompt in prompts.items():
        whole, got = expected(prompt, lengths[rid]), engine.tokens(rid)
        assert got == whole or (rid in aborted and got == whole[: len(got)]), rid
        engine.final(rid)
    assert worker.num_mixed > 0
    assert total_tokens > 60 or engine.scheduler.metrics.totals.num_retractions > 0
    engine.assert_balanced()


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
