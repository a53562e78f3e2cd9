"""`bench_serving` against a real server, its figures against the server's own `/metrics`."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fixtures.changed_checkpoint import change_checkpoint
from fixtures.server_process import ServerProcess, ready_server
from fixtures.waiting import wait_until
from sglang import bench_serving
from sglang.srt.utils.embedded import EmbeddedModel

LOAD = ("--num-prompts", "12", "--max-concurrency", "4", "--disable-tqdm", "--output-details")
SIZES = ("--random-input-len", "60", "--random-output-len", "24", "--random-range-ratio", "0.5")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("operations")


@pytest.fixture(scope="module")
def server(folder: Path, trained_pair: EmbeddedModel) -> Iterator[ServerProcess]:
    weights = folder / "weights"
    change_checkpoint(trained_pair.target, weights / "other")
    args = ("--speculative-algorithm", "FROZEN_KV_MTP", "--enable-metrics", "--update-weights-dir", str(weights))
    keys = ("--api-key", "user", "--admin-api-key", "admin")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_TORCH_PROFILER_DIR", str(folder / "traces"))
        with ready_server(folder, *args, *keys) as running:
            yield running


@pytest.fixture
def admin(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers={"Authorization": "Bearer admin"}, timeout=60) as client:
        yield client


def _scrape(server: ServerProcess) -> dict[str, float]:
    """Values summed over labels, by name without prefix; the page needs no key."""
    page = httpx.get(f"{server.url}/metrics").raise_for_status().text
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            name = sample.name.removeprefix("sglang:")
            found[name] = found.get(name, 0) + sample.value
    return found


def _bench(server: ServerProcess, folder: Path, *argv: str) -> tuple[dict[str, Any], dict[str, float]]:
    """The record of a run, and what `/metrics` counted meanwhile."""
    file = folder / "runs.jsonl"
    before = _scrape(server)
    key = ("--base-url", server.url, "--api-key", "user", "--warmup-requests", "0", "--output-file", str(file))
    assert bench_serving.main([*key, *LOAD, *SIZES, *argv]) == 0
    after = _scrape(server)
    return json.loads(file.read_text().splitlines()[-1]), {name: after[name] - before[name] for name in after}


@pytest.mark.parametrize("backend", ["sglang", "sglang-oai", "sglang-oai-chat"])
def test_figures_agree_with_metrics(
    server: ServerProcess, tmp_path: Path, backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    record, counted = _bench(server, tmp_path, "--backend", backend)
    assert "Serving Benchmark Result" in capsys.readouterr().out
    assert record["completed"] == counted["num_requests_total"] == 12 and record["failed"] == 0
    assert counted["num_aborted_requests_total"] == 0
    assert record["total_input_tokens"] == counted["prompt_tokens_total"]
    assert record["total_output_tokens"] == counted["generation_tokens_total"] == sum(record["output_lens"])
    accepted, verified = counted["spec_accepted_tokens_total"], counted["spec_verifications_total"]
    assert record["accept_length"] == (verified + accepted) / verified
    assert 1 <= record["accept_length"] <= 8 and record["max_concurrent_requests"] == 4
    # the client's clock starts before the server's and ends after it
    for name, metric in (("ttft", "time_to_first_token_seconds"), ("e2e_latency", "e2e_request_latency_seconds")):
        assert counted[f"{metric}_count"] == 12
        mean_s = counted[f"{metric}_sum"] / 12
        assert mean_s < record[f"mean_{name}_ms"] / 1e3, name
    assert counted["inter_token_latency_seconds_count"] == record["total_output_tokens"] - 12
    assert record["duration"] * record["output_throughput"] == pytest.approx(record["total_output_tokens"])
    assert counted["decode_step_seconds_count"] > 0
    assert counted["decode_step_seconds_sum"] + counted["prefill_step_seconds_sum"] <= record["duration"]


def test_shared_prefixes_are_reused(server: ServerProcess, tmp_path: Path) -> None:
    sizes = ("--gsp-num-groups", "2", "--gsp-prompts-per-group", "4", "--gsp-system-prompt-len", "64")
    rest = ("--gsp-question-len", "8", "--gsp-output-len", "4", "--tokenize-prompt", "--max-concurrency", "1")
    record, counted = _bench(server, tmp_path, "--dataset-name", "generated-shared-prefix", *sizes, *rest)
    assert record["total_input_tokens"] == 8 * 72 and record["total_output_tokens"] == 8 * 4
    # each group computes its prefix once
    assert 6 * 64 <= counted["cached_tokens_total"] < 8 * 64


def test_whole_replies_and_what_they_leave_out(server: ServerProcess, tmp_path: Path) -> None:
    record, counted = _bench(server, tmp_path, "--disable-stream", "--request-rate", "500")
    assert record["total_output_tokens"] == counted["generation_tokens_total"] and record["request_rate"] == 500
    assert record["mean_e2e_latency_ms"] > 0 and record["mean_ttft_ms"] == record["mean_itl_ms"] == 0
    assert counted["time_to_first_token_seconds_count"] == 0 and counted["e2e_request_latency_seconds_count"] == 12


def test_state_of_the_scheduler_while_it_runs(server: ServerProcess) -> None:
    headers = {"Authorization": "Bearer user"}
    params = {"max_new_tokens": 4000, "ignore_eos": True}
    body = {"input_ids": [50] * 100, "stream": True, "sampling_params": params}
    before = _scrape(server)
    with httpx.stream("POST", f"{server.url}/generate", json=body, headers=headers) as stream:
        lines = stream.iter_lines()
        for _ in range(30):
            next(lines)
        running = _scrape(server)
    assert running["scheduler_responds"] == running["num_running_reqs"] == 1 and running["num_queue_reqs"] == 0
    assert running["num_used_tokens"] > 100 and 0 < running["token_usage"] < 1
    assert running["kv_cache_tokens"] == running["max_total_num_tokens"]
    assert running["spec_accept_length"] >= 1
    deadline = 200
    while (after := _scrape(server))["num_running_reqs"] and deadline:
        deadline -= 1
    assert after["num_aborted_requests_total"] - before["num_aborted_requests_total"] == 1
    assert after["num_used_tokens"] == 0 and after["process_resident_memory_bytes"] > 0


def test_a_run_that_cannot_be(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_serving.main(["--base-url", server.url, "--api-key", "wrong"]) == 1
    assert capsys.readouterr().err.startswith("error: ")
    bad = ("--extra-request-body", '{"bogus": 1}', "--num-prompts", "2")
    assert bench_serving.main(["--base-url", server.url, "--api-key", "user", *bad]) == 1
    assert "bogus is not a known field" in capsys.readouterr().err


def test_the_keys(server: ServerProcess) -> None:
    def post(path: str, key: str) -> int:
        return httpx.post(server.url + path, headers={"Authorization": f"Bearer {key}"}).status_code

    assert [post("/flush_cache", key) for key in ("none", "user", "admin")] == [401, 401, 200]
    assert [post("/pause_generation", key) for key in ("user", "admin")] == [401, 200]
    assert httpx.get(f"{server.url}/ready").status_code == 503
    assert post("/continue_generation", "admin") == 200
    assert httpx.get(f"{server.url}/ready").status_code == 200
    info = httpx.get(f"{server.url}/server_info", headers={"Authorization": "Bearer admin"}).json()
    assert info["enable_metrics"] is True and not {"api_key", "admin_api_key"} & set(info)
    assert "admin" not in json.dumps(info)


def _body(i: int, num_tokens: int, **more: Any) -> dict[str, Any]:
    params = {"max_new_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
    return {"input_ids": [2, 100 + i, 200 + i, 300 + i], "sampling_params": params, **more}


def test_a_profile_of_some_steps(admin: httpx.Client, folder: Path) -> None:
    traces = folder / "traces"
    assert admin.post("/stop_profile").status_code == 400
    started = admin.post("/start_profile", json={"num_steps": 3, "start_step": 2, "record_shapes": True})
    assert started.status_code == 200 and started.json()["output_dir"] == str(traces)
    again = admin.post("/start_profile")
    assert again.status_code == 400 and "running already" in again.json()["error"]["message"]
    admin.post("/generate", json=_body(0, 60)).raise_for_status()
    # it ended by itself
    assert admin.post("/stop_profile").status_code == 400
    assert admin.get("/start_profile").status_code == 200
    admin.post("/generate", json=_body(1, 10)).raise_for_status()
    stopped = admin.post("/stop_profile").json()
    files = sorted(traces.iterdir())
    assert len(files) == 2 and stopped["output_file"] == str(files[-1])
    for file in files:
        names = {event.get("name") for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]}
        assert any(name and name.startswith("aten::") for name in names), file
    assert admin.get("/health_generate").status_code == 200


def test_weights_change_between_requests_under_load(admin: httpx.Client, trained_pair: EmbeddedModel) -> None:
    probe = _body(0, 12)

    def ask() -> list[int]:
        ids: list[int] = admin.post("/generate", json=probe).raise_for_status().json()["output_ids"]
        return ids

    def update(path: str, **more: Any) -> dict[str, Any]:
        reply: dict[str, Any] = admin.post("/update_weights_from_disk", json={"model_path": path, **more}).json()
        return reply

    before = ask()
    with ThreadPoolExecutor(4) as pool:
        for abort in (False, True):
            # long enough to run all at once on a busy machine
            load = [pool.submit(admin.post, "/generate", json=_body(i, 6000 if abort else 1500)) for i in range(4)]
            wait_until(lambda: _running(admin) == 4, "the load to run")
            assert update("other", abort_all_requests=abort) == {
                "success": True,
                "message": "Succeeded to update model weights.",
                "num_paused_requests": 4,
            }
            ends = [future.result().json()["meta_info"]["finish_reason"]["type"] for future in load]
            assert ends == ["abort" if abort else "length"] * 4
            after = ask()
            assert after != before
            refused = admin.post("/update_weights_from_disk", json={"model_path": "../traces"})
            assert refused.status_code == 400 and ask() == after
            assert update(str(trained_pair.target))["success"] and ask() == before
    assert admin.get("/server_info").json()["integrity"]["ok"]


def _running(client: httpx.Client) -> int:
    state = client.get("/get_internal_state").json()[0]
    return int(state["num_running_reqs"])


def test_pausing_and_continuing_under_load(admin: httpx.Client) -> None:
    expected = [admin.post("/generate", json=_body(i, 80)).json()["output_ids"] for i in range(6)]
    stop = threading.Event()

    def ask_again_and_again(i: int) -> int:
        asked = 0
        while not stop.is_set() or not asked:
            reply = admin.post("/generate", json=_body(i, 80)).raise_for_status().json()
            ids, end = reply["output_ids"], reply["meta_info"]["finish_reason"]["type"]
            assert ids == expected[i] if end == "length" else end == "abort" and ids == expected[i][: len(ids)]
            asked += 1
        return asked

    with ThreadPoolExecutor(6) as pool:
        load = [pool.submit(ask_again_and_again, i) for i in range(6)]
        try:
            for _ in range(8):
                assert admin.post("/pause_generation").status_code == 200
                assert admin.get("/ready").status_code == 503
                wait_until(lambda: _running(admin) == 0, "the paused server to be idle")
                assert admin.post("/continue_generation").status_code == 200
        finally:
            stop.set()
            admin.post("/continue_generation")
        assert all(future.result() >= 1 for future in load)
    info = admin.get("/server_info").json()
    assert info["integrity"]["ok"] and info["num_pending_requests"] == 0


def test_settings_that_change(admin: httpx.Client) -> None:
    def num_events() -> int:
        text = admin.post("/generate", json=_body(0, 900, stream=True)).raise_for_status().text
        return text.count('"meta_info"')

    assert num_events() > 2
    assert admin.post("/set_internal_state", json={"server_args": {"stream_interval": 1000}}).json() == [True]
    assert num_events() <= 2  # the first token, and all others
    assert admin.get("/server_info").json()["stream_interval"] == 1000
    assert admin.post("/set_internal_state", json={"server_args": {"stream_interval": 1}}).json() == [True]
    assert num_events() > 2
