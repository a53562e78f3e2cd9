"""Requests for responses as chats, and responses as they grow: events add up to the whole, whatever the pieces are."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fixtures.answers import ADD, FORMAT, PARIS, STOP, THOUGHT, cut, output
from fixtures.json_values import json_bodies
from sglang.srt.entrypoints.chat_output import AnswerReader
from sglang.srt.entrypoints.errors import ApiError
from sglang.srt.entrypoints.openai_protocol import parse_chat_request
from sglang.srt.entrypoints.openai_responses_logprobs import MessageLogprobs
from sglang.srt.entrypoints.openai_responses_output import ResponseReply
from sglang.srt.entrypoints.openai_responses_request import parse_response_request
from sglang.srt.managers.detokenizer_manager import TokenPieces
from sglang.srt.managers.generate_output import Logprobs
from sglang.srt.managers.io_struct import FinishReason
from sglang.srt.sampling.logprobs import TokenLogprobs
from sglang.srt.utils.embedded import EMBEDDED_MODELS
from sglang.srt.utils.hf_transformers.tokenizer import load_tokenizer

TOOL = {"type": "function", "name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'}
TOKENIZER = load_tokenizer(Path(EMBEDDED_MODELS["tiny-gemma4"].target), trust_remote_code=False)
PIECES = TokenPieces(TOKENIZER)
LOGPROBS = MessageLogprobs(PIECES, FORMAT)
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "r"}


def chat(**body: Any) -> dict[str, Any]:
    """The chat request, which passes the checks of one."""
    made = parse_response_request({"input": "a", **body}).body
    parse_chat_request(made, {})
    return made


def error(**body: Any) -> ApiError:
    """What a bad request is told, by whoever notices."""
    try:
        request = parse_response_request({"input": "a", **body})
    except ApiError as found:
        return found
    with pytest.raises(ApiError) as raised:
        parse_chat_request(request.body, {})
    return request.restate(raised.value)


def test_items_become_messages() -> None:
    items = [
        {"role": "user", "content": "q"},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "m", "annotations": []}]},
        CALL,
        CALL | {"call_id": "d"},
        OUTPUT | {"call_id": "d"},
        OUTPUT | {"output": [{"type": "input_text", "text": "r"}, {"type": "input_text", "text": "s"}]},
        {"role": "assistant", "content": "done"},
        {"role": "user", "content": [{"type": "input_text", "text": "x"}, {"type": "input_text", "text": "y"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "u"}], "encrypted_content": "gAAA"},
    ]
    function = {"name": "f", "arguments": '{"a": 1}'}
    assert chat(input=items, instructions="i")["messages"] == [
        {"role": "system", "content": "i"},
        {"role": "user", "content": "q"},
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
        {"role": "tool", "tool_call_id": "c", "content": "r\ns"},
        {"role": "assistant", "content": "done"},
        {"role": "user", "content": "x\ny"},
        {"role": "assistant", "reasoning_content": "u"},
    ]


def test_instructions_and_a_developer_are_one_system() -> None:
    items = [{"role": "developer", "content": "d"}, {"role": "user", "content": "q"}]
    assert chat(input=items, instructions="i")["messages"][0] == {"role": "system", "content": "i\nd"}


def test_fields_become_those_of_a_chat() -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    made = chat(
        tools=[TOOL],
        tool_choice={"type": "function", "name": "f"},
        reasoning={"effort": "low", "summary": "auto"},
        max_output_tokens=7,
        parallel_tool_calls=False,
        top_k=3,
    )
    assert made["tools"] == [{"type": "function", "function": {key: TOOL[key] for key in TOOL if key != "type"}}]
    assert made["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert (made["reasoning_effort"], made["max_tokens"], made["parallel_tool_calls"], made["top_k"]) == (
        "low",
        7,
        False,
        3,
    )
    schema = {"name": "n", "schema": {"type": "object"}, "strict": True}
    assert chat(text={"format": form})["response_format"] == {"type": "json_schema", "json_schema": schema}
    assert chat(text={"format": {"type": "json_object"}})["response_format"] == {"type": "json_object"}
    # what clients send without meaning anything by it
    chat(store=True, background=False, previous_response_id=None, truncation="disabled", metadata={}, include=None)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"input": [3]}, "input[0]"),
    ({"input": [{"content": "x"}]}, "input[0].type"),
    ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": 3}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": []}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": "x"}, CALL | {"name": "a b"}]}, "input[1].name"),
    ({"input": [{"role": "user", "content": "x"}, CALL | {"arguments": "[1"}]}, "input[1].arguments"),
    ({"input": [CALL, CALL | {"call_id": "d", "arguments": "3"}]}, "input[1].arguments"),
    ({"input": [CALL | {"call_id": ""}]}, "input[0].call_id"),
    ({"input": [OUTPUT]}, "input[0].call_id"),
    ({"input": [CALL, {"role": "user", "content": "x"}, OUTPUT]}, "input[2].call_id"),
    ({"instructions": 3}, "instructions"),
    ({"tools": {}}, "tools"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [TOOL, TOOL | {"name": "a b"}]}, "tools[1].name"),
    ({"tools": [TOOL | {"parameters": []}]}, "tools[0].parameters"),
    ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema", "schema": {}, "name": 3}}}, "text.format.name"),
    ({"text": {"format": {"type": "xml"}}}, "text.format"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"text": {"mode": 1}}, "text.mode"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
    ({"include": ["file_search_call.results"]}, "include[0]"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"truncation": "auto"}, "truncation"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"background": True}, "background"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"stream_options": {"include_obfuscation": 3}, "stream": True}, "stream_options.include_obfuscation"),
    ({"stream": 3}, "stream"),
]


@pytest.mark.parametrize("body, param", BAD, ids=[str(i) for i in range(len(BAD))])
def test_errors_name_the_field_that_was_sent(body: dict[str, Any], param: str) -> None:
    found = error(**body)
    assert (found.status, found.param) == (400, param) and found.message.startswith(param + " "), found.message


def test_errors_of_unknown_fields_and_of_lengths() -> None:
    with pytest.raises(ValueError, match="^messages is not a known field"):
        parse_response_request({"input": "a", "messages": []})
    request = parse_response_request({"input": "a", "max_output_tokens": 3, "min_tokens": 5})
    found = request.restate(ApiError(400, "min_tokens must not exceed max_tokens, got 5 and 3", param="min_tokens"))
    assert found.message == "min_tokens must not exceed max_output_tokens, got 5 and 3"


BODIES = json_bodies(
    "input instructions tools tool_choice text reasoning include top_logprobs truncation stream stop store metadata",
    "type role content text name user assistant function function_call call_id arguments output "
    "function_call_output reasoning message input_text format json_schema schema",
)


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(fields=BODIES)
def test_whatever_is_sent_is_served_or_refused(fields: dict[str, Any]) -> None:
    with contextlib.suppress(ApiError, ValueError):
        request = parse_response_request({"input": "a", **fields})
        parse_chat_request(request.body, {})
        assert request.body["messages"]


def run(pieces: Sequence[str], finish: FinishReason = STOP) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """All events of a stream, and the response."""
    reply, reader = ResponseReply({"model": "pet"}, LOGPROBS), AnswerReader(FORMAT)
    outs = [output(piece) for piece in pieces[:-1]] + [output(pieces[-1], finish)]
    events = reply.begin(outs[0])
    for out in outs:
        events += reply.add(reader.read(out), out)
    return events + reply.end(outs[-1], reader), reply.whole()


def nameless(response: dict[str, Any]) -> dict[str, Any]:
    ids = ("id", "call_id")
    output_items = [{key: value for key, value in item.items() if key not in ids} for item in response["output"]]
    return {**response, "id": "", "output": output_items}


def folded(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that deltas alone add up to."""
    items: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "response.output_item.added":
            assert event["output_index"] == len(items)
            items.append({**event["item"], "content": []} if "content" in event["item"] else dict(event["item"]))
        elif event["type"] == "response.content_part.added":
            items[-1]["content"].append(dict(event["part"]))
        elif event["type"] == "response.function_call_arguments.delta":
            items[-1]["arguments"] += event["delta"]
        elif event["type"] in ("response.output_text.delta", "response.reasoning_text.delta"):
            items[-1]["content"][event["content_index"]]["text"] += event["delta"]
        elif event["type"] == "response.output_item.done":
            items[-1]["status"] = event["item"]["status"]
            assert items[-1] == event["item"]
        assert event.get("item_id", items[-1]["id"] if items else None) == (items[-1]["id"] if items else None)
    return items


