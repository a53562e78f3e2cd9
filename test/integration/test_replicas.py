"""Replicas behind one port say what one scheduler says, keep prefixes together, and are lost one by one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from fixtures.server_process import ServerProcess, ready_server
from fixtures.waiting import wait_until
from sglang import Engine

SPEC = {"speculative_algorithm": "FROZEN_KV_MTP"}
PROMPTS = [f"<bos>What is {a} + {b}?" for a, b in ((7, 5), (2, 3), (9, 9), (4, 8), (6, 1), (3, 3))]
LONG = {"max_new_tokens": 6000, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Two replicas; the last test leaves none of them."""
    args = ("--dp-size", "2", "--speculative-algorithm", "FROZEN_KV_MTP", "--enable-metrics")
    with ready_server(tmp_path_factory.mktemp("replicas"), *args) as running:
        yield running


def post(server: ServerProcess, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=60)


def generate(server: ServerProcess, **body: Any) -> Any:
    return post(server, "/generate", body).raise_for_status().json()


def info(server: ServerProcess) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{server.url}/server_info", timeout=60).raise_for_status().json()
    return found


def totals(server: ServerProcess, name: str) -> list[int]:
    return [state["totals"][name] for state in info(server)["internal_states"]]


def samples(server: ServerProcess, name: str) -> dict[str | None, float]:
    """Value by replica."""
    page = httpx.get(f"{server.url}/metrics", timeout=60).raise_for_status().text
    (family,) = (family for family in text_string_to_metric_families(page) if family.name == f"sglang:{name}")
    return {sample.labels.get("dp_rank"): sample.value for sample in family.samples}


def test_answers_are_those_of_one_scheduler(server: ServerProcess) -> None:
    params = [
        {"max_new_tokens": 24, "ignore_eos": True} | sampling
        for sampling in ({"temperature": 0}, {"temperature": 1.0, "sampling_seed": 11}) * 3
    ]
    with Engine(model_path="tiny-gemma4", log_level="warning", **SPEC) as engine:
        alone = [reply["output_ids"] for reply in engine.generate(PROMPTS, params)]
    before = totals(server, "num_requests")
    together = [reply["output_ids"] for reply in generate(server, text=PROMPTS, sampling_params=params)]
    assert together == alone
    took = [after - earlier for after, earlier in zip(totals(server, "num_requests"), before, strict=True)]
    assert sum(took) == len(PROMPTS) and min(took) > 0, took
    assert min(totals(server, "verify_ct")) > 0, "both replicas speculate"
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
    for _ in range(2):
        reply = client.chat.completions.create(
            model="tiny-gemma4", messages=[{"role": "user", "content": "What is 7 + 5?"}], temperature=0
        )
        assert "12" in (reply.choices[0].message.content or "")


def test_requests_follow_their_prefixes(server: ServerProcess) -> None:
    """Four conversations by turns: each turn finds what the one before it left, whichever replica has it."""
    assert post(server, "/flush_cache", {}).status_code == 200
    contexts = [[2, *range(first, first + 150)] for first in (100, 400, 700, 1000)]
    before = totals(server, "num_requests")
    cached = []
    for _ in range(3):
        for context in contexts:
            reply = generate(server, input_ids=context, sampling_params=LONG | {"max_new_tokens": 40})
            cached.append(reply["meta_info"]["cached_tokens"])
            context += reply["output_ids"]
    # at first no more than the one token that all begin with; then all but what was never computed
    assert max(cached[:4]) <= 1 and min(cached[4:8]) > 150 and min(cached[8:]) > 190, cached
    took = [after - earlier for after, earlier in zip(totals(server, "num_requests"), before, strict=True)]
    assert took == [6, 6]


def test_commands_and_questions_reach_every_replica(server: ServerProcess) -> None:
    found = info(server)
    assert [state["dp_rank"] for state in found["internal_states"]] == [0, 1] and found["lost_replicas"] == {}
    assert found["dp_size"] == 2 and found["integrity"]["ok"]
    assert found["integrity"]["total"] == sum(state["kv_cache"]["total"] for state in found["internal_states"])
    assert found["integrity"]["evictable"] > 0
    assert post(server, "/flush_cache", {}).json()["success"]
    assert info(server)["integrity"]["evictable"] == 0
    assert samples(server, "num_running_reqs") == {"0": 0, "1": 0}
    assert samples(server, "num_lost_replicas") == {None: 0}
    settings = {"server_args": {"max_queued_requests": 0}}
    refused = post(server, "/set_internal_state", settings)
    assert refused.status_code == 400 and "max-queued-requests" in refused.text


def start_long(server: ServerProcess, pool: ThreadPoolExecutor, num: int) -> list[Future[httpx.Response]]:
    """Requests that run until they are ended, half of them as streams."""
    bodies = [{"text": f"Count {i}.", "sampling_params": LONG, "stream": bool(i % 2)} for i in range(num)]
    pending = [pool.submit(post, server, "/generate", body) for body in bodies]
    wait_until(lambda: sum(state["num_running_reqs"] for state in info(server)["internal_states"]) == num, "all to run")
    return pending


def test_replicas_are_lost_one_by_one(server: ServerProcess) -> None:
    with ThreadPoolExecutor(8) as pool:
        pending = start_long(server, pool, 4)
        first, second = server.scheduler_pids()
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: sum(future.done() for future in pending) == 2, "the requests of the lost replica to end")
        for future in pending:
            if future.done():
                assert "was ended by SIGKILL" in future.result().text and "replica 0" in future.result().text
        found = info(server)
        assert [state["dp_rank"] for state in found["internal_states"]] == [1]
        assert "SIGKILL" in found["lost_replicas"]["0"] and found["num_pending_requests"] == 2
        assert samples(server, "num_lost_replicas") == {None: 1} and samples(server, "num_running_reqs") == {"1": 2}
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert len(generate(server, text=PROMPTS, sampling_params={"max_new_tokens": 4, "ignore_eos": True})) == 6
        assert "1 of 2 replicas go on" in server.output

        os.kill(second, signal.SIGKILL)
        for future in pending:
            assert "was ended by SIGKILL" in future.result(60).text
    assert server.process.wait(30) == 1
    assert "\nerror: all 2 replicas have ended, the last one was replica 1: " in server.output


def test_an_engine_with_replicas() -> None:
    with Engine(model_path="tiny-gemma4", log_level="warning", dp_size=2, load_balance_method="round_robin") as engine:
        replies = engine.generate(PROMPTS, {"max_new_tokens": 6, "ignore_eos": True, "temperature": 0})
        assert len(replies) == len(PROMPTS)
        states = engine.get_server_info()["internal_states"]
        assert [state["totals"]["num_requests"] for state in states] == [3, 3]
        assert engine.flush_cache()
