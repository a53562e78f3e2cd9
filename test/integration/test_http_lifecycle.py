"""How a server starts, refuses, is overloaded, loses its scheduler and ends."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from fixtures.server_process import ServerProcess, launch, ready_server
from fixtures.waiting import wait_until

KEY = "open sesame"
LONG = {"text": "<bos>", "sampling_params": {"max_new_tokens": 6000, "ignore_eos": True}}


def _gone(pid: int, within_s: float = 10.0) -> bool:
    """Whether a process ends in time; one that was not reaped by its new parent counts as ended."""
    end = time.monotonic() + within_s
    status = Path(f"/proc/{pid}/status")
    while status.exists() and "State:\tZ" not in status.read_text():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One request runs, one waits, and a key is needed."""
    limits = ("--max-running-requests", "1", "--max-queued-requests", "1", "--max-total-tokens", "7000")
    with ready_server(tmp_path_factory.mktemp("small"), *limits, "--api-key", KEY) as running:
        yield running


@pytest.fixture
def session(small: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=small.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=30) as client:
        yield client


@pytest.mark.parametrize(
    "header", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}, {"Authorization": ""}]
)
def test_requests_without_the_key_are_refused(small: ServerProcess, header: dict[str, str]) -> None:
    with httpx.Client(base_url=small.url, headers=header) as client:
        for reply in (client.post("/generate", json=LONG), client.get("/v1/models"), client.get("/nothing")):
            assert reply.status_code == 401 and reply.json()["error"]["code"] == "invalid_api_key"
        assert client.get("/health").status_code == 200


def test_the_key_opens_and_stays_secret(small: ServerProcess, session: httpx.Client) -> None:
    client = openai.OpenAI(base_url=f"{small.url}/v1", api_key=KEY, max_retries=0)
    assert client.models.list().data[0].id == "tiny-gemma4"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    info = session.get("/server_info")
    assert info.status_code == 200 and KEY not in info.text
    announced = small.output.partition("ready to roll!")[2]
    assert KEY not in small.output and '-H "Authorization: Bearer $API_KEY"' in announced
    assert 'api_key=os.environ["API_KEY"]' in announced and "import os\nfrom openai" in announced


def _state(session: httpx.Client) -> dict[str, Any]:
    state: dict[str, Any] = session.get("/server_info").json()["internal_states"][0]
    return state


def test_full_queue_is_status_503(session: httpx.Client) -> None:
    def post(_: int) -> httpx.Response:
        return session.post("/generate", json=LONG)

    with ThreadPoolExecutor(8) as pool:
        pending = [pool.submit(post, 0)]
        # one after the other: two that arrive together both wait for a moment, and the queue holds one
        wait_until(lambda: _state(session)["num_running_reqs"] == 1, "the first request to run")
        pending.append(pool.submit(post, 1))
        wait_until(lambda: _state(session)["num_queue_reqs"] == 1, "the second request to wait")
        for stream in (False, True):
            refused = session.post("/generate", json=LONG | {"stream": stream})
            assert refused.status_code == 503 and "the queue is full" in refused.json()["error"]["message"]
        chat = {"messages": [{"role": "user", "content": "Hello"}], "stream": True}
        refused = session.post("/v1/chat/completions", json=chat)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "queue_full"
        assert session.post("/abort_request", json={"abort_all": True}).json() == {"aborted": 2}
        assert {future.result().json()["meta_info"]["finish_reason"]["type"] for future in pending} == {"abort"}
    assert session.get("/server_info").json()["integrity"]["ok"]


def test_prompt_that_only_the_memory_is_too_small_for(session: httpx.Client) -> None:
    reply = session.post("/generate", json={"input_ids": [50] * 7500})
    assert reply.status_code == 400 and "--max-total-tokens" in reply.json()["error"]["message"]


def test_a_taken_port_is_one_sentence(small: ServerProcess, tmp_path: Path) -> None:
    with launch(tmp_path, "--model-path", "tiny-gemma4", port=small.port) as second:
        assert second.process.wait(30) == 1
        last = second.output.strip().splitlines()[-1]
        assert last.startswith(f"error: cannot listen on --host 127.0.0.1 --port {small.port}")
        assert "Traceback" not in second.output


