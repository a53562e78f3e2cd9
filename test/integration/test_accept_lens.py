"""The runs that tokens came in, where they are asked for: in whole replies, in streams, on every API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from fixtures.server_process import ServerProcess, ready_server

PROMPT = "<bos><|turn>user\nCount from 3 to 40.<turn|>\n<|turn>model\n"
CHAT = [{"role": "user", "content": "Count from 3 to 40."}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    args = ("--speculative-algorithm", "FROZEN_KV_MTP", "--speculative-num-steps", "4", "--stream-interval", "6")
    with ready_server(tmp_path_factory.mktemp("accept_lens"), *args) as running:
        yield running


def _ask(server: ServerProcess, path: str, **body: Any) -> dict[str, Any]:
    reply = httpx.post(server.url + path, json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def _stream(server: ServerProcess, path: str, **body: Any) -> list[dict[str, Any]]:
    reply = httpx.post(server.url + path, json={**body, "stream": True}, timeout=60)
    assert reply.status_code == 200, reply.text
    data = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    assert data.pop() == "[DONE]"
    return [json.loads(line) for line in data]


def _native(**sampling: Any) -> dict[str, Any]:
    return {"text": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 90, **sampling}}


def test_runs_are_the_rounds(server: ServerProcess) -> None:
    plain = _ask(server, "/generate", **_native())
    assert "accept_lens" not in plain["meta_info"]
    reply = _ask(server, "/generate", **_native(), return_accept_lens=True)
    assert (reply["text"], reply["output_ids"]) == (plain["text"], plain["output_ids"])
    info = reply["meta_info"]
    first, *rounds = info["accept_lens"]
    assert first == 1, "prefill brings one token"
    assert len(rounds) == info["spec_verify_ct"] and sum(rounds) + 1 == info["completion_tokens"]
    assert max(rounds) == 5 and sum(rounds) / len(rounds) > 2
    # the last round may be cut by the end of the answer, in which case its last token is an accepted draft
    accepted = sum(rounds) - len(rounds)
    assert info["spec_accept_token_num"] in (accepted, accepted + 1)
    off = _ask(server, "/generate", **_native(speculative=False), return_accept_lens=True)
    assert off["text"] == plain["text"] and set(off["meta_info"]["accept_lens"]) == {1}


def test_streams_add_runs(server: ServerProcess) -> None:
    whole = _ask(server, "/generate", **_native(stop="18"), return_accept_lens=True)
    events = _stream(server, "/generate", **_native(stop="18"), return_accept_lens=True)
    lens = [event["meta_info"]["accept_lens"] for event in events]
    assert lens[-1] == whole["meta_info"]["accept_lens"] and events[-1]["text"] == whole["text"]
    assert all(sum(seen) == event["meta_info"]["completion_tokens"] for seen, event in zip(lens, events, strict=True))
    assert all(later[: len(seen)] == seen for seen, later in zip(lens, lens[1:], strict=False))
    assert len(events) < len(lens[-1]), "events hold several rounds"


@pytest.mark.parametrize("thinking", [False, True])
def test_a_chunk_for_each_token(server: ServerProcess, thinking: bool) -> None:
    body = {"messages": CHAT, "temperature": 0, "enable_thinking": thinking}
    plain = _ask(server, "/v1/chat/completions", **body)["choices"][0]
    (choice,) = _ask(server, "/v1/chat/completions", **body, return_accept_lens=True)["choices"]
    assert choice["message"] == plain["message"] and "accept_lens" not in plain
    lens = choice["accept_lens"]
    pieces = [c for e in _stream(server, "/v1/chat/completions", **body, return_accept_lens=True) for c in e["choices"]]
    for name in ("content", "reasoning_content"):
        assert "".join(p["delta"].get(name) or "" for p in pieces) == (plain["message"][name] or "")
    assert pieces[-1]["finish_reason"] == "stop"
    positions = [p.get("accept_positions", []) for p in pieces]
    assert sum(positions, []) == [place for length in lens for place in range(length)]
    # marks around thoughts show nothing; what is read as the beginning of one may wait for the next token
    assert max(map(len, positions)) <= (4 if thinking else 2) and positions.count([0]) > 1


def test_completions_show_runs_too(server: ServerProcess) -> None:
    body = {"prompt": [PROMPT, PROMPT], "temperature": 0, "max_tokens": 40}
    plain = _ask(server, "/v1/completions", **body)["choices"]
    shown = _ask(server, "/v1/completions", **body, return_accept_lens=True)["choices"]
    assert [c["text"] for c in shown] == [c["text"] for c in plain]
    assert [sum(c["accept_lens"]) for c in shown] == [40, 40]
    chunks = [c for e in _stream(server, "/v1/completions", **body, return_accept_lens=True) for c in e["choices"]]
    for index, choice in enumerate(shown):
        mine = [c for c in chunks if c["index"] == index]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert [c["accept_positions"] for c in mine] == [[p] for n in choice["accept_lens"] for p in range(n)]


def test_a_bad_flag_is_refused(server: ServerProcess) -> None:
    for path, body in (("/generate", _native()), ("/v1/chat/completions", {"messages": CHAT})):
        reply = httpx.post(server.url + path, json={**body, "return_accept_lens": 1})
        assert reply.status_code == 400 and "return_accept_lens must be true or false" in reply.text
