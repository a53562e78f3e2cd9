"""OpenAI's Responses API with OpenAI's client, from the shipped pair with speculation on."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

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


def _tool(tool: Tool) -> dict[str, Any]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": True,
    }


WEATHER, ADD = _tool(WEATHER_TOOL), _tool(ADD_TOOL)


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    args = ("--speculative-algorithm", "FROZEN_KV_MTP", "--served-model-name", "pet")
    with ready_server(tmp_path_factory.mktemp("responses"), *args) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30)


def _respond(client: openai.OpenAI, question: Any, **options: Any) -> Any:
    options = {"temperature": 0, "max_output_tokens": 100} | options
    return client.responses.create(model="pet", input=question, **options)


def _items(response: Any) -> list[tuple[str, ...]]:
    """What a response says, without ids."""
    items: list[tuple[str, ...]] = []
    for item in response.output:
        if item.type == "function_call":
            items.append((item.type, item.name, item.arguments, item.status))
        else:
            (part,) = item.content
            items.append((item.type, part.type, part.text, item.status))
    return items


def _facts(response: Any) -> tuple[Any, ...]:
    """All that two runs of one request have in common."""
    usage = response.usage
    counts = (usage.input_tokens, usage.output_tokens, usage.output_tokens_details.reasoning_tokens, usage.total_tokens)
    return (_items(response), response.status, response.incomplete_details, counts)


def _streamed(client: openai.OpenAI, question: Any, **options: Any) -> Any:
    """The response at the end of a stream whose events are checked to lead there."""
    events = list(_respond(client, question, stream=True, **options))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert not events[0].response.output and events[0].response.status == "in_progress"
    last = events[-1].response
    assert events[-1].type == f"response.{last.status}" and last.id == events[0].response.id
    for index, item in enumerate(last.output):
        own = [event for event in events if getattr(event, "output_index", None) == index]
        assert own[0].type == "response.output_item.added" and own[0].item.status == "in_progress"
        assert own[-1].type == "response.output_item.done" and own[-1].item == item
        kinds = {"function_call": "function_call_arguments", "message": "output_text", "reasoning": "reasoning_text"}
        kind = f"response.{kinds[item.type]}"
        text = item.arguments if item.type == "function_call" else item.content[0].text
        assert "".join(event.delta for event in own if event.type == f"{kind}.delta") == text
        (done,) = [event for event in own if event.type == f"{kind}.done"]
        assert (done.arguments if item.type == "function_call" else done.text) == text
        inside = [event.type for event in own[1:-1] if not event.type.startswith(kind)]
        parts = ["response.content_part.added", "response.content_part.done"]
        assert inside == ([] if item.type == "function_call" else parts)
        assert all(event.item_id == item.id for event in own[1:-1])
    return last


CALL = ("function_call", "get_weather", '{"city":"Paris"}', "completed")
CASES: list[tuple[dict[str, Any], list[tuple[str, ...]]]] = [
    ({"question": SUM}, [("message", "output_text", "17 + 25 = 42", "completed")]),
    (
        {"question": SUM, "reasoning": {"effort": "high", "summary": "auto"}},
        [
            ("reasoning", "reasoning_text", SUM_THOUGHT, "completed"),
            ("message", "output_text", "17 + 25 = 42", "completed"),
        ],
    ),
    ({"question": SUM, "reasoning": {"effort": "none"}}, [("message", "output_text", "17 + 25 = 42", "completed")]),
    ({"question": ASK_WEATHER, "tools": [WEATHER, ADD]}, [CALL]),
    (
        {"question": ASK_WEATHER, "tools": [WEATHER, ADD], "reasoning": {"effort": "low"}},
        [("reasoning", "reasoning_text", "I should call get_weather.", "completed"), CALL],
    ),
    (
        {"question": ASK_SUM, "tools": [WEATHER, ADD], "tool_choice": "required", "parallel_tool_calls": False},
        [("function_call", "add", '{"a":1234,"b":45}', "completed")],
    ),
    (
        {
            "question": ASK_WEATHER,
            "tools": [WEATHER, ADD],
            "tool_choice": {"type": "function", "name": "get_weather"},
            "parallel_tool_calls": False,
        },
        [CALL],
    ),
]


@pytest.mark.parametrize("options, expected", CASES, ids=map(str, range(len(CASES))))
def test_answers_whole_and_streamed(client: openai.OpenAI, options: dict[str, Any], expected: Any) -> None:
    whole = _respond(client, **options)
    assert _items(whole) == expected and whole.status == "completed"
    assert _facts(_streamed(client, **options)) == _facts(whole)


def test_the_loop_of_an_agent(client: openai.OpenAI) -> None:
    """Output goes back as input, as the client gives it, with the result of the call."""
    options = {"tools": [WEATHER], "reasoning": {"effort": "high"}, "include": ["reasoning.encrypted_content"]}
    first = _respond(client, ASK_WEATHER, store=False, **options)
    call = first.output[-1]
    result = json.dumps({"sky": "sunny", "temperature": 21})
    history = [
        {"role": "user", "content": ASK_WEATHER},
        *(item.model_dump(exclude_none=True) for item in first.output),
        {"type": "function_call_output", "call_id": call.call_id, "output": result},
    ]
    options |= {"reasoning": {"effort": "none"}}
    expected = [("message", "output_text", "The weather in Paris is sunny with 21 degrees.", "completed")]
    assert _items(_respond(client, history, **options)) == expected
    assert _items(_streamed(client, history, **options)) == expected


@pytest.mark.parametrize("thinking", ["none", "high"])
def test_schemas(client: openai.OpenAI, thinking: Any) -> None:
    form = {"type": "json_schema", "name": "person", "schema": PERSON_SCHEMA, "strict": True}
    options = {"text": {"format": form}, "reasoning": {"effort": thinking}, "max_output_tokens": 300}
    whole = _respond(client, PERSON, **options)
    assert json.loads(whole.output_text) == {"name": "Anna", "age": 24}
    assert _facts(_streamed(client, PERSON, **options)) == _facts(whole)
    parsed = client.responses.parse(
        model="pet", input=PERSON, text_format=Person, temperature=0, reasoning={"effort": thinking}
    )
    assert parsed.output_parsed == Person(name="Anna", age=24)
    objects = _respond(client, PERSON, text={"format": {"type": "json_object"}}, max_output_tokens=300)
    assert json.loads(objects.output_text)["name"] == "Anna"


def test_the_helper_for_streams(client: openai.OpenAI) -> None:
    with client.responses.stream(
        model="pet", input=SUM, temperature=0, reasoning={"effort": "high"}, max_output_tokens=100
    ) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == "17 + 25 = 42"


def test_cut_answers_are_incomplete(client: openai.OpenAI) -> None:
    options = {"tools": [WEATHER], "reasoning": {"effort": "high"}}
    complete = _items(_respond(client, ASK_WEATHER, **options))
    seen = set()
    for length in (1, 3, 6, 9, 12, 14, 15, 16):
        whole = _respond(client, ASK_WEATHER, max_output_tokens=length, **options)
        assert whole.status == "incomplete" and whole.incomplete_details.reason == "max_output_tokens"
        assert whole.usage.output_tokens == length
        assert _facts(_streamed(client, ASK_WEATHER, max_output_tokens=length, **options)) == _facts(whole)
        items = _items(whole)
        seen.update((item[0], item[-1]) for item in items)
        # what is there is a beginning of what would have come
        for item, expected in zip(items, complete, strict=False):
            assert item[:2] == expected[:2] and expected[2].startswith(item[2].rstrip("\n"))
    assert {("reasoning", "incomplete"), ("function_call", "incomplete")} <= seen


def test_log_probabilities(client: openai.OpenAI) -> None:
    options = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "reasoning": {"effort": "high"}}
    whole, streamed = _respond(client, SUM, **options), _streamed(client, SUM, **options)
    shown = whole.output[-1].content[0].logprobs
    assert "".join(entry.token for entry in shown) == "17 + 25 = 42"
    # the answer is the most likely one, token by token
    assert all(entry.top_logprobs[0].token == entry.token and len(entry.top_logprobs) == 2 for entry in shown)
    again = streamed.output[-1].content[0].logprobs
    assert [entry.token for entry in again] == [entry.token for entry in shown]
    assert [entry.logprob for entry in again] == pytest.approx([entry.logprob for entry in shown], abs=1e-3)


def test_instructions_and_parts_reach_the_model(client: openai.OpenAI) -> None:
    parts = [{"role": "user", "content": [{"type": "input_text", "text": SUM}]}]
    plain = _respond(client, SUM)
    assert _items(_respond(client, parts)) == _items(plain)
    assert _respond(client, parts).usage.input_tokens == plain.usage.input_tokens
    told = _respond(client, SUM, instructions="Answer.")
    system = _respond(client, [{"role": "system", "content": "Answer."}, {"role": "user", "content": SUM}])
    assert told.usage.input_tokens == system.usage.input_tokens > plain.usage.input_tokens
    assert told.instructions == "Answer." and system.instructions is None


def test_what_a_response_repeats(client: openai.OpenAI) -> None:
    reply = _respond(client, SUM, metadata={"a": "b"}, tools=[WEATHER], store=True, top_p=0.5, user="u")
    assert (reply.metadata, reply.store, reply.top_p, reply.temperature) == ({"a": "b"}, False, 0.5, 0.0)
    assert (reply.model, reply.max_output_tokens, reply.user) == ("pet", 100, "u")
    assert reply.tools[0].name == "get_weather" and reply.tool_choice == "auto"


@pytest.mark.parametrize("stream", [False, True])
def test_errors(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        _respond(client, SUM, max_output_tokens=10**6, stream=stream)
    assert "max_output_tokens" in error.value.message and error.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as error:
        _respond(client, SUM, previous_response_id="resp_1", stream=stream)
    assert error.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="other", input=SUM, stream=stream)


def test_no_response_is_kept(client: openai.OpenAI) -> None:
    kept = _respond(client, SUM, store=True)
    for ask in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="keeps none"):
            ask(kept.id)
    with pytest.raises(openai.NotFoundError, match="keeps none"):
        client.responses.input_items.list(kept.id)


def test_an_aborted_request_fails_with_events(client: openai.OpenAI, server: ServerProcess) -> None:
    options = {"max_output_tokens": 7000, "extra_body": {"ignore_eos": True, "rid": "long"}}
    events: list[Any] = []
    for event in _respond(client, "Count from 3 to 20.", stream=True, **options):
        if not events:
            reply = httpx.post(f"{server.url}/abort_request", json={"rid": "long"}, timeout=10)
            assert reply.json() == {"aborted": 1}
        events.append(event)
    assert [event.type for event in events[-2:]] == ["error", "response.failed"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-2].code == "aborted" and events[-1].response.status == "failed"


def test_a_client_that_leaves_aborts_its_request(server: ServerProcess) -> None:
    body = {"model": "pet", "input": "Count.", "ignore_eos": True, "max_output_tokens": 8000}
    url = f"{server.url}/v1/responses"

    def num_pending() -> int:
        return int(httpx.get(f"{server.url}/server_info", timeout=10).json()["num_pending_requests"])

    with httpx.stream("POST", url, json=body | {"stream": True}, timeout=10) as reply:
        chunks = reply.iter_raw()  # a name keeps it open
        assert next(chunks).startswith(b"event: response.created\n")
        assert num_pending() == 1
    wait_until(lambda: num_pending() == 0, "the stream to be aborted")
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        payload = json.dumps(body).encode()
        head = f"POST /v1/responses HTTP/1.1\r\nHost: x\r\nContent-Length: {len(payload)}\r\n\r\n"
        connection.sendall(head.encode() + payload)
        wait_until(lambda: num_pending() == 1, "the request to run")
    wait_until(lambda: num_pending() == 0, "the request to be aborted")