def test_an_interrupt_ends_everything_and_lets_short_requests_finish(tmp_path: Path) -> None:
    with ready_server(tmp_path, "--skip-server-warmup") as server:
        scheduler = server.scheduler_pid()
        body = {"text": "<bos>", "sampling_params": {"max_new_tokens": 100, "ignore_eos": True}, "stream": True}
        with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=30) as stream:
            lines = stream.iter_lines()
            next(lines)
            # as from a terminal: the signal reaches both processes
            os.kill(scheduler, signal.SIGINT)
            server.process.send_signal(signal.SIGINT)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.process.wait(15) == 0
        assert _gone(scheduler) and "Traceback" not in server.output


def _streams(server: ServerProcess, pool: ThreadPoolExecutor) -> list[Future[str]]:
    """Endless requests, one as /generate and one as a chat streams it, which have begun; what each of them gets."""
    chat = {"messages": [{"role": "user", "content": "Count."}], "max_tokens": 6000, "ignore_eos": True}
    begun = [threading.Event(), threading.Event()]

    def read(path: str, body: dict[str, Any], has_begun: threading.Event) -> str:
        text = ""
        with httpx.stream("POST", server.url + path, json=body | {"stream": True}, timeout=60) as stream:
            for piece in stream.iter_text():
                text += piece
                has_begun.set()
        return text

    futures = [
        pool.submit(read, "/generate", LONG, begun[0]),
        pool.submit(read, "/v1/chat/completions", chat, begun[1]),
    ]
    assert all(event.wait(30) for event in begun)
    return futures


@pytest.mark.parametrize("patient", [False, True])
def test_requests_that_do_not_finish_in_time_get_a_final_event(tmp_path: Path, patient: bool) -> None:
    """One signal and a short time, or a long time and a second signal."""
    limit = ("--shutdown-timeout", "600" if patient else "0.3")
    with ready_server(tmp_path, "--skip-server-warmup", *limit) as server, ThreadPoolExecutor(2) as pool:
        streams = _streams(server, pool)
        server.process.send_signal(signal.SIGTERM)
        if patient:
            # the listening socket closes first
            wait_until(lambda: not _answers(server), "the server to stop listening")
            assert not any(stream.done() for stream in streams)
            server.process.send_signal(signal.SIGTERM)
        native, chat = (stream.result() for stream in streams)
        for text in (native, chat):
            assert text.endswith("data: [DONE]\n\n") and '"error"' not in text
        events = native.split("\n\n")
        reason = json.loads(events[-3].removeprefix("data: "))["meta_info"]["finish_reason"]
        assert reason["type"] == "abort"
        last = json.loads(chat.split("\n\n")[-3].removeprefix("data: "))
        assert last["choices"][0]["finish_reason"] == "abort"
        assert server.process.wait(20) == 0
        assert "2 requests are aborted" in server.output and "Traceback" not in server.output


def _answers(server: ServerProcess) -> bool:
    try:
        return httpx.get(f"{server.url}/health").status_code == 200
    except httpx.ConnectError:
        return False


class _Sleeps:
    """Unpickling it takes for ever."""

    def __reduce__(self) -> tuple[Any, tuple[float]]:
        return time.sleep, (3600.0,)


def test_a_scheduler_that_hangs_ends_the_server_and_is_explained(tmp_path: Path) -> None:
    flags = ("--enable-custom-logit-processor", "--watchdog-timeout", "2", "--soft-watchdog-timeout", "0.5")
    with ready_server(tmp_path, "--skip-server-warmup", *flags) as server, ThreadPoolExecutor(3) as pool:
        scheduler = server.scheduler_pid()
        stream, _ = _streams(server, pool)
        processor = json.dumps({"callable": pickle.dumps(_Sleeps()).hex()})
        hanging = pool.submit(
            lambda: httpx.post(f"{server.url}/generate", json=LONG | {"custom_logit_processor": processor}, timeout=60)
        )
        message = "the scheduler hung for longer than --watchdog-timeout"
        reply = hanging.result()
        assert reply.status_code == 500 and message in reply.json()["error"]["message"]
        assert message in stream.result() and stream.result().endswith("data: [DONE]\n\n")
        assert server.process.wait(30) == 1
        assert _gone(scheduler)
        assert server.output.count("the scheduler hangs in stage receive, for ") == 2, "once soft, once hard"
        assert "_unpickle" in server.output and f"error: {message}" in server.output


