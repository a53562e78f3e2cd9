"""A real server process answers questions through the official client: many streams at once, some abandoned."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from oracle.corpus_prompts import RECIPE, Question, questions

QUESTIONS_PER_TASK = 6
NUM_STREAMS = 32
NUM_ABORTS = 12
EXACT_SHARE = 0.95
START_TIMEOUT_S = 60.0
PROJECT = Path(__file__).resolve().parents[2]


def exact_tasks() -> list[str]:
    """Tasks that the recipe's own evaluation found always answered exactly."""
    rates = json.loads((RECIPE / "report.json").read_text())["exact_answers"]
    return [task for task, rate in rates.items() if rate == 1.0]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server with the shipped pair and speculation."""
    url = f"http://127.0.0.1:{free_port()}"
    log = tmp_path_factory.mktemp("server") / "log.txt"
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", "tiny-gemma4", "--host", "127.0.0.1"]
    command += ["--port", url.rpartition(":")[2], "--speculative-algorithm", "FROZEN_KV_MTP"]
    command += ["--max-running-requests", str(NUM_STREAMS), "--max-total-tokens", "16384"]
    paths = [str(PROJECT / "python"), str(PROJECT / "sgl-kernel" / "python")]
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        )
    try:
        wait_until_healthy(url, process, log)
        yield url
        assert process.poll() is None, f"the server died:\n{log.read_text()[-3000:]}"
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


def wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end:
        assert process.poll() is None, f"the server ended while starting:\n{log.read_text()[-3000:]}"
        try:
            if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                return
        except httpx.TransportError:
            pass  # not listening yet
        time.sleep(0.2)
    pytest.fail(f"the server is not healthy after {START_TIMEOUT_S:.0f} s:\n{log.read_text()[-3000:]}")


async def ask(client: openai.AsyncOpenAI, question: Question) -> str:
    stream = await client.chat.completions.create(
        model="tiny-gemma4",
        messages=[{"role": "user", "content": question.text}],
        temperature=0,
        max_tokens=300,
        stream=True,
    )
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])


async def abandon(client: openai.AsyncOpenAI, question: Question, num_chunks: int) -> None:
    """Close a stream that would go on for long after a few pieces of text."""
    stream = await client.chat.completions.create(
        model="tiny-gemma4",
        messages=[{"role": "user", "content": question.text}],
        temperature=0,
        max_tokens=4000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    seen = 0
    async for _ in stream:
        seen += 1
        if seen == num_chunks:
            break
    await stream.close()
    assert seen == num_chunks, f"the stream ended by itself after {seen} pieces"


async def ask_all(url: str, asked: list[Question], abandoned: list[Question]) -> list[str]:
    limit = asyncio.Semaphore(NUM_STREAMS)

    async def limited(work):
        async with limit:
            return await work

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=120, max_retries=0) as client:
        leaving = [limited(abandon(client, q, 1 + i % 5)) for i, q in enumerate(abandoned)]
        staying = [limited(ask(client, q)) for q in asked]
        # abandoned ones are spread over the run
        step = len(staying) // len(leaving)
        mixed = [work for i, leave in enumerate(leaving) for work in (*staying[i * step : (i + 1) * step], leave)]
        mixed += staying[len(leaving) * step :]
        results = await asyncio.gather(*mixed)
    return [text for text in results if text is not None]


def idle_memory(url: str) -> dict[str, int]:
    """Where all KV slots are once no request is open any more; the server's own integrity check must pass."""
    end = time.monotonic() + 20
    while True:
        integrity = httpx.get(f"{url}/server_info", timeout=10).json()["integrity"]
        assert integrity["ok"], integrity["message"]
        if integrity["open_requests"] == 0:
            return integrity
        assert time.monotonic() < end, f"requests stay open after everyone left: {integrity}"
        time.sleep(0.1)


def test_answers_of_many_streams(server: str) -> None:
    asked = [question for task in exact_tasks() for question in questions(task, QUESTIONS_PER_TASK, seed=17)]
    assert len(asked) >= 60
    answers = asyncio.run(ask_all(server, asked, questions("story", NUM_ABORTS, seed=17)))
    assert len(answers) == len(asked)
    wrong = [(q.text, q.answer, a) for q, a in zip(asked, answers, strict=True) if a.strip() != q.answer]
    assert 1 - len(wrong) / len(asked) >= EXACT_SHARE, f"{len(wrong)} of {len(asked)} answers are wrong: {wrong[:5]}"

    kv = idle_memory(server)
    assert kv["free"] + kv["evictable"] == kv["total"], f"slots are missing: {kv}"
    assert kv["protected"] == kv["owned"] == 0, f"slots are held by nobody's request: {kv}"


def test_server_still_answers_and_flushes(server: str) -> None:
    """After the storm: the cache empties to the last slot and a question is answered from a cold cache."""
    idle_memory(server)
    assert httpx.post(f"{server}/flush_cache", timeout=10).status_code == 200
    kv = idle_memory(server)
    assert kv["free"] == kv["total"], f"a flushed cache holds slots: {kv}"
    (question,) = questions("capital", 1, seed=4)
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", timeout=60, max_retries=0) as client:
        reply = client.chat.completions.create(
            model="tiny-gemma4", messages=[{"role": "user", "content": question.text}], temperature=0, max_tokens=100
        )
    assert (reply.choices[0].message.content or "").strip() == question.answer
