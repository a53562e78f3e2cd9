"""Anthropic's Messages API with Anthropic's client, from the shipped pair with speculation on, behind a key."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from fixtures.server_process import ServerProcess, ready_server
from fixtures.tasks import (
    ADD_TOOL,
    ASK_SUM,
    ASK_WEATHER,
    PERSON,
    PERSON_SCHEMA,
    SUM,
    SUM_THOUGHT,
    WEATHER_TOOL,
    Tool,
)
from fixtures.waiting import wait_until

KEY = "secret"
BEARER = {"Authorization": f"Bearer {KEY}"}


def _tool(tool: Tool) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, "input_schema": tool.parameters}


WEATHER, ADD = _tool(WEATHER_TOOL), _tool(ADD_TOOL)
THINKING = {"type": "enabled", "budget_tokens": 1024}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    args = ("--speculative-algorithm", "FROZEN_KV_MTP", "--served-model-name", "pet", "--api-key", KEY)
    with ready_server(tmp_path_factory.mktemp("anthropic"), *args) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0, timeout=30)


def _messages(messages: Any) -> Any:
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages


def _ask(client: anthropic.Anthropic, messages: Any, **options: Any) -> Any:
    extra = {"temperature": 0} | options.pop("extra_body", {})
    options = {"max_tokens": 100} | options
    return client.messages.create(model="pet", messages=_messages(messages), extra_body=extra, **options)


def _blocks(message: Any) -> list[tuple[Any, ...]]:
    """What a message says, without ids."""
    shown: dict[str, Any] = {
        "text": lambda block: (block.text,),
        "thinking": lambda block: (block.thinking, block.signature),
        "tool_use": lambda block: (block.name, block.input),
    }
    return [(block.type, *shown[block.type](block)) for block in message.content]


def _facts(message: Any) -> tuple[Any, ...]:
    """All that two runs of one request have in common; what comes from the cache may differ."""
    usage = message.usage
    prompt = usage.input_tokens + usage.cache_read_input_tokens
    counts = (prompt, usage.output_tokens, usage.output_tokens_details.thinking_tokens)
    return (_blocks(message), message.stop_reason, message.stop_sequence, counts)


def _streamed(client: anthropic.Anthropic, messages: Any, **options: Any) -> Any:
    """What the client's own helper makes of a stream."""
    extra = {"temperature": 0}
    options = {"max_tokens": 100} | options
    with client.messages.stream(model="pet", messages=_messages(messages), extra_body=extra, **options) as stream:
        for _ in stream:
            pass
        return stream.get_final_message()


