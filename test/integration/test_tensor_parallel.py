"""Ranks that share a model say what one rank says alone, and end together."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from fixtures.make_tiny_gemma4 import KINDS
from fixtures.server_process import launch, ready_server
from fixtures.tp_cases import Answers, Case, all_answers
from fixtures.tp_ranks import run_ranks
from fixtures.waiting import wait_until
from sglang.srt.utils.env import SGLANG_DEBUG_TP_CONSISTENCY

pytestmark = pytest.mark.usefixtures("one_thread")


def case_of(folder: Path, kind: str, batch: int, num_steps: int, **options: object) -> Case:
    return Case(folder / kind, folder / f"{kind}-assistant", batch, num_steps, **options)  # type: ignore[arg-type]


def cases_of_two(folder: Path) -> tuple[Case, ...]:
    """Every kind plain, and where batch and draft width are the same number; and every feature on some kind."""
    diagonal = [case_of(folder, kind, n, n - 1) for kind in KINDS for n in (2, 3, 5)]
    plain = [case_of(folder, kind, 3, 0) for kind in KINDS]
    features = [
        case_of(folder, "dense", 4, 3, mixed=True),
        case_of(folder, "dense", 4, 0, mixed=True),
        case_of(folder, "eseries", 4, 3, mixed=True),
        case_of(folder, "moe", 4, 3, mixed=True, page_size=4, chunk=8),
        case_of(folder, "dense_keqv", 4, 3, topk=2),
        case_of(folder, "eseries", 4, 3, topk=3, page_size=16, chunk=16),
        case_of(folder, "unified", 4, 4, adaptive=True),
        case_of(folder, "mm", 5, 2, chunk=5, mixed_chunk=True),
    ]
    return (*plain, *diagonal, *features)


def check(cases: tuple[Case, ...], size: int) -> list[Answers]:
    """All ranks must say what one says alone; what it says."""
    alone = all_answers(None, cases)
    of_ranks = run_ranks(size, all_answers, cases, {SGLANG_DEBUG_TP_CONSISTENCY.name: "1"})
    wrong = [
        f"{dataclasses.replace(case, target=Path(case.target.name), assistant=Path())} rank {rank}: {got} is not {want}"
        for rank, found in enumerate(of_ranks)
        for case, got, want in zip(cases, found, alone, strict=True)
        if got.tokens != want.tokens
    ]
    assert not wrong, "\n".join(wrong)
    speculative = sum(got.accepted for case, got in zip(cases, of_ranks[0], strict=True) if case.num_steps)
    assert speculative > 0, "no draft was ever accepted, so nothing was tested"
    return alone


def test_two_ranks_say_what_one_does(tiny_checkpoints: Path) -> None:
    check(cases_of_two(tiny_checkpoints), 2)


def test_four_ranks_with_fewer_kv_heads(tiny_checkpoints: Path) -> None:
    cases = [case_of(tiny_checkpoints, kind, 3, steps) for kind, steps in (("dense", 2), ("eseries", 2), ("moe", 0))]
    check(tuple(cases), 4)


def test_a_server_answers_and_ends_with_any_of_its_ranks(tmp_path: Path) -> None:
    """A rank that dies under load takes the server down, which names it; no request hangs and no process is left."""
    spec = ("--speculative-algorithm", "FROZEN_KV_MTP")
    with (
        ready_server(tmp_path, "--tp-size", "2", "--skip-server-warmup", *spec) as server,
        ThreadPoolExecutor() as pool,
    ):
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
        reply = client.chat.completions.create(
            model="tiny-gemma4", messages=[{"role": "user", "content": "What is 7 + 5?"}], temperature=0
        )
        assert "12" in (reply.choices[0].message.content or "")
        # a grammar is ready when it is for rank 0
        digits = {"text": "7 + 5 =", "sampling_params": {"regex": "[0-9]{3}x", "temperature": 0}}
        text = httpx.post(f"{server.url}/generate", json=digits, timeout=60).json()["text"]
        assert re.fullmatch("[0-9]{3}x", text), text
        body = {"text": "Count.", "sampling_params": {"max_new_tokens": 6000, "ignore_eos": True}}
        pending = [
            pool.submit(httpx.post, f"{server.url}/generate", json=body | {"stream": stream}, timeout=60)
            for stream in (False, True)
        ]
        info = f"{server.url}/server_info"
        wait_until(lambda: httpx.get(info).json()["num_pending_requests"] == 2, "both requests to be open")
        ranks = server.scheduler_pids()
        os.kill(ranks[1], signal.SIGKILL)
        for future in pending:
            assert "rank 1 was ended by SIGKILL" in future.result(60).text
        assert server.process.wait(30) == 1
        assert "error: the scheduler process of rank 1 was ended by SIGKILL" in server.output.splitlines()
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks), "all ranks to be gone")


def test_two_machines(tmp_path: Path) -> None:
    """Both on this one: a machine that only computes ends when the one that serves does."""
    shared = ("--model-path", "tiny-gemma4", "--skip-server-warmup", "--tp-size", "2", "--nnodes", "2")
    address = ("--dist-init-addr", f"127.0.0.1:{_lasting_port()}")
    with (
        launch(tmp_path, *shared, *address, "--node-rank", "1") as second,
        launch(tmp_path, *shared, *address) as first,
    ):
        first.wait_ready()
        body = {"text": "Count.", "sampling_params": {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True}}
        assert len(httpx.post(f"{first.url}/generate", json=body, timeout=60).json()["output_ids"]) == 3
        first.process.send_signal(signal.SIGTERM)
        assert first.process.wait(60) == 0
        assert second.process.wait(60) == 0, second.output
        assert "Traceback" not in first.output + second.output


def _lasting_port() -> int:
    """A port that is free and stays so: no system gives ports as low as this to those who ask for any."""
    for port in range(20000 + os.getpid() % 5000, 30000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")