def test_a_signal_during_start_up_ends_everything(tmp_path: Path) -> None:
    with launch(tmp_path, "--model-path", "tiny-gemma4") as server:
        pid = server.process.pid
        wait_until(lambda: any(b"spawn_main" in _command(child) for child in _children(pid)), "the scheduler process")
        time.sleep(1.0)
        scheduler = server.scheduler_pid()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
        assert _gone(scheduler) and "Traceback" not in server.output


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def _command(pid: str) -> bytes:
    file = Path(f"/proc/{pid}/cmdline")
    return file.read_bytes() if file.exists() else b""


def test_death_of_the_scheduler_fails_requests_and_ends_the_server(tmp_path: Path) -> None:
    with ready_server(tmp_path, "--skip-server-warmup") as server, ThreadPoolExecutor(3) as pool:

        def post(stream: bool) -> httpx.Response:
            return httpx.post(f"{server.url}/generate", json=LONG | {"stream": stream}, timeout=30)

        pending = [pool.submit(post, stream) for stream in (False, True)]
        info = f"{server.url}/server_info"
        wait_until(lambda: httpx.get(info).json()["num_pending_requests"] == 2, "both requests to be open")
        os.kill(server.scheduler_pid(), signal.SIGKILL)
        whole, stream = (future.result() for future in pending)
        assert whole.status_code == 500 and "SIGKILL" in whole.json()["error"]["message"]
        # a stream that had not begun is answered like a whole reply
        assert "SIGKILL" in stream.text
        assert stream.status_code == 500 or stream.text.endswith("data: [DONE]\n\n")
        assert server.process.wait(15) == 1
        assert "error: the scheduler process was ended by SIGKILL" in server.output.splitlines()


def test_death_of_the_server_takes_the_scheduler_along(tmp_path: Path) -> None:
    host = "::1" if _has_ipv6() else "127.0.0.1"
    with ready_server(tmp_path, "--skip-server-warmup", "--host", host) as server:
        with socket.create_connection((host, server.port)) as raw:
            raw.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            assert b" 200 " in raw.recv(100)
        assert f"http://{'[::1]' if host == '::1' else host}:{server.port}/v1" in server.output
        scheduler = server.scheduler_pid()
        server.process.kill()
        assert _gone(scheduler)


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_an_idle_server_uses_no_cpu(small: ServerProcess, session: httpx.Client) -> None:
    assert session.get("/health_generate").status_code == 200
    time.sleep(0.3)
    pids = (small.process.pid, small.scheduler_pid())
    before = [_cpu_s(pid) for pid in pids]
    time.sleep(2.0)
    used = [after - start for after, start in zip((_cpu_s(pid) for pid in pids), before, strict=True)]
    # uvicorn looks at its clock ten times a second; the scheduler does nothing at all
    assert used[0] <= 0.1 and used[1] <= 0.02, used


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize(
    "args, message",
    [
        (["--max-total-tokens", "2"], "is too small for a request"),
        (["--host", "203.0.113.1"], "cannot listen on --host 203.0.113.1"),
        (["--chat-template", "/nowhere"], "--chat-template '/nowhere' is not a file"),
    ],
)
def test_start_that_cannot_work_is_one_sentence(tmp_path: Path, args: list[str], message: str) -> None:
    with launch(tmp_path, "--model-path", "tiny-gemma4", *args) as server:
        assert server.process.wait(60) in (1, 2)
        last = server.output.strip().splitlines()[-1]
        assert last.startswith("error: ") and message in last
        assert "Traceback" not in server.output


def test_truncated_weights_are_one_sentence(tmp_path: Path, trained_pair: Any) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    for file in trained_pair.target.iterdir():
        data = file.read_bytes()
        (folder / file.name).write_bytes(data[: len(data) // 2] if file.suffix == ".safetensors" else data)
    with launch(tmp_path, "--model-path", str(folder)) as server:
        assert server.process.wait(60) == 1
        last = server.output.strip().splitlines()[-1]
        assert last.startswith("error: ") and ".safetensors" in last and "Traceback" not in server.output