CASES: list[tuple[dict[str, Any], list[tuple[str, Any]], str]] = [
    ({"messages": SUM}, [("text", "17 + 25 = 42")], "end_turn"),
    ({"messages": SUM, "thinking": {"type": "disabled"}}, [("text", "17 + 25 = 42")], "end_turn"),
    ({"messages": SUM, "thinking": THINKING}, [("thinking", SUM_THOUGHT), ("text", "17 + 25 = 42")], "end_turn"),
    (
        {"messages": SUM, "thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}},
        [("thinking", SUM_THOUGHT), ("text", "17 + 25 = 42")],
        "end_turn",
    ),
    ({"messages": ASK_WEATHER, "tools": [WEATHER, ADD]}, [("tool_use", "get_weather")], "tool_use"),
    (
        {"messages": ASK_WEATHER, "tools": [WEATHER, ADD], "thinking": THINKING},
        [("thinking", "I should call get_weather."), ("tool_use", "get_weather")],
        "tool_use",
    ),
    (
        {
            "messages": ASK_SUM,
            "tools": [WEATHER, ADD],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        },
        [("tool_use", "add")],
        "tool_use",
    ),
    (
        {
            "messages": ASK_WEATHER,
            "tools": [WEATHER, ADD],
            "tool_choice": {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True},
        },
        [("tool_use", "get_weather")],
        "tool_use",
    ),
]
INPUTS = {"get_weather": {"city": "Paris"}, "add": {"a": 1234, "b": 45}}


@pytest.mark.parametrize("options, expected, end", CASES, ids=map(str, range(len(CASES))))
def test_answers_whole_and_streamed(client: anthropic.Anthropic, options: Any, expected: Any, end: str) -> None:
    whole = _ask(client, **options)
    assert [block[:2] for block in _blocks(whole)] == expected and whole.stop_reason == end
    assert all(block.input == INPUTS[block.name] for block in whole.content if block.type == "tool_use")
    assert _facts(_streamed(client, **options)) == _facts(whole)


def test_the_events_of_a_stream(client: anthropic.Anthropic, server: ServerProcess) -> None:
    options = {"tools": [WEATHER], "thinking": THINKING, "max_tokens": 100, "temperature": 0, "stream": True}
    body = {"model": "pet", "messages": _messages(ASK_WEATHER), **options}
    reply = httpx.post(f"{server.url}/v1/messages", json=body, headers={"x-api-key": KEY}, timeout=30)
    assert reply.headers["content-type"].startswith("text/event-stream")
    frames = [frame.split("\n") for frame in reply.text.removesuffix("\n\n").split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in frames]
    assert [name for name, _ in frames] == [f"event: {event['type']}" for event in events]
    kinds = [event["type"] for event in events if event["type"] != "content_block_delta"]
    block = ["content_block_start", "content_block_stop"]
    assert kinds == ["message_start", "ping", *block, *block, "message_delta", "message_stop"]
    start = events[0]["message"]
    assert start["content"] == [] and start["stop_reason"] is None and start["usage"]["output_tokens"] == 0
    deltas = [(event["index"], event["delta"]["type"]) for event in events if event["type"] == "content_block_delta"]
    assert deltas == sorted(deltas, key=lambda delta: delta[0])
    assert deltas[-1] == (1, "input_json_delta")
    assert [kind for index, kind in deltas if index == 0][-1] == "signature_delta"


def test_the_loop_of_an_agent(client: anthropic.Anthropic) -> None:
    """A message goes back as the client gives it, with the result of its call."""
    options = {"tools": [WEATHER], "thinking": THINKING}
    first = _ask(client, ASK_WEATHER, **options)
    result = {
        "type": "tool_result",
        "tool_use_id": first.content[-1].id,
        "content": [{"type": "text", "text": json.dumps({"sky": "sunny", "temperature": 21})}],
    }
    history = [*_messages(ASK_WEATHER), first.to_param(), {"role": "user", "content": [result]}]
    options |= {"thinking": {"type": "disabled"}}
    whole = _ask(client, history, **options)
    assert _blocks(whole) == [("text", "The weather in Paris is sunny with 21 degrees.")]
    assert _facts(_streamed(client, history, **options)) == _facts(whole)


@pytest.mark.parametrize("thinking", [{"type": "disabled"}, THINKING])
def test_schemas(client: anthropic.Anthropic, thinking: Any) -> None:
    config = {"format": {"type": "json_schema", "schema": PERSON_SCHEMA}}
    options = {"output_config": config, "thinking": thinking, "max_tokens": 300}
    whole = _ask(client, PERSON, **options)
    assert json.loads(whole.content[-1].text) == {"name": "Anna", "age": 24}
    assert _facts(_streamed(client, PERSON, **options)) == _facts(whole)


def test_a_budget_ends_a_thought(client: anthropic.Anthropic) -> None:
    whole = _ask(client, SUM, thinking={"type": "enabled", "budget_tokens": 5})
    thought, *_ = _blocks(whole)
    assert thought[0] == "thinking" and SUM_THOUGHT.startswith(thought[1]) and thought[1] != SUM_THOUGHT
    assert whole.usage.output_tokens_details.thinking_tokens == 5


def test_stop_sequences(client: anthropic.Anthropic) -> None:
    options = {"stop_sequences": ["nothing", " = "]}
    whole = _ask(client, SUM, **options)
    assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence", " = ")
    assert _blocks(whole) == [("text", "17 + 25")]
    assert _facts(_streamed(client, SUM, **options)) == _facts(whole)


def test_cut_answers(client: anthropic.Anthropic) -> None:
    options = {"tools": [WEATHER], "thinking": THINKING}
    (_, thought, _), (*_, call_input) = _blocks(_ask(client, ASK_WEATHER, **options))
    seen = set()
    for length in (1, 3, 6, 9, 12, 14, 15, 16):
        whole = _ask(client, ASK_WEATHER, max_tokens=length, **options)
        assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", length)
        assert _facts(_streamed(client, ASK_WEATHER, max_tokens=length, **options)) == _facts(whole)
        for block in whole.content:
            seen.add(block.type)
            if block.type == "thinking":
                assert thought.startswith(block.thinking.rstrip("\n"))
            else:
                assert block.input in ({}, call_input)
    assert seen == {"thinking", "tool_use"}


def test_an_answer_that_the_request_begins_goes_on(client: anthropic.Anthropic) -> None:
    begun = [*_messages(SUM), {"role": "assistant", "content": "17 + 25 ="}]
    assert _blocks(_ask(client, begun)) == [("text", " 42")]
    assert _facts(_streamed(client, begun)) == _facts(_ask(client, begun))


def test_forms_of_one_prompt_are_the_same_prompt(client: anthropic.Anthropic) -> None:
    def count(messages: Any, **options: Any) -> int:
        return int(client.messages.count_tokens(model="pet", messages=_messages(messages), **options).input_tokens)

    plain = count(SUM)
    assert count([{"role": "user", "content": [{"type": "text", "text": SUM}]}]) == plain
    lines = [{"type": "text", "text": "What is"}, {"type": "text", "text": "17 + 25?"}]
    apart = [{"role": "user", "content": line["text"]} for line in lines]
    assert count([{"role": "user", "content": lines}]) == count(apart) == count("What is\n17 + 25?")
    told = count(SUM, system="Be brief.")
    assert count(SUM, system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]) == told
    assert told > plain and count(SUM, tools=[WEATHER]) > plain
    whole = _ask(client, SUM, system="Be brief.")
    assert whole.usage.input_tokens + whole.usage.cache_read_input_tokens == told


