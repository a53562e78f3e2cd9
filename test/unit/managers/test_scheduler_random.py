"""Storms of arrivals, aborts and retractions: every answer is right and the memory balances to the slot."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fixtures.toy_worker import ToyEngine, ToyWorker, expected

# few different tokens, so that prefixes are shared
PROMPTS = st.lists(st.integers(1, 2), min_size=1, max_size=40)
ARRIVAL = st.tuples(st.just("add"), PROMPTS, st.integers(0, 30), st.booleans())
ABORT = st.tuples(st.just("abort"), st.integers(0, 11))
STEPS = st.tuples(st.just("steps"), st.integers(1, 6))
ENGINES = st.fixed_dictionaries(
    {
        "page_size": st.sampled_from([1, 4, 16]),
        "width": st.sampled_from([1, 2, 5]),
        "pages": st.integers(5, 8),
        "chunk_pages": st.sampled_from([None, 1, 2, 4]),
        "policy": st.sampled_from(["fcfs", "lpm", "lof", "random"]),
        "cache": st.booleans(),
        "conservativeness": st.sampled_from([0.01, 0.5, 1.0]),
        "max_requests": st.integers(1, 6),
    }
)


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(kind=ENGINES, events=st.lists(st.one_of(ARRIVAL, ABORT, STEPS), min_size=5, max_size=40))
def test_storm(kind, events) -> None:
    worker = ToyWorker(
        kind["pages"] * 16,
        kind["page_size"],
        kind["width"],
        context_len=64,
        max_requests=kind["max_requests"],
        disable_radix_cache=not kind["cache"],
    )
    chunk = None if kind["chunk_pages"] is None else kind["chunk_pages"] * kind["page_size"]
    engine = ToyEngine(
        worker, chunked_prefill_size=chunk, policy=kind["policy"], conservativeness=kind["conservativeness"]
    )
    prompts: list[tuple[list[int], int]] = []
    aborted = set()
    for event in events:
        if event[0] == "add":
            engine.add(f"r{len(prompts)}", event[1], num_tokens=event[2], stream=event[3], sampling_seed=len(prompts))
            prompts.append((event[1], event[2]))
        elif event[0] == "abort":
            aborted.add(event[1])
            engine.abort(f"r{event[1]}")
        else:
            for _ in range(event[1]):
                if engine.scheduler.has_work:
                    engine.scheduler.step()
        worker.kv_manager.check_integrity()
    engine.run()
    room = engine.scheduler.limits.max_len
    for i, (ids, num_tokens) in enumerate(prompts):
        tokens, reason = engine.tokens(f"r{i}"), engine.final(f"r{i}").finish_reason
        answer = expected(ids, min(num_tokens, room - len(ids)), seed=i)
        assert reason.type == "length" or i in aborted
        assert tokens == (answer if reason.type == "length" else answer[: len(tokens)])
    engine.assert_balanced()
