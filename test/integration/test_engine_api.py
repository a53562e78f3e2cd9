"""The engine inside a program: same replies as the server's, from threads, event loops and iterators."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import sglang
from fixtures.waiting import wait_until
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.tokenizer_manager import SchedulerDiedError
from sglang.srt.server_args import ServerArgs

COUNT = "<bos><|turn>user\nCount from 3 to 20.<turn|>\n<|turn>model\n"
COUNTED = ", ".join(str(i) for i in range(3, 21))
GREEDY = {"temperature": 0, "max_new_tokens": 100}
LONG = {"max_new_tokens": 6000, "ignore_eos": True}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads that wait for each other are many times slower wherever something else runs on the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    spec: dict[str, Any] = {"speculative_algorithm": "FROZEN_KV_MTP", "speculative_num_steps": 4}
    with sglang.Engine(model_path="tiny-gemma4", log_level="warning", **spec) as running:
        yield running


def _assert_balanced(engine: Engine) -> None:
    end = time.monotonic() + 10
    while (info := engine.get_server_info())["internal_states"][0]["num_running_reqs"]:
        assert time.monotonic() < end
    integrity = info["integrity"]
    assert integrity["ok"] and integrity["free"] + integrity["evictable"] == integrity["total"]


def test_generate(engine: Engine) -> None:
    reply = engine.generate(COUNT, GREEDY)
    info = reply["meta_info"]
    assert reply["text"] == COUNTED and len(reply["output_ids"]) == info["completion_tokens"]
    assert info["finish_reason"] == {"type": "stop", "matched": 6}
    assert info["spec_accept_length"] > 1 and info["e2e_latency"] > 0


def test_lists_ids_and_samples(engine: Engine) -> None:
    replies = engine.generate([COUNT, COUNT], [GREEDY, GREEDY | {"n": 2}], rid=["a", "b"])
    assert [reply["text"] for reply in replies] == [COUNTED] * 3
    assert [reply["meta_info"]["id"] for reply in replies] == ["a", "b_0", "b_1"]
    ids = engine.generate(input_ids=[[2, 50], [2, 60]], sampling_params={"max_new_tokens": 3, "ignore_eos": True})
    assert [len(reply["output_ids"]) for reply in ids] == [3, 3]


def test_stream(engine: Engine) -> None:
    events = list(engine.generate(COUNT, GREEDY, stream=True))
    assert len(events) > 4 and events[-1]["text"] == COUNTED
    assert all(COUNTED.startswith(event["text"]) for event in events)
    assert [e["meta_info"]["finish_reason"] is None for e in events] == [True] * (len(events) - 1) + [False]


def test_an_iterator_that_is_left_aborts_its_request(engine: Engine) -> None:
    for _ in engine.generate("<bos>", LONG, stream=True):
        break
    events = engine.generate("<bos>", LONG | {"n": 3}, stream=True)
    next(events)
    events.close()
    _assert_balanced(engine)
    assert engine.get_server_info()["num_pending_requests"] == 0


def test_any_event_loop(engine: Engine) -> None:
    async def stream() -> str:
        text = ""
        async for event in await engine.async_generate(COUNT, GREEDY, stream=True):
            text = event["text"]
        return text

    async def main() -> list[Any]:
        whole = [engine.async_generate(COUNT, GREEDY) for _ in range(4)]
        return await asyncio.gather(*whole, stream(), stream())

    for _ in range(2):  # a second loop after the first is closed
        *replies, first, second = asyncio.run(main())
        assert [reply["text"] for reply in replies] == [COUNTED] * 4 and first == second == COUNTED


def test_cancelling_a_task_aborts_its_request(engine: Engine) -> None:
    async def main() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(engine.async_generate("<bos>", LONG), 0.3)

    asyncio.run(main())
    _assert_balanced(engine)


def test_any_thread(engine: Engine) -> None:
    with ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(lambda _: engine.generate(COUNT, GREEDY), range(16)))
    assert {reply["text"] for reply in replies} == {COUNTED}


def test_abort_and_flush(engine: Engine) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(engine.generate, "<bos>", LONG, rid="long")
        wait_until(lambda: engine.abort_request("long"), "a request to abort")
        assert running.result()["meta_info"]["finish_reason"]["type"] == "abort"
    _assert_balanced(engine)
    assert engine.flush_cache() and engine.get_server_info()["integrity"]["evictable"] == 0
    with pytest.raises(ValueError, match="rid must name a request"):
        engine.abort_request()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({}, "text or input_ids must be given"),
        ({"prompt": ""}, "text is empty"),
        ({"prompt": "a", "sampling_params": {"temperature": -1}}, "temperature must be a finite number"),
        ({"prompt": "a", "sampling_params": {"max_new_tokens": 10**6}}, "max_new_tokens is 1000000"),
        ({"input_ids": [5000]}, "input_ids has the token id 5000"),
    ],
)
def test_bad_requests(engine: Engine, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine.generate(**arguments)
    with pytest.raises(ValueError, match=message):
        list(engine.generate(**arguments, stream=True))


def test_shutdown() -> None:
    before = set(threading.enumerate())
    engine = Engine(server_args=ServerArgs(model_path="tiny-gemma4", log_level="warning"))
    assert "spec_verify_ct" not in engine.generate("<bos>", GREEDY | {"max_new_tokens": 2})["meta_info"]
    events = engine.generate("<bos>", LONG, stream=True)
    next(events)
    engine.shutdown()
    engine.shutdown()
    assert {thread for thread in threading.enumerate() if thread.name.startswith("sglang")} <= before
    for use in (lambda: engine.generate("a"), lambda: next(events), engine.flush_cache):
        with pytest.raises(SchedulerDiedError, match="shut"):
            use()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"model_path": "/nowhere"}, "--model-path '/nowhere' is not a directory"),
        ({"model_path": "tiny-gemma4", "bogus": 1}, "unknown argument 'bogus'"),
        ({"server_args": ServerArgs(model_path="tiny-gemma4"), "dtype": "float32"}, "server_args and dtype"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(**arguments)


def test_a_model_that_does_not_fit_is_an_error_and_leaves_nothing_behind() -> None:
    before = {thread for thread in threading.enumerate() if thread.name.startswith("sglang")}
    with pytest.raises(SchedulerDiedError, match="is too small for a request"):
        Engine(model_path="tiny-gemma4", max_total_tokens=2, log_level="warning")
    assert {thread for thread in threading.enumerate() if thread.name.startswith("sglang")} == before


def test_a_program_needs_no_web_server_and_ends_without_shutdown() -> None:
    program = """
import sys, sglang
engine = sglang.Engine(model_path="tiny-gemma4", log_level="warning")
print(len(engine.generate("<bos>", {"max_new_tokens": 3, "ignore_eos": True})["output_ids"]))
print([name for name in ("fastapi", "uvicorn", "zmq", "msgspec") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["3", "[]"]
