"""`sglang-router` in front of two servers: what it asks of them, what clients see, and what it does when one dies."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from fixtures.server_process import ServerProcess, free_port, launch
from fixtures.waiting import wait_until

ENDLESS = {"max_new_tokens": 8000, "ignore_eos": True, "temperature": 0}
QUESTION: list[Any] = [{"role": "user", "content": "What is 7 + 5?"}]


@dataclass(frozen=True, slots=True)
class Router:
    url: str
    servers: list[ServerProcess]

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    """The last test kills one of the servers."""
    folder = tmp_path_factory.mktemp("router")
    args = ("--model-path", "tiny-gemma4", "--speculative-algorithm", "FROZEN_KV_MTP", "--skip-server-warmup")
    with ExitStack() as stack:
        servers = [stack.enter_context(launch(folder, *args)) for _ in range(2)]
        url = stack.enter_context(launch_router(folder, [server.url for server in servers]))
        for server in servers:
            server.wait_ready()
        wait_until(lambda: is_ready(url), "the router to know both servers", 60)
        yield Router(url, servers)


@contextmanager
def launch_router(folder: Path, worker_urls: list[str]) -> Iterator[str]:
    """URL of a router over servers that may still be starting."""
    port, log = free_port(), folder / "router.log"
    command = [sys.executable, "-m", "sglang_router.launch_router", "--worker-urls", *worker_urls]
    command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    command += ["--policy", "round_robin", "--worker-startup-check-interval", "1"]
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def get(url: str) -> Any:
    return httpx.get(url, timeout=60).raise_for_status().json()


def is_ready(url: str) -> bool:
    try:
        return bool(get(f"{url}/readiness")["healthy_workers"] == 2)
    except httpx.HTTPError:
        return False


def num_requests(server: ServerProcess) -> int:
    """Those that run or wait."""
    return sum(load["num_reqs"] for load in get(f"{server.url}/get_load"))


def taken(server: ServerProcess) -> int:
    return int(get(f"{server.url}/server_info")["internal_states"][0]["totals"]["num_requests"])


def test_the_router_learns_what_it_asks_for(router: Router) -> None:
    workers = get(f"{router.url}/workers")["workers"]
    assert {worker["url"] for worker in workers} == {server.url for server in router.servers}
    for worker in workers:
        assert worker["model_id"] == "tiny-gemma4" and worker["is_healthy"]
        assert worker["metadata"]["tp_size"] == "1" and worker["metadata"]["served_model_name"] == "tiny-gemma4"
    assert [worker["load"] for worker in get(f"{router.url}/get_loads")["workers"]] == [0, 0]
    assert [model["id"] for model in get(f"{router.url}/v1/models")["data"]] == ["tiny-gemma4"]
    assert get(f"{router.url}/get_model_info")["is_generation"]


def test_chats_and_texts_pass_through(router: Router) -> None:
    client = router.client()
    before = [taken(server) for server in router.servers]
    for _ in range(2):
        reply = client.chat.completions.create(model="tiny-gemma4", messages=QUESTION, temperature=0)
        assert "12" in (reply.choices[0].message.content or "")
        pieces = client.chat.completions.create(model="tiny-gemma4", messages=QUESTION, temperature=0, stream=True)
        text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
        assert text == reply.choices[0].message.content
    completion = client.completions.create(model="tiny-gemma4", prompt="What is", max_tokens=4, temperature=0)
    assert completion.usage is not None and completion.usage.completion_tokens > 0
    response = client.responses.create(model="tiny-gemma4", input="What is 7 + 5?", temperature=0)
    assert "12" in response.output_text
    body = {"text": "What is", "sampling_params": {"max_new_tokens": 5, "ignore_eos": True, "temperature": 0}}
    reply = httpx.post(f"{router.url}/generate", json=body, timeout=60).raise_for_status().json()
    assert len(reply["output_ids"]) == 5
    assert all(taken(server) > earlier for server, earlier in zip(router.servers, before, strict=True))


def read_stream(url: str, text: str) -> bool:
    """Whether a stream came to its proper end."""
    body = {"text": text, "sampling_params": ENDLESS, "stream": True}
    seen = ""
    try:
        with httpx.stream("POST", f"{url}/generate", json=body, timeout=60) as reply:
            for piece in reply.iter_text():
                seen = (seen + piece)[-100:]
    except httpx.HTTPError:
        return False
    return "data: [DONE]" in seen


def test_a_server_is_killed_under_load(router: Router) -> None:
    """Its streams break off, what was not streamed is computed by the other one, whose requests go on."""
    killed, other = router.servers
    whole = {"text": "Say", "sampling_params": ENDLESS}
    with ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(read_stream, router.url, f"Count {i}") for i in range(4)]
        wait_until(lambda: [num_requests(server) for server in router.servers] == [2, 2], "two streams on each")
        wholes = [pool.submit(httpx.post, f"{router.url}/generate", json=whole, timeout=60) for _ in range(2)]
        wait_until(lambda: [num_requests(server) for server in router.servers] == [3, 3], "all to run")
        os.kill(killed.process.pid, 9)
        wait_until(lambda: sum(stream.done() for stream in streams) == 2, "the streams of the killed server to end")
        wait_until(lambda: num_requests(other) == 4, "the router to send the lost request to the other server")
        assert [stream.result() for stream in streams if stream.done()] == [False, False]
        for _ in range(4):
            reply = router.client().chat.completions.create(model="tiny-gemma4", messages=QUESTION, temperature=0)
            assert "12" in (reply.choices[0].message.content or "")
        httpx.post(f"{other.url}/abort_request", json={"abort_all": True}).raise_for_status()
        assert sorted(stream.result(60) for stream in streams) == [False, False, True, True]
        ends = [future.result(60).json()["meta_info"]["finish_reason"]["type"] for future in wholes]
        assert ends == ["abort", "abort"]