@pytest.mark.parametrize("stream", [False, True])
def test_errors(client: anthropic.Anthropic, stream: bool) -> None:
    with pytest.raises(anthropic.BadRequestError, match="^Error code: 400.*max_tokens is 1000000") as bad:
        _ask(client, SUM, max_tokens=10**6, stream=stream)
    assert bad.value.body["type"] == "error" and bad.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.BadRequestError, match="stop_sequences must be a list of strings"):
        _ask(client, SUM, stop_sequences="a", stream=stream)
    with pytest.raises(anthropic.NotFoundError, match="the model 'other' does not exist"):
        client.messages.create(model="other", max_tokens=1, messages=_messages(SUM), stream=stream)
    for wrong in (client.with_options(api_key="no"), anthropic.Anthropic(base_url=client.base_url, auth_token="no")):
        with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
            _ask(wrong, SUM, stream=stream)


def test_both_ways_to_send_the_key(client: anthropic.Anthropic) -> None:
    bearer = anthropic.Anthropic(base_url=client.base_url, auth_token=KEY, max_retries=0, timeout=30)
    assert _blocks(_ask(bearer, SUM)) == _blocks(_ask(client, SUM))


def test_an_aborted_request_ends_with_an_error(client: anthropic.Anthropic, server: ServerProcess) -> None:
    extra = {"ignore_eos": True, "rid": "long"}
    with pytest.raises(anthropic.APIStatusError, match="abort"):
        for i, _ in enumerate(_ask(client, "Count.", max_tokens=7000, stream=True, extra_body=extra)):
            if i == 0:
                url = f"{server.url}/abort_request"
                reply = httpx.post(url, json={"rid": "long"}, headers=BEARER, timeout=10)
                assert reply.json() == {"aborted": 1}


def test_a_client_that_leaves_aborts_its_request(client: anthropic.Anthropic, server: ServerProcess) -> None:
    def num_pending() -> int:
        return int(httpx.get(f"{server.url}/server_info", headers=BEARER, timeout=10).json()["num_pending_requests"])

    extra = {"ignore_eos": True}
    with _ask(client, "Count.", max_tokens=8000, stream=True, extra_body=extra) as stream:
        assert next(iter(stream)).type == "message_start"
        assert num_pending() == 1
    wait_until(lambda: num_pending() == 0, "the stream to be aborted")
    body = {"model": "pet", "messages": _messages("Count."), "max_tokens": 8000, **extra}
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        payload = json.dumps(body).encode()
        head = f"POST /v1/messages HTTP/1.1\r\nHost: x\r\nx-api-key: {KEY}\r\nContent-Length: {len(payload)}\r\n\r\n"
        connection.sendall(head.encode() + payload)
        wait_until(lambda: num_pending() == 1, "the request to run")
    wait_until(lambda: num_pending() == 0, "the request to be aborted")
