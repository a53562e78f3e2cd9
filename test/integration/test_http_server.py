"""Answers over HTTP from a real server process with the shipped pair and speculation on."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from fixtures.server_process import ServerProcess, ready_server
from fixtures.waiting import wait_until

COUNT = "Count from 3 to 20."
COUNTED = ", ".join(str(i) for i in range(3, 21))
# the model does not know this kind of question, and goes on until it is stopped
ENDLESS = "What is 7 plus 5?"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    args = ("--speculative-algorithm", "FROZEN_KV_MTP", "--speculative-num-steps", "4", "--served-model-name", "pet")
    args += ("--enable-cache-report",)
    with ready_server(tmp_path_factory.mktemp("http"), *args) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30)


@pytest.fixture
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as session:
        yield session


def _ask(client: openai.OpenAI, question: str, **options: Any) -> Any:
    options = {"temperature": 0, "max_tokens": 100} | options
    return client.chat.completions.create(model="pet", messages=[{"role": "user", "content": question}], **options)


def _settled(http: httpx.Client) -> dict[str, Any]:
    """Server info once nothing runs any more."""
    end = time.monotonic() + 10
    while True:
        info = http.get("/server_info").json()
        state = info["internal_states"][0]
        if state["num_running_reqs"] == state["num_queue_reqs"] == info["num_pending_requests"] == 0:
            return info
        assert time.monotonic() < end, state
        time.sleep(0.05)


def _assert_balanced(http: httpx.Client) -> None:
    integrity = _settled(http)["integrity"]
    assert integrity["ok"], integrity
    assert integrity["free"] + integrity["evictable"] == integrity["total"]
    assert integrity["owned"] == integrity["protected"] == integrity["open_requests"] == 0


def test_chat(client: openai.OpenAI) -> None:
    reply = _ask(client, COUNT)
    (choice,) = reply.choices
    assert choice.message.content == COUNTED and choice.message.role == "assistant"
    assert choice.finish_reason == "stop" and reply.model == "pet" and reply.object == "chat.completion"
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    again = _ask(client, COUNT)
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1
    assert (again.choices, again.usage.completion_tokens) == (reply.choices, reply.usage.completion_tokens)


def test_chat_stream_equals_the_whole(client: openai.OpenAI) -> None:
    whole = _ask(client, COUNT)
    chunks = list(_ask(client, COUNT, stream=True, stream_options={"include_usage": True}))
    assert len(chunks) > 4 and len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == COUNTED
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in _ask(client, COUNT, stream=True))


def test_completions(client: openai.OpenAI, http: httpx.Client) -> None:
    prompt = f"<bos><|turn>user\n{COUNT}<turn|>\n<|turn>model\n"
    reply = client.completions.create(model="pet", prompt=prompt, temperature=0, max_tokens=100)
    assert reply.choices[0].text == COUNTED and reply.object == "text_completion"
    ids = http.post("/generate", json={"text": prompt, "sampling_params": {"max_new_tokens": 0}}).json()
    assert ids["output_ids"] == [] and ids["meta_info"]["prompt_tokens"] == reply.usage.prompt_tokens
    pair = client.completions.create(model="pet", prompt=[prompt, prompt], temperature=0, max_tokens=100, n=2)
    assert [choice.text for choice in pair.choices] == [COUNTED] * 4
    assert [choice.index for choice in pair.choices] == [0, 1, 2, 3]
    assert pair.usage.prompt_tokens == 2 * reply.usage.prompt_tokens
    by_ids = client.completions.create(model="pet", prompt=[[2, 50], [2, 60]], temperature=0, max_tokens=3)
    assert len(by_ids.choices) == 2 and by_ids.usage.prompt_tokens == 4
    stream = client.completions.create(model="pet", prompt=prompt, temperature=0, max_tokens=100, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == COUNTED
    assert client.completions.create(model="pet", prompt=prompt).usage.completion_tokens <= 16


@pytest.mark.parametrize("stop", ["9", ", 12", ["20", "14, 15"], "8, 9, 10"])
def test_stop_strings_are_never_shown(client: openai.OpenAI, stop: Any) -> None:
    stops = [stop] if isinstance(stop, str) else stop
    expected = min((COUNTED[: COUNTED.find(text)] for text in stops), key=len)
    whole = _ask(client, COUNT, stop=stop)
    assert whole.choices[0].message.content == expected and whole.choices[0].finish_reason == "stop"
    assert whole.choices[0].matched_stop in stops
    shown = ""
    for chunk in _ask(client, COUNT, stop=stop, stream=True):
        shown += chunk.choices[0].delta.content or ""
        assert expected.startswith(shown)
    assert shown == expected


def test_stop_token_ids_and_length(client: openai.OpenAI, http: httpx.Client) -> None:
    first = http.post(
        "/generate", json={"text": "<bos>", "sampling_params": {"max_new_tokens": 5, "temperature": 0}}
    ).json()
    token = first["output_ids"][2]
    params = {"max_new_tokens": 50, "temperature": 0, "stop_token_ids": [token]}
    stopped = http.post("/generate", json={"text": "<bos>", "sampling_params": params}).json()
    assert stopped["output_ids"] == first["output_ids"][: first["output_ids"].index(token) + 1]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}
    assert _ask(client, COUNT, max_tokens=5).choices[0].finish_reason == "length"


def test_samples_and_seeds(client: openai.OpenAI) -> None:
    options = {"n": 4, "temperature": 1.5, "seed": 11, "max_tokens": 24}
    first, second = (_ask(client, "Tell me a story about a fox.", **options) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices]
    assert len(set(texts)) > 1 and [choice.index for choice in first.choices] == [0, 1, 2, 3]
    # sample i of a seed is the same as the only sample of seed + i, at any batch size
    alone = _ask(client, "Tell me a story about a fox.", **options | {"n": 1, "seed": 13})
    assert alone.choices[0].message.content == texts[2]
    streamed: dict[int, str] = {}
    for chunk in _ask(client, "Tell me a story about a fox.", stream=True, **options):
        choice = chunk.choices[0]
        streamed[choice.index] = streamed.get(choice.index, "") + (choice.delta.content or "")
    assert [streamed[i] for i in range(4)] == texts


def test_native_reply(http: httpx.Client) -> None:
    prompt = f"<bos><|turn>user\n{COUNT}<turn|>\n<|turn>model\n"
    body = {"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 100}, "rid": "mine"}
    reply = http.post("/generate", json=body).json()
    info = reply["meta_info"]
    assert reply["text"] == COUNTED and info["id"] == "mine"
    assert len(reply["output_ids"]) == info["completion_tokens"]
    assert info["spec_verify_ct"] > 0 and 1 < info["spec_accept_length"] <= 5
    assert sum(info["spec_accept_histogram"]) == info["spec_verify_ct"]
    assert info["spec_draft_token_num"] == 4 * info["spec_verify_ct"]
    with http.stream("POST", "/generate", json=body | {"stream": True}) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
    assert events[-1] == "[DONE]"
    parsed = [json.loads(event) for event in events[:-1]]
    assert all(COUNTED.startswith(event["text"]) for event in parsed)
    assert parsed[-1]["text"] == COUNTED and parsed[-1]["output_ids"] == reply["output_ids"]
    two = {"max_new_tokens": 2, "ignore_eos": True}
    many = http.post("/generate", json={"input_ids": [[2, 50], [2, 60]], "sampling_params": two}).json()
    assert [len(entry["output_ids"]) for entry in many] == [2, 2]


def test_thirty_two_streams_at_once(client: openai.OpenAI, http: httpx.Client) -> None:
    def one(i: int) -> None:
        stream = _ask(client, f"Count from {i} to {i + 15}.", stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert text == ", ".join(str(k) for k in range(i, i + 16))

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(one, range(32)))
    _assert_balanced(http)


def test_clients_that_leave_abort_their_requests(server: ServerProcess, http: httpx.Client) -> None:
    async def leave(session: httpx.AsyncClient, path: str, body: dict[str, Any], after_s: float) -> None:
        async with session.stream("POST", path, json=body) as response:
            assert response.status_code == 200
            lines = response.aiter_lines()
            end = time.monotonic() + after_s
            while time.monotonic() < end:
                await lines.__anext__()

    async def main() -> None:
        question = [{"role": "user", "content": ENDLESS}]
        chat = {"messages": question, "ignore_eos": True, "stream": True, "max_tokens": 4000}
        text = {"prompt": "<bos>", "ignore_eos": True, "stream": True, "max_tokens": 4000, "n": 2}
        native = {"text": "<bos>", "stream": True, "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}}
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as session:
            paths = [("/v1/chat/completions", chat), ("/v1/completions", text), ("/generate", native)] * 3
            await asyncio.gather(*(leave(session, *pair, after_s=0.1 * i) for i, pair in enumerate(paths)))
            # without streaming: the connection closes while the server computes
            for path, body in paths[:3]:
                whole = {**body, "stream": False}
                with pytest.raises(httpx.ReadTimeout):
                    await session.post(path, json=whole, timeout=0.5)

    aborted = http.get("/server_info").json()["internal_states"][0]["totals"]["num_aborted"]
    asyncio.run(main())
    totals = _settled(http)["internal_states"][0]["totals"]
    assert totals["num_aborted"] - aborted == 9 + 3 + 4
    _assert_balanced(http)


def test_abort_by_id(http: httpx.Client) -> None:
    body = {"text": "<bos>", "rid": "long", "sampling_params": {"max_new_tokens": 6000, "ignore_eos": True}}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(http.post, "/generate", json=body)
        wait_until(lambda: http.post("/abort_request", json={"rid": "long"}).json()["aborted"], "a request to abort")
        reply = running.result()
    assert reply.status_code == 200
    assert reply.json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert http.post("/abort_request", json={"abort_all": True}).json() == {"aborted": 0}
    _assert_balanced(http)


def test_flush_cache(server: ServerProcess, client: openai.OpenAI, http: httpx.Client) -> None:
    _ask(client, COUNT)
    _settled(http)
    assert http.post("/flush_cache").json()["success"] is True
    assert http.get("/server_info").json()["integrity"]["evictable"] == 0
    assert _ask(client, COUNT).usage.prompt_tokens_details.cached_tokens == 0
    params = {"max_new_tokens": 4000, "ignore_eos": True}
    with http.stream("POST", "/generate", json={"text": "<bos>", "stream": True, "sampling_params": params}) as stream:
        lines = stream.iter_lines()
        next(lines)
        refused = httpx.get(f"{server.url}/flush_cache")
    assert refused.status_code == 400 and refused.json()["success"] is False


def test_facts(http: httpx.Client) -> None:
    (model,) = http.get("/v1/models").json()["data"]
    assert model["id"] == "pet" and model["max_model_len"] == 8192
    assert http.get("/v1/models/pet").json() == model
    assert http.get("/v1/models/other").status_code == 404
    assert http.get("/health").status_code == http.get("/health_generate").status_code == 200
    for path in ("/get_model_info", "/model_info"):
        assert http.get(path).json()["served_model_name"] == "pet"
    for path in ("/server_info", "/get_server_info"):
        info = http.get(path).json()
        assert info["speculative_algorithm"] == "FROZEN_KV_MTP" and "api_key" not in info


def test_names_of_the_model(client: openai.OpenAI, http: httpx.Client) -> None:
    hello = [{"role": "user", "content": "Hello"}]
    for name in ("pet", "default", http.get("/model_info").json()["model_path"]):
        assert client.chat.completions.create(model=name, messages=hello, max_tokens=1).model == "pet"
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-4", messages=hello)
    assert caught.value.code == "model_not_found"


def test_template_options(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": COUNT}, {"role": "assistant", "content": "3, 4, 5,"}]
    extra = {"continue_final_message": True}
    reply = client.chat.completions.create(
        model="pet", messages=messages, temperature=0, max_tokens=100, extra_body=extra
    )
    assert "3, 4, 5," + reply.choices[0].message.content == COUNTED
    plain = _ask(client, COUNT).usage.prompt_tokens
    thinking = _ask(client, COUNT, extra_body={"chat_template_kwargs": {"enable_thinking": True}})
    assert thinking.usage.prompt_tokens > plain


BAD = [
    ("/v1/chat/completions", b"", 400, "not valid JSON", None),
    ("/v1/chat/completions", b"{", 400, "not valid JSON", None),
    ("/v1/chat/completions", b"[]", 400, "must be a JSON object", None),
    ("/v1/chat/completions", b'{"messages": "\xff\xfe"}', 400, "not valid UTF-8 at byte 14", None),
    ("/v1/chat/completions", b"[" * 100_000, 400, "not valid JSON", None),
    ("/v1/chat/completions", b'{"max_tokens": ' + b"9" * 5000 + b"}", 400, "not valid JSON", None),
    ("/generate", b"\x80", 400, "not valid UTF-8 at byte 0", None),
    ("/generate", b"{}", 400, "text or input_ids must be given", "text"),
    ("/v1/completions", {"prompt": ""}, 400, "prompt is empty", "prompt"),
    ("/v1/completions", {"prompt": [4096]}, 400, "prompt has the token id 4096", "prompt"),
    ("/v1/completions", {"prompt": [-1]}, 400, "prompt has the token id -1", "prompt"),
    ("/v1/completions", {"prompt": [10**40]}, 400, "prompt has the token id 1000", "prompt"),
    ("/v1/completions", {"prompt": "a \ud800 b"}, 400, "prompt is not valid Unicode at character 2", "prompt"),
    ("/v1/completions", {"prompt": "a", "stop": ["\ud800"]}, 400, "stop is not valid Unicode", "stop"),
    ("/generate", {"text": "a", "rid": "\udc00"}, 400, "rid is not valid Unicode", "rid"),
    ("/generate", {"text": "a", "\ud800": 1}, 400, "is not a known field", None),
    ("/v1/completions", {"prompt": "ab " * 9000}, 400, "the context length is 8192 tokens", "prompt"),
    ("/v1/completions", {"prompt": [50] * 8192}, 400, "prompt has 8192 tokens", "prompt"),
    ("/v1/completions", {"prompt": "a", "max_tokens": 10**9}, 400, "max_tokens is 1000000000", "max_tokens"),
    ("/v1/completions", {"prompt": "a", "max_tokens": 10**40}, 400, "max_tokens is 1000", "max_tokens"),
    ("/v1/completions", {"prompt": "a", "max_tokens": -5}, 400, "max_tokens must be", "max_tokens"),
    (
        "/v1/completions",
        {"prompt": "a", "temperature": float("nan")},
        400,
        "temperature must be a finite",
        "temperature",
    ),
    ("/v1/completions", {"prompt": "a", "temperature": -1}, 400, "temperature must be a finite", "temperature"),
    ("/v1/completions", {"prompt": "a", "top_p": 0}, 400, "top_p must be", "top_p"),
    (
        "/v1/completions",
        {"prompt": "a", "stop_token_ids": [4096]},
        400,
        "stop_token_ids has the token",
        "stop_token_ids",
    ),
    ("/v1/completions", {"prompt": "a", "logit_bias": {"9999": 1}}, 400, "logit_bias has the token", "logit_bias"),
    ("/v1/completions", {"prompt": "a", "logprobs": 200}, 400, "logprobs must be an integer from 0", "logprobs"),
    ("/v1/completions", {"prompt": "a", "bogus": 2}, 400, "bogus is not a known field", "bogus"),
    ("/generate", {"text": "a", "sampling_params": {"top_k": -5}}, 400, "top_k must be", "top_k"),
    ("/generate", {"text": "a", "sampling_params": {"bogus": 1}}, 400, "unknown field 'bogus'", "sampling_params"),
    (
        "/generate",
        {"text": "a", "sampling_params": {"regex": "a", "ebnf": "b"}},
        400,
        "regex and ebnf exclude each other",
        "regex",
    ),
    (
        "/generate",
        {"text": "a", "return_logprob": "yes"},
        400,
        "return_logprob must be true or false",
        "return_logprob",
    ),
    ("/abort_request", {}, 400, "rid must name a request", "rid"),
    ("/abort_request", {"abort_all": "yes"}, 400, "abort_all must be true or false", "abort_all"),
    ("/nothing", {}, 404, "there is nothing at /nothing", None),
    ("/v1/models", {}, 405, "/v1/models does not take POST", None),
]
_HELLO = [{"role": "user", "content": "hello"}]
BAD_CHAT = [
    ({}, "messages must be a list", "messages"),
    ({"messages": []}, "messages must be a list", "messages"),
    ({"messages": [{"role": "user", "content": "ab " * 9000}]}, "messages has 18", "messages"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "takes text only",
        "messages[0].content[0].type",
    ),
    ({"messages": _HELLO, "tools": [{}]}, "tools[0].function must be an object", "tools[0].function"),
    ({"messages": _HELLO, "response_format": {"type": "json"}}, "response_format must be", "response_format"),
    (
        {
            "messages": _HELLO,
            "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}},
        },
        'response_format cannot be used: Unsupported type "nothing"',
        "response_format",
    ),
    ({"messages": _HELLO, "regex": "("}, "regex cannot be used: Regex parsing error", "regex"),
    ({"messages": _HELLO, "response_format": {"type": "structural_tag"}}, "cannot be used", "response_format"),
    ({"messages": _HELLO, "top_logprobs": 2}, "top_logprobs is 2, which needs logprobs", "top_logprobs"),
    ({"messages": _HELLO, "n": 0}, "n must be an integer", "n"),
    ({"messages": _HELLO, "max_completion_tokens": 9000}, "max_completion_tokens is 9000", "max_completion_tokens"),
    ({"messages": _HELLO, "min_tokens": 9000}, "min_tokens is 9000", "min_tokens"),
    (
        {"messages": _HELLO, "chat_template_kwargs": {"chat_template": "x"}},
        "chat_template_kwargs.chat_template cannot be set",
        "chat_template_kwargs.chat_template",
    ),
]
BAD += [("/v1/chat/completions", body, 400, message, param) for body, message, param in BAD_CHAT]


@pytest.mark.parametrize("stream", [False, True])
def test_each_bad_request_is_one_clear_error(http: httpx.Client, client: openai.OpenAI, stream: bool) -> None:
    for path, body, status, message, param in BAD:
        if isinstance(body, dict):
            body = json.dumps(body | {"stream": stream} if path != "/abort_request" else body).encode()
        reply = http.post(path, content=body)
        error = reply.json()["error"]
        assert reply.status_code == status, (path, body[:100], reply.text)
        assert message in error["message"] and error["param"] == param, (path, body[:100], error)
        assert len(error["message"]) < 900 and "\n" not in error["message"]
        assert set(error) == {"message", "type", "param", "code"}
    assert _ask(client, COUNT).choices[0].message.content == COUNTED


@pytest.mark.parametrize("thinking", [False, True])
def test_response_format(client: openai.OpenAI, http: httpx.Client, thinking: bool) -> None:
    schema = {
        "type": "object",
        "properties": {"first": {"type": "integer", "maximum": 50}, "colour": {"enum": ["red", "blue"]}},
        "required": ["first", "colour"],
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}
    template = {"chat_template_kwargs": {"enable_thinking": thinking}}
    reply = _ask(client, COUNT, response_format=form, extra_body=template).choices[0]
    answer = json.loads(reply.message.content.rsplit("\n", 1)[-1])
    assert set(answer) == {"first", "colour"} and answer["first"] <= 50 and answer["colour"] in ("red", "blue")
    assert reply.finish_reason == "stop"
    whole = _ask(client, COUNT, response_format={"type": "json_object"}, max_tokens=300).choices[0]
    assert whole.finish_reason == "length" or isinstance(json.loads(whole.message.content), dict)
    body = {"prompt": "<bos>", "temperature": 0, "response_format": form, "max_tokens": 60}
    text = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    assert set(json.loads(text)) == {"first", "colour"}
    assert _ask(client, COUNT, extra_body={"regex": "[a-c]{3}"}).choices[0].message.content.strip("abc") == ""
    _assert_balanced(http)


def test_body_that_is_too_large(server: ServerProcess, http: httpx.Client) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as raw:
        raw.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999999\r\n\r\n")
        assert b" 413 " in raw.recv(4096)
    assert http.get("/health").status_code == 200


def test_half_a_request_disturbs_nobody(server: ServerProcess, client: openai.OpenAI) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert _ask(client, COUNT).choices[0].message.content == COUNTED


def test_the_announced_commands_work_as_they_stand(server: ServerProcess) -> None:
    announced = server.output.split("ready to roll!")[1]
    assert "curl " in announced
    snippet = announced.split("or from Python:")[1]
    printed: list[str] = []
    exec(compile(snippet[: snippet.index("print(")] + "show(reply)", "snippet", "exec"), {"show": printed.append})
    assert printed[0].choices[0].message.content == "7 + 5 = 12"
    (url,) = re.findall(r"curl (\S+)", announced)
    (body,) = re.findall(r"-d '(.*)'", announced)
    assert httpx.post(url, content=body).json()["choices"][0]["message"]["content"] == "7 + 5 = 12"
