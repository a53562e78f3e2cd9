"""Requests for messages as chats, and messages as they grow: events add up to the whole, whatever the pieces are."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import jiter
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fixtures.answers import ADD, FORMAT, PARIS, STOP, THOUGHT, cut, output
from fixtures.json_values import json_bodies
from sglang.srt.entrypoints.anthropic_output import MessageReply
from sglang.srt.entrypoints.anthropic_request import parse_message_request
from sglang.srt.entrypoints.chat_output import AnswerReader
from sglang.srt.entrypoints.errors import ApiError
from sglang.srt.entrypoints.openai_protocol import parse_chat_request
from sglang.srt.managers.io_struct import FinishReason

TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {}}}
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": "r"}
ASKED = {"role": "user", "content": "q"}
CALLED = {"role": "assistant", "content": [USE]}
GIVEN = {"messages": [ASKED], "max_tokens": 9}


def chat(**body: Any) -> dict[str, Any]:
    """The chat request, which passes the checks of one."""
    made = parse_message_request({**GIVEN, **body}).body
    parse_chat_request(made, {})
    return made


def error(**body: Any) -> ApiError:
    """What a bad request is told, by whoever notices."""
    try:
        request = parse_message_request({**GIVEN, **body})
    except ApiError as found:
        return found
    with pytest.raises(ApiError) as raised:
        parse_chat_request(request.body, {})
    return request.restate(raised.value)


def test_blocks_become_messages() -> None:
    messages = [
        ASKED,
        {"role": "user", "content": [{"type": "text", "text": "p", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "m"},
                USE,
                USE | {"id": "d"},
            ],
        },
        {
            "role": "user",
            "content": [
                RESULT | {"tool_use_id": "d", "content": [{"type": "text", "text": "r"}], "is_error": False},
                RESULT | {"content": "no city", "is_error": True},
                {"type": "text", "text": "and?"},
            ],
        },
        {"role": "assistant", "content": "So"},
    ]
    made = chat(messages=messages, system=[{"type": "text", "text": "s"}])
    function = {"name": "f", "arguments": {"a": 1}}
    assert made["messages"] == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q\np"},
        {
            "role": "assistant",
            "reasoning_content": "t",
            "content": "m",
            "tool_calls": [
                {"id": "c", "type": "function", "function": function},
                {"id": "d", "type": "function", "function": function},
            ],
        },
        {"role": "tool", "tool_call_id": "d", "content": "r"},
        {"role": "tool", "tool_call_id": "c", "content": "Error:\nno city"},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": "So"},
    ]
    assert made["continue_final_message"] is True and "continue_final_message" not in chat()


def test_fields_become_those_of_a_chat() -> None:
    made = chat(
        tools=[TOOL | {"type": "custom", "cache_control": {"type": "ephemeral"}}],
        tool_choice={"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 1024},
        stop_sequences=["x"],
        top_k=3,
    )
    function = {"name": "f", "description": "d", "parameters": TOOL["input_schema"]}
    assert made["tools"] == [{"type": "function", "function": function}]
    assert made["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert made["parallel_tool_calls"] is False and made["stop"] == ["x"] and made["top_k"] == 3
    assert (made["enable_thinking"], made["max_thinking_tokens"]) == (True, 1024)
    choices = {"auto": "auto", "any": "required", "none": "none"}
    for kind, expected in choices.items():
        assert chat(tools=[TOOL], tool_choice={"type": kind})["tool_choice"] == expected
    assert chat(thinking={"type": "disabled"})["enable_thinking"] is False
    assert "enable_thinking" not in chat()
    form = {"type": "json_schema", "schema": {"type": "object"}}
    made = chat(output_config={"effort": "low", "format": form})
    assert made["response_format"] == {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
    assert made["chat_template_kwargs"] == {"reasoning_effort": "low"} and "enable_thinking" not in made


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": "q"}, "messages"),
    ({"messages": [3]}, "messages[0]"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [3]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [USE]}]}, "messages[0].content[0].type"),
    ({"messages": [ASKED, {"role": "assistant", "content": [RESULT]}]}, "messages[1].content[0].type"),
    ({"messages": [ASKED, {"role": "assistant", "content": [USE | {"input": "x"}]}]}, "messages[1].content[0].input"),
    ({"messages": [ASKED, {"role": "assistant", "content": [USE | {"name": "a b"}]}]}, "messages[1].content[0].name"),
    ({"messages": [ASKED, {"role": "assistant", "content": [USE | {"id": 3}]}]}, "messages[1].content[0].id"),
    ({"messages": [{"role": "user", "content": [RESULT]}]}, "messages[0].content[0].tool_use_id"),
    (
        {"messages": [ASKED, CALLED, {"role": "user", "content": [{"type": "text", "text": "x"}, RESULT]}]},
        "messages[2].content[1].tool_use_id",
    ),
    (
        {"messages": [ASKED, CALLED, {"role": "user", "content": [RESULT | {"content": 3}]}]},
        "messages[2].content[0].content",
    ),
    (
        {"messages": [ASKED, CALLED, {"role": "user", "content": [RESULT | {"is_error": 3}]}]},
        "messages[2].content[0].is_error",
    ),
    ({"system": 3}, "system"),
    ({"tools": 3}, "tools"),
    ({"tools": [3]}, "tools[0]"),
    ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type"),
    ({"tools": [TOOL | {"name": "a b"}]}, "tools[0].name"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name"),
    ({"tools": [TOOL | {"description": 3}]}, "tools[0].description"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": 3}}, "tool_choice.disable_parallel_tool_use"),
    ({"thinking": {"type": "on"}}, "thinking"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": True}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display"),
    ({"thinking": {"type": "disabled"}, "enable_thinking": True}, "enable_thinking"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"output_config": 3}, "output_config"),
    ({"output_config": {"effort": "none"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "text"}}}, "output_config.format"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
    ({"output_config": {"size": 3}}, "output_config.size"),
    ({"stream": 3}, "stream"),
]


@pytest.mark.parametrize("body, param", BAD, ids=[str(i) for i in range(len(BAD))])
def test_errors_name_the_field_that_was_sent(body: dict[str, Any], param: str) -> None:
    found = error(**body)
    assert (found.status, found.param) == (400, param) and found.message.startswith(param + " "), found.message


def test_fields_that_are_not_known_or_ask_too_much() -> None:
    for field in ("input", "context_management", "mcp_servers", "container"):
        with pytest.raises(ValueError, match=f"^{field} is not"):
            parse_message_request({**GIVEN, field: ["x"]})


def test_errors_have_the_shape_of_their_routes() -> None:
    busy = ApiError(503, "later")
    assert busy.reply("/v1/messages/count_tokens") == (
        529,
        {"type": "error", "error": {"type": "overloaded_error", "message": "later"}},
    )
    assert busy.reply("/v1/messagesx") == busy.reply("/generate") == (503, busy.to_dict())
    kinds = {400: "invalid_request_error", 401: "authentication_error", 413: "request_too_large", 500: "api_error"}
    for status, kind in kinds.items():
        got, body = ApiError(status, "x").reply("/v1/messages")
        assert (got, body["error"]["type"]) == (status, kind)


BODIES = json_bodies(
    "messages system tools tool_choice thinking output_config stop_sequences stream max_tokens top_k",
    "type role content text name user assistant tool_use tool_result id tool_use_id input "
    "input_schema thinking enabled tool format json_schema schema",
)


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(fields=BODIES)
def test_whatever_is_sent_is_served_or_refused(fields: dict[str, Any]) -> None:
    with contextlib.suppress(ApiError, ValueError):
        request = parse_message_request({**GIVEN, **fields})
        parse_chat_request(request.body, {})
        assert request.body["messages"]


def run(pieces: Sequence[str], finish: FinishReason = STOP) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """All events of a stream, and the message."""
    reply, reader = MessageReply("pet"), AnswerReader(FORMAT)
    outs = [output(piece) for piece in pieces[:-1]] + [output(pieces[-1], finish)]
    events = reply.begin(outs[0])
    for out in outs:
        events += reply.add(reader.read(out), out)
    return events + reply.end(outs[-1], reader), reply.whole()


def folded(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a client makes of the events."""
    message: dict[str, Any] = {}
    is_open, partial = False, ""
    for event in events:
        kind = event["type"]
        if kind == "message_start":
            message = {**event["message"], "content": []}
        elif kind == "content_block_start":
            assert not is_open and event["index"] == len(message["content"])
            is_open, partial = True, ""
            message["content"].append(dict(event["content_block"]))
        elif kind == "content_block_delta":
            assert is_open and event["index"] == len(message["content"]) - 1
            delta, block = event["delta"], message["content"][-1]
            if delta["type"] == "input_json_delta":
                partial += delta["partial_json"]
                block["input"] = jiter.from_json(partial.encode(), partial_mode=True)
            else:
                field = delta["type"].removesuffix("_delta")
                block[field] += delta[field]
        elif kind == "content_block_stop":
            assert is_open
            is_open = False
        elif kind == "message_delta":
            assert not is_open
            message |= {**event["delta"], "usage": event["usage"]}
    return message


