"""Keys, small routes and pausing, over a scheduler that echoes prompts and without sockets."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from fixtures.echo_scheduler import INFO, EchoScheduler
from sglang.srt.entrypoints.http_app import build_app
from sglang.srt.entrypoints.server_state import load_server_tokenizer
from sglang.srt.managers.channel import make_memory_channel
from sglang.srt.managers.io_struct import ControlReq, SchedulerReady
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.server_args import ServerArgs
from sglang.srt.server_args_resolution import resolve_server_args

RESOLVED = resolve_server_args(ServerArgs(model_path="tiny-gemma4", served_model_name="pet", device="cpu"))
TOKENIZER = load_server_tokenizer(RESOLVED)
ADMIN_PATHS = (
    *("/flush_cache", "/abort_request", "/pause_generation", "/continue_generation"),
    *("/set_internal_state", "/get_internal_state", "/start_profile", "/stop_profile", "/update_weights_from_disk"),
)
Work = Callable[[httpx.AsyncClient], Awaitable[None]]


@asynccontextmanager
async def _client(step_s: float, **args: Any) -> AsyncIterator[httpx.AsyncClient]:
    scheduler_channel, channel = make_memory_channel(asyncio.get_running_loop())
    thread = threading.Thread(target=EchoScheduler(scheduler_channel, step_s=step_s).run)
    thread.start()
    ready = await channel.recv()
    assert isinstance(ready, SchedulerReady)
    manager = TokenizerManager(channel, TOKENIZER, ready)
    manager.start()
    app = build_app(RESOLVED.derive(**args), manager, None)
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x", timeout=10) as client:
            yield client
    finally:
        channel.send(ControlReq("shutdown", "shutdown"))
        await asyncio.to_thread(thread.join)
        await manager.close()


def _run(work: Work, step_s: float = 0.0, **args: Any) -> None:
    async def main() -> None:
        async with _client(step_s, **args) as client:
            await asyncio.wait_for(work(client), 20)

    asyncio.run(main())


def _bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    ("keys", "user_opens", "admin_opens"),
    [
        ({}, (None, "user", "admin", "no"), (None, "user", "admin", "no")),
        ({"api_key": "user"}, ("user",), ("user",)),
        ({"admin_api_key": "admin"}, (None, "user", "admin", "no"), ("admin",)),
        ({"api_key": "user", "admin_api_key": "admin"}, ("user", "admin"), ("admin",)),
    ],
)
def test_which_key_opens_what(keys: dict[str, str], user_opens: tuple[Any, ...], admin_opens: tuple[Any, ...]) -> None:
    async def work(client: httpx.AsyncClient) -> None:
        for key in (None, "user", "admin", "no", "adminx"):
            for paths, opens in ((("/v1/models", "/tokenize", "/nothing"), user_opens), (ADMIN_PATHS, admin_opens)):
                for path in paths:
                    reply = await client.post(path, headers=_bearer(key))
                    is_open = key in opens or (key == "adminx" and "no" in opens)
                    assert (reply.status_code != 401) == is_open, (path, key, reply.text)
                    if not is_open:
                        error = reply.json()["error"]
                        named = "admin API key" if path in ADMIN_PATHS and "admin_api_key" in keys else "the API key"
                        assert named in error["message"] and error["code"] == "invalid_api_key"
                        assert reply.headers["www-authenticate"] == "Bearer"
            for path in ("/health", "/ping", "/ready", "/metrics"):
                assert (await client.get(path, headers=_bearer(key))).status_code in (200, 404)
        other = await client.post("/flush_cache", headers={"Authorization": "admin"})
        assert (other.status_code == 401) == bool(keys)

    _run(work, **keys)


def test_tokenize_and_back() -> None:
    async def work(client: httpx.AsyncClient) -> None:
        texts = ["Hello world", "naïve ☃ 𝄞", "<bos>twice"]
        for path in ("/tokenize", "/v1/tokenize"):
            one = (await client.post(path, json={"prompt": texts[0]})).json()
            ids = TOKENIZER.encode(texts[0])
            assert one == {"tokens": ids, "count": len(ids), "max_model_len": INFO["context_len"]}
            many = (await client.post(path, json={"model": "pet", "prompt": texts})).json()
            assert many["count"] == [len(ids) for ids in many["tokens"]] and many["tokens"][0] == ids
        plain = {"prompt": texts, "add_special_tokens": False}
        bare = (await client.post("/tokenize", json=plain)).json()["tokens"]
        assert bare == [TOKENIZER.encode(text, add_special_tokens=False) for text in texts]
        for path in ("/detokenize", "/v1/detokenize"):
            back = (await client.post(path, json={"tokens": many["tokens"]})).json()["text"]
            assert back == ["Hello world", "naïve ☃ 𝄞", "twice"]
            assert (await client.post(path, json={"tokens": bare[0]})).json() == {"text": texts[0]}
            shown = await client.post(path, json={"tokens": bare[2], "skip_special_tokens": False})
            assert shown.json()["text"] == texts[2]
            assert (await client.post(path, json={"tokens": [[]]})).json() == {"text": [""]}

    _run(work)


BAD = [
    ("/tokenize", {}, 400, "prompt must be a string", "prompt"),
    ("/tokenize", {"prompt": ["a", 1]}, 400, "prompt must be a string", "prompt"),
    ("/tokenize", {"prompt": "\ud800"}, 400, "prompt is not valid Unicode", "prompt"),
    ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, 400, "add_special_tokens must be", "add_special_tokens"),
    ("/tokenize", {"prompt": "a", "model": "gpt"}, 404, "the model 'gpt' does not exist", "model"),
    ("/tokenize", {"prompt": "a", "stream": True}, 400, "stream is not a known field", "stream"),
    ("/detokenize", {"tokens": "a"}, 400, "tokens must be a list of token ids", "tokens"),
    ("/detokenize", {"tokens": [1, True]}, 400, "tokens must be a list of token ids", "tokens"),
    ("/detokenize", {"tokens": [4096]}, 400, "tokens has the token id 4096", "tokens"),
    ("/detokenize", {"tokens": [[1], [-1]]}, 400, "tokens has the token id -1", "tokens"),
    ("/detokenize", {"tokens": [1], "model": 5}, 404, "the model 5 does not exist", "model"),
    ("/pause_generation", {"mode": "in_place"}, 400, "mode must be 'abort', got 'in_place'", "mode"),
    ("/start_profile", {"output_dir": "/tmp/x"}, 400, "output_dir cannot be chosen by a request", "output_dir"),
    ("/start_profile", {"profile_prefix": "../x"}, 400, "profile_prefix is not a known field", "profile_prefix"),
    ("/start_profile", {"num_steps": 0}, 400, "num_steps must be an integer from 1", "num_steps"),
    ("/start_profile", {"start_step": True}, 400, "start_step must be an integer from 0", "start_step"),
    ("/start_profile", {"activities": ["MEM"]}, 400, "activities must be a list of CPU and GPU", "activities"),
    ("/start_profile", {"with_stack": 1}, 400, "with_stack must be true or false", "with_stack"),
    ("/set_internal_state", {}, 400, "server_args must be an object", "server_args"),
    ("/set_internal_state", {"server_args": []}, 400, "server_args must be an object", "server_args"),
    ("/set_internal_state", {"args": {}}, 400, "args is not a known field", "args"),
    *(
        ("/set_internal_state", {"server_args": {name: value}}, 400, f"server_args.{name} cannot be changed", None)
        for name, value in [("api_key", "x"), ("model_path", "/"), ("bogus", 1), ("update_weights_dir", "/")]
    ),
    ("/set_internal_state", {"server_args": {"stream_interval": 0}}, 400, "--stream-interval must be", None),
    ("/set_internal_state", {"server_args": {"log_requests": "yes"}}, 400, "--log-requests must be true or", None),
    ("/update_weights_from_disk", {}, 400, "model_path must be a checkpoint directory under", "model_path"),
    ("/update_weights_from_disk", {"model_path": 5}, 400, "model_path must be a checkpoint", "model_path"),
    ("/update_weights_from_disk", {"model_path": "a\0b"}, 400, "model_path must be a checkpoint", "model_path"),
    ("/update_weights_from_disk", {"model_path": "x", "load_format": "pt"}, 400, "load_format must be", "load_format"),
    ("/update_weights_from_disk", {"model_path": "x", "is_async": True}, 400, "is_async is not supported", "is_async"),
    ("/update_weights_from_disk", {"model_path": ".", "draft_model_path": "."}, 400, "draft_model_path must", None),
    ("/update_weights_from_disk", {"model_path": ".", "abort_all_requests": 1}, 400, "abort_all_requests must", None),
]


def test_bad_bodies() -> None:
    async def work(client: httpx.AsyncClient) -> None:
        for path, body, status, message, param in BAD:
            reply = await client.post(path, content=json.dumps(body).encode())
            error = reply.json()["error"]
            assert reply.status_code == status and message in error["message"], (path, body, error)
            assert error["param"] == param or param is None
        assert (await client.get("/ready")).status_code == 200, "a bad request paused the server"

    _run(work)


def test_metrics_are_off_unless_asked_for() -> None:
    async def work(client: httpx.AsyncClient) -> None:
        reply = await client.get("/metrics")
        assert reply.status_code == 404 and "--enable-metrics" in reply.json()["error"]["message"]

    _run(work)


def test_no_page_of_another_site_may_ask() -> None:
    async def work(client: httpx.AsyncClient) -> None:
        asked = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
        for reply in (await client.options("/generate", headers=asked), await client.get("/v1/models", headers=asked)):
            assert not [name for name in reply.headers if name.startswith("access-control")]

    _run(work)


def test_pages_of_named_sites_may_ask() -> None:
    async def work(client: httpx.AsyncClient) -> None:
        for origin, is_allowed in (("https://a.org", True), ("https://b.org:8443", True), ("https://c.org", False)):
            headers = {"Origin": origin, "Authorization": "Bearer user"}
            asked = headers | {
                "Access-Control-Request-Method": "POST",
                "Access-Control-Request-Headers": "authorization,content-type",
            }
            del asked["Authorization"]  # browsers ask first without it
            replies = [
                await client.options("/generate", headers=asked),
                await client.get("/v1/models", headers=headers),
            ]
            # a page may read why it was refused
            replies.append(await client.get("/v1/models", headers={"Origin": origin}))
            assert replies[-1].status_code == 401 and replies[1].status_code == 200
            for reply in replies:
                allowed = reply.headers.get("access-control-allow-origin")
                assert allowed == (origin if is_allowed else None), (origin, reply.headers)
                assert "access-control-allow-credentials" not in reply.headers

    _run(work, allowed_origins="https://a.org, https://b.org:8443", api_key="user")


def test_settings_change_while_the_server_runs(caplog: pytest.LogCaptureFixture) -> None:
    async def work(client: httpx.AsyncClient) -> None:
        assert (await client.get("/get_internal_state")).json() == [{"dp_rank": 0, "running": 0}]
        body = {"input_ids": [50], "sampling_params": {"max_new_tokens": 2}, "rid": "quiet"}
        changes = {"log_requests": True, "log_requests_level": 3, "stream_interval": 7, "max_running_requests": 2}
        await client.post("/generate", json=body)
        assert (await client.post("/set_internal_state", json={"server_args": changes})).json() == [True]
        await client.post("/generate", json=body | {"rid": "loud"})
        info = (await client.get("/server_info")).json()
        assert {name: info[name] for name in changes} == changes
        off = {"log_requests": False, "max_running_requests": None}
        assert (await client.put("/set_internal_state", json={"server_args": off})).json() == [True]
        await client.post("/generate", json=body | {"rid": "off"})
        assert (await client.get("/server_info")).json()["max_running_requests"] is None
        logged = [record.getMessage() for record in caplog.records if "rid=" in record.getMessage()]
        assert len(logged) == 2 and all('rid="loud"' in line for line in logged) and "input_ids=[50]" in logged[0]

    with caplog.at_level("INFO"):
        _run(work)


def test_weights_come_only_from_where_they_may(tmp_path: Path) -> None:
    root = tmp_path / "weights"
    for folder in (root / "good", tmp_path / "outside"):
        folder.mkdir(parents=True)
    (root / "link").symlink_to(tmp_path / "outside")
    (root / "file").write_text("x")
    allowed = ["good", "good/../good", str(root / "good"), RESOLVED.model_path]
    refused = [
        "link",
        "../outside",
        str(tmp_path / "outside"),
        "file",
        "none",
        "/etc",
        "~",
        "/proc/self/cwd",
        "a" * 5000,
    ]

    async def work(client: httpx.AsyncClient) -> None:
        said = set()
        for name in refused:
            reply = await client.post("/update_weights_from_disk", json={"model_path": name})
            assert reply.status_code == 400, name
            said.add(reply.json()["error"]["message"].partition(", got ")[0])
        assert len(said) == 1, "what is refused tells whether it is there"
        for name in allowed:
            reply = await client.post("/update_weights_from_disk", json={"model_path": name})
            assert reply.status_code == 200, (name, reply.text)
            assert reply.json() == {
                "success": True,
                "message": "Succeeded to update model weights.",
                "num_paused_requests": 0,
            }
        assert (await client.get("/model_info")).json()["model_path"] == RESOLVED.model_path
        good = str((root / "good").resolve())
        await client.post("/update_weights_from_disk", json={"model_path": "good", "flush_cache": True})
        assert (await client.get("/model_info")).json()["model_path"] == good
        assert (await client.get("/ready")).status_code == 200

    _run(work, update_weights_dir=str(root.resolve()))


def test_pausing_aborts_and_holds_until_it_is_continued() -> None:
    async def work(client: httpx.AsyncClient) -> None:
        body = {"input_ids": [50], "sampling_params": {"max_new_tokens": 60}}
        running = asyncio.ensure_future(client.post("/generate", json=body))
        await asyncio.sleep(0.1)
        assert (await client.post("/pause_generation")).json() == {"status": "ok", "aborted": 1}
        assert (await running).json()["meta_info"]["finish_reason"]["type"] == "abort"
        short = {"input_ids": [50], "sampling_params": {"max_new_tokens": 2}}
        held = asyncio.ensure_future(client.post("/generate", json=short))
        left = asyncio.ensure_future(client.post("/generate", json=short | {"rid": "left"}))
        await asyncio.sleep(0.2)
        assert not held.done() and not left.done()
        left.cancel()
        for path in ("/ready", "/health_generate"):
            reply = await client.get(path)
            assert reply.status_code == 503 and "paused" in reply.json()["error"]["message"]
        assert (await client.get("/ping")).status_code == 200
        assert (await client.post("/pause_generation", json={"mode": "abort"})).json()["aborted"] == 0
        assert (await client.post("/continue_generation")).json() == {"status": "ok"}
        assert (await held).json()["output_ids"] == [50, 50]
        assert (await client.get("/ready")).status_code == 200
        again = await client.post("/generate", json=short | {"rid": "left"})
        assert again.json()["output_ids"] == [50, 50]

    _run(work, step_s=0.05)
