"""The Ray Serve example: one replica becomes two when requests pile up, and the death of one costs only its own."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from fixtures.server_process import free_port
from fixtures.source_tree import ROOT, SOURCE_ROOTS
from fixtures.waiting import wait_until

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray[serve]'")
serve = pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'ray[serve]'")

FLAGS = "--model-path tiny-gemma4 --speculative-algorithm FROZEN_KV_MTP --log-level warning"
ENDLESS = {"max_new_tokens": 8000, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    patch = pytest.MonkeyPatch()
    # replicas import the example and the engine by name
    patch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT / "examples", *SOURCE_ROOTS))))
    patch.setenv("OMP_NUM_THREADS", "1")
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    patch.syspath_prepend(str(ROOT / "examples"))
    from ray_serve import build

    port = free_port()
    ray.init(num_cpus=1, include_dashboard=False, object_store_memory=80 << 20)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        args = {"server_args": FLAGS, "max_replicas": "2", "target_ongoing_requests": "2", "upscale_delay_s": "0"}
        serve.run(build(args))
        yield f"http://127.0.0.1:{port}/"
    finally:
        serve.shutdown()
        ray.shutdown()
        patch.undo()


def replicas() -> list[dict[str, str]]:
    """Names and namespaces of the replicas' actors."""
    return [actor for actor in ray.util.list_named_actors(all_namespaces=True) if "#Generator#" in actor["name"]]


def num_serving() -> int:
    (application,) = serve.status().applications.values()
    return int(application.deployments["Generator"].replica_states.get("RUNNING", 0))


def short(url: str, **body: Any) -> httpx.Response:
    params = {"max_new_tokens": 5, "ignore_eos": True, "temperature": 0}
    return httpx.post(url, json={"text": "<bos>What is", "sampling_params": params} | body, timeout=60)


class Stream:
    """A stream without an end, read by a thread until it is told to stop."""

    def __init__(self, url: str, pool: ThreadPoolExecutor, text: str) -> None:
        self.stop = threading.Event()
        self.num_read = 0
        self.read = pool.submit(self._read, url, {"text": text, "sampling_params": ENDLESS, "stream": True})

    def _read(self, url: str, body: dict[str, Any]) -> str:
        try:
            with httpx.stream("POST", url, json=body, timeout=120) as reply:
                for _ in reply.iter_bytes():
                    self.num_read += 1
                    if self.stop.is_set():
                        return "stopped"
        except httpx.HTTPError:
            return "broken"
        return "ended"


def test_answers_and_refusals(url: str) -> None:
    reply = short(url)
    assert reply.status_code == 200 and len(reply.json()["output_ids"]) == 5
    streamed = short(url, stream=True).text
    assert streamed.endswith("data: [DONE]\n\n")
    last = json.loads(streamed.split("data: ")[-2])
    assert last["output_ids"] == reply.json()["output_ids"] and last["meta_info"]["spec_verify_ct"] > 0
    for wrong, why in (({"bogus": 1}, "bogus"), ({"text": ""}, "text is empty")):
        refused = short(url, **wrong)
        assert refused.status_code == 400 and why in refused.json()["error"]


def test_a_second_replica_comes_and_the_first_one_is_killed(url: str) -> None:
    (first,) = replicas()
    with ThreadPoolExecutor(16) as pool:
        lost = [Stream(url, pool, f"Count {i}") for i in range(6)]
        whole = pool.submit(httpx.post, url, json={"text": "Say", "sampling_params": ENDLESS}, timeout=120)
        later: list[Stream] = []
        try:
            wait_until(lambda: num_serving() == 2, "a second replica", 90)
            later = [Stream(url, pool, f"Tell {i}") for i in range(3)]
            wait_until(lambda: all(stream.num_read > 0 for stream in later), "every stream to begin")
            ray.kill(ray.get_actor(first["name"], first["namespace"]))
            assert whole.result(120).status_code == 500
            assert [stream.read.result(60) for stream in lost] == ["broken"] * 6
            going = [stream for stream in later if not stream.read.done()]
            assert going, "the second replica had fewer requests and took none of the new ones"
            read = [stream.num_read for stream in going]
            wait_until(lambda: all(s.num_read > n for s, n in zip(going, read, strict=True)), "streams to go on")
            assert all(short(url).status_code == 200 for _ in range(4))
            wait_until(lambda: first not in replicas() and num_serving() == 2, "Ray to start another replica", 90)
        finally:
            for stream in (*lost, *later):
                stream.stop.set()
        assert {stream.read.result(60) for stream in later} <= {"stopped", "broken"}