def nameless(message: dict[str, Any]) -> dict[str, Any]:
    blocks = [{key: value for key, value in block.items() if key != "id"} for block in message["content"]]
    return {**message, "id": "", "content": blocks}


TEXTS = st.lists(st.sampled_from([THOUGHT, PARIS, ADD, "text ", "<channel|>", "\n", PARIS[:-20]]), max_size=8)
ENDS = st.sampled_from([STOP, FinishReason("stop", matched="x"), FinishReason("length", length=9)])


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(parts=TEXTS, places=st.lists(st.integers(0, 300), max_size=10), finish=ENDS)
def test_events_add_up_to_the_message(parts: list[str], places: list[int], finish: FinishReason) -> None:
    said = "".join(parts)
    events, message = run(cut(said, places), finish)
    assert folded(events) == message
    assert nameless(message) == nameless(run([said], finish)[1])
    kinds = [event["type"] for event in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]


@pytest.mark.parametrize(
    "said, finish, expected",
    [
        ("a", STOP, ("end_turn", None)),
        ("a", FinishReason("stop", matched="x"), ("stop_sequence", "x")),
        ("a", FinishReason("length", length=9), ("max_tokens", None)),
        (PARIS, STOP, ("tool_use", None)),
        (PARIS, FinishReason("length", length=9), ("max_tokens", None)),
        (PARIS[:-20], FinishReason("stop", matched="x"), ("stop_sequence", "x")),
    ],
)
def test_why_it_ended(said: str, finish: FinishReason, expected: tuple[str, str | None]) -> None:
    _, message = run([said], finish)
    assert (message["stop_reason"], message["stop_sequence"]) == expected


def test_tokens_from_the_cache_are_counted_apart() -> None:
    usage = run(["a"])[1]["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (5, 2, 1)


def test_failures_are_events() -> None:
    (failed,) = MessageReply("pet").fail(ApiError(503, "later"))
    assert failed == {"type": "error", "error": {"type": "overloaded_error", "message": "later"}}