TEXTS = st.lists(st.sampled_from([THOUGHT, PARIS, ADD, "text ", "<channel|>", "\n", PARIS[:-20]]), max_size=8)
ENDS = st.sampled_from([STOP, FinishReason("length", length=9)])


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(parts=TEXTS, places=st.lists(st.integers(0, 300), max_size=10), finish=ENDS)
def test_events_add_up_to_the_response(parts: list[str], places: list[int], finish: FinishReason) -> None:
    said = "".join(parts)
    events, response = run(cut(said, places), finish)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert folded(events) == response["output"] == events[-1]["response"]["output"]
    assert nameless(response) == nameless(run([said], finish)[1])
    assert events[0]["response"]["output"] == [] and events[0]["response"]["status"] == "in_progress"
    statuses = [item["status"] for item in response["output"]]
    assert set(statuses[:-1]) <= {"completed"}, "only the last item can be cut"
    assert events[-1]["type"] == f"response.{response['status']}"
    assert (response["status"] == "incomplete") is (finish.type == "length")


def run_with_logprobs(said: str, places: Sequence[int]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The same with a log-probability for each token, cut between tokens."""
    chosen = replace(FORMAT, thought_tokens=PIECES.thought_tokens)
    reply, reader = ResponseReply({}, MessageLogprobs(PIECES, chosen)), AnswerReader(chosen)
    ids = TOKENIZER.encode(said, add_special_tokens=False)
    entries = [TokenLogprobs(token_id, -float(i), ((-float(i), token_id),)) for i, token_id in enumerate(ids)]
    bounds = [0, *sorted(min(place, len(ids)) for place in places), len(ids)]
    events: list[dict[str, Any]] = []
    for low, high in pairwise(bounds):
        piece = b"".join(map(PIECES.piece, ids[low:high])).decode()
        logprobs = Logprobs((), tuple(entries[low:high]), True, False, None)
        out = replace(output(piece), logprobs=logprobs)
        events += reply.add(reader.read(out), out)
    last = output("", STOP)
    return events + reply.add(reader.read(last), last) + reply.end(last, reader), reply.whole()


@settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(places=st.lists(st.integers(0, 80), max_size=10))
def test_log_probabilities_are_those_of_the_messages_tokens(places: list[int]) -> None:
    said = f"{THOUGHT}One city. {PARIS}And two numbers:{ADD}\n"
    events, response = run_with_logprobs(said, places)
    assert nameless(response) == nameless(run_with_logprobs(said, [])[1])
    kinds = [item["type"] for item in response["output"]]
    assert kinds == ["reasoning", "message", "function_call", "message", "function_call"]
    for index in (1, 3):
        (part,) = response["output"][index]["content"]
        assert "".join(entry["token"] for entry in part["logprobs"]) == part["text"]
        own = [event for event in events if event.get("output_index") == index]
        deltas = [event["logprobs"] for event in own if event["type"] == "response.output_text.delta"]
        assert [entry for shown in deltas for entry in shown] == part["logprobs"]
        (done,) = [event for event in own if event["type"] == "response.output_text.done"]
        assert done["logprobs"] == part["logprobs"]
        assert part["logprobs"][0]["top_logprobs"][0]["logprob"] == part["logprobs"][0]["logprob"]


def test_a_call_that_ended_stays_complete_when_the_answer_is_cut() -> None:
    _, response = run([PARIS], FinishReason("length", length=9))
    assert response["output"][0]["status"] == "completed" and response["status"] == "incomplete"
    _, response = run([PARIS[:-20]], FinishReason("length", length=9))
    assert response["output"][0]["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}


def test_failures_are_events() -> None:
    reply, reader = ResponseReply({}, LOGPROBS), AnswerReader(FORMAT)
    out = output("text ")
    sent = reply.begin(out) + reply.add(reader.read(out), out)
    failed = reply.fail(ApiError(500, "broken"))
    assert [event["type"] for event in failed] == ["error", "response.failed"]
    assert (failed[0]["code"], failed[0]["message"]) == ("server_error", "broken")
    assert failed[1]["response"]["error"] == {"code": "server_error", "message": "broken"}
    assert failed[1]["sequence_number"] == len(sent) + 1
