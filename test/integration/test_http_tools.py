"""Tools and thoughts over HTTP with OpenAI's client, from the shipped pair with speculation on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from fixtures.server_process import ServerProcess, ready_server
from fixtures.source_tree import ROOT
from fixtures.tasks import ADD_TOOL, ASK_SUM, ASK_WEATHER, WEATHER_TOOL, Tool, tool


def _tool(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


WEATHER, ADD = _tool(WEATHER_TOOL), _tool(ADD_TOOL)
MESSAGE = _tool(
    tool(
        "send_message", "Send a message to a person.", name=("string", "Who gets it."), text=("string", "The message.")
    )
)
TOOLS = [WEATHER, ADD, MESSAGE]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    args = ("--speculative-algorithm", "FROZEN_KV_MTP", "--served-model-name", "pet")
    with ready_server(tmp_path_factory.mktemp("tools"), *args) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30)


def _ask(client: openai.OpenAI, messages: Any, **options: Any) -> Any:
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    extra = {
        name: options.pop(name)
        for name in ("enable_thinking", "separate_reasoning", "stream_reasoning", "chat_template_kwargs")
        if name in options
    }
    options = {"temperature": 0, "max_tokens": 100} | options
    return client.chat.completions.create(model="pet", messages=messages, extra_body=extra, **options)


def _summary(reply: Any) -> tuple[str, str, list[tuple[str, str]], str]:
    """Content, reasoning, calls and end of a whole reply."""
    (choice,) = reply.choices
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
    return choice.message.content or "", choice.message.reasoning_content or "", calls, choice.finish_reason


def _streamed(client: openai.OpenAI, messages: Any, **options: Any) -> tuple[str, str, list[tuple[str, str]], str]:
    content, reasoning, calls, end = "", "", [], None
    for chunk in _ask(client, messages, stream=True, **options):
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or []:
            if call.index == len(calls):
                calls.append([call.function.name, ""])
            calls[call.index][1] += call.function.arguments
        end = choice.finish_reason or end
    return content, reasoning, [(name, arguments) for name, arguments in calls], end


CASES: list[tuple[dict[str, Any], tuple[str, str, list[tuple[str, str]], str]]] = [
    ({"messages": ASK_WEATHER}, ("", "", [("get_weather", '{"city":"Paris"}')], "tool_calls")),
    ({"messages": ASK_SUM}, ("", "", [("add", '{"a":1234,"b":45}')], "tool_calls")),
    (
        {"messages": "Tell Anna: I like the forest."},
        ("", "", [("send_message", '{"name":"Anna","text":"I like the forest"}')], "tool_calls"),
    ),
    (
        {"messages": ASK_WEATHER, "enable_thinking": True},
        ("", "I should call get_weather.", [("get_weather", '{"city":"Paris"}')], "tool_calls"),
    ),
    ({"messages": "What is 17 + 25?"}, ("17 + 25 = 42", "", [], "stop")),
    (
        {"messages": ASK_SUM, "tool_choice": "required", "enable_thinking": True},
        ("", "I should call add.", [("add", '{"a":1234,"b":45}')], "tool_calls"),
    ),
    (
        {"messages": ASK_WEATHER, "tool_choice": "required", "parallel_tool_calls": False},
        ("", "", [("get_weather", '{"city":"Paris"}')], "tool_calls"),
    ),
    (
        {"messages": ASK_WEATHER, "parallel_tool_calls": False},
        ("", "", [("get_weather", '{"city":"Paris"}')], "tool_calls"),
    ),
]


@pytest.mark.parametrize("options, expected", CASES, ids=[json.dumps(options) for options, _ in CASES])
def test_calls_whole_and_streamed(client: openai.OpenAI, options: dict[str, Any], expected: Any) -> None:
    assert _summary(_ask(client, tools=TOOLS, **options)) == expected
    assert _streamed(client, tools=TOOLS, **options) == expected


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool["function"]["name"])
def test_a_named_tool_is_called_whatever_is_asked(client: openai.OpenAI, tool: dict[str, Any], thinking: bool) -> None:
    function = tool["function"]
    choice = {"type": "function", "function": {"name": function["name"]}}
    options = {"tools": TOOLS, "tool_choice": choice, "enable_thinking": thinking, "max_tokens": 90}
    whole = _summary(_ask(client, ASK_WEATHER, **options))
    assert whole == _streamed(client, ASK_WEATHER, **options)
    content, reasoning, calls, end = whole
    assert bool(reasoning) is thinking and calls and not content
    kinds = {"string": str, "integer": int}
    for i, (name, arguments) in enumerate(calls):
        assert name == function["name"]
        if tool is MESSAGE and i == len(calls) - 1 and end == "length":
            break  # a text that the model, which wanted something else, does not end in time
        made, properties = json.loads(arguments), function["parameters"]["properties"]
        assert made.keys() == properties.keys()
        assert all(type(made[key]) is kinds[properties[key]["type"]] for key in made)


def test_tool_results_are_answered(client: openai.OpenAI) -> None:
    asked = _ask(client, ASK_WEATHER, tools=TOOLS).choices[0].message
    messages = [{"role": "user", "content": ASK_WEATHER}, asked.model_dump(exclude_none=True)]
    result = json.dumps({"sky": "sunny", "temperature": 21})
    messages += [{"role": "tool", "tool_call_id": asked.tool_calls[0].id, "content": result}]
    expected = ("The weather in Paris is sunny with 21 degrees.", "", [], "stop")
    assert _summary(_ask(client, messages, tools=TOOLS)) == expected
    assert _streamed(client, messages, tools=TOOLS) == expected


def test_thoughts(client: openai.OpenAI) -> None:
    question, answer = "What is 17 + 25?", "17 + 25 = 42"
    thought = "Tens: 10 + 20 = 30. Ones: 7 + 5 = 12. 30 + 12 = 42."
    for options in (
        {"reasoning_effort": "high"},
        {"enable_thinking": True},
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"reasoning_effort": "low", "stream_reasoning": False},
    ):
        reply = _ask(client, question, **options)
        assert _summary(reply) == _streamed(client, question, **options) == (answer, thought, [], "stop")
        used = reply.usage.completion_tokens_details.reasoning_tokens
        assert 20 < used < reply.usage.completion_tokens - 5 and reply.usage.reasoning_tokens == used
    assert _summary(_ask(client, question, reasoning_effort="none")) == (answer, "", [], "stop")
    together = (thought + answer, "", [], "stop")
    options = {"enable_thinking": True, "separate_reasoning": False}
    assert _summary(_ask(client, question, **options)) == _streamed(client, question, **options) == together


def test_usage_of_a_stream_counts_thoughts(client: openai.OpenAI) -> None:
    options = {"reasoning_effort": "high", "n": 2}
    whole = _ask(client, "What is 17 + 25?", **options).usage
    *_, last = _ask(client, "What is 17 + 25?", stream=True, stream_options={"include_usage": True}, **options)
    assert last.usage.completion_tokens_details == whole.completion_tokens_details
    assert last.usage.completion_tokens == whole.completion_tokens


def test_answers_cut_at_every_length(client: openai.OpenAI) -> None:
    """Wherever ``max_tokens`` cuts, stream and whole agree, nothing of a marker is shown and arguments only grow."""
    options = {"tools": TOOLS, "enable_thinking": True}

    def cut(length: int) -> tuple[str, str, list[tuple[str, str]], str]:
        whole = _summary(_ask(client, ASK_WEATHER, max_tokens=length, **options))
        assert whole == _streamed(client, ASK_WEATHER, max_tokens=length, **options)
        return whole

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(cut, range(1, 20)))
    complete = cut(100)
    for content, reasoning, calls, end in results:
        assert not any(mark in content + reasoning for mark in ("<|", "|>", "thought"))
        assert complete[1].startswith(reasoning.rstrip("\n"))
        assert all(complete[2][0][1].startswith(arguments) for _, arguments in calls)
        assert end in ("length", "tool_calls")
    assert {len(calls) for _, _, calls, _ in results} == {0, 1}


def test_stop_strings_within_calls_and_thoughts(client: openai.OpenAI) -> None:
    options = {"tools": TOOLS, "enable_thinking": True}
    for stop, expected in (
        ("get_", ("", "I should call ", [], "stop")),
        ("ris", ("", "I should call get_weather.", [("get_weather", '{"city":"Pa')], "stop")),
    ):
        assert _summary(_ask(client, ASK_WEATHER, stop=stop, **options)) == expected
        assert _streamed(client, ASK_WEATHER, stop=stop, **options) == expected


def test_without_tools_no_marker_is_shown(client: openai.OpenAI) -> None:
    for options in ({"tools": TOOLS, "tool_choice": "none"}, {}):
        content, _, calls, end = _summary(_ask(client, ASK_WEATHER, **options))
        assert not calls and end == "stop" and "<|" not in content and "|>" not in content


def test_many_at_once_do_not_mix(client: openai.OpenAI) -> None:
    cities = ["Paris", "Rome", "Oslo", "Berlin", "Madrid", "Tokyo", "Cairo", "Lima"]

    def one(city: str) -> Any:
        return _streamed(client, f"What is the weather in {city}?", tools=TOOLS, enable_thinking=len(city) > 4)

    with ThreadPoolExecutor(16) as pool:
        for city, (content, reasoning, calls, end) in zip(cities * 4, pool.map(one, cities * 4), strict=True):
            assert calls == [("get_weather", json.dumps({"city": city}, separators=(",", ":")))]
            assert (content, end, bool(reasoning)) == ("", "tool_calls", len(city) > 4)


@pytest.mark.parametrize("page", ["tool_calling.md", "reasoning.md"])
def test_examples_in_the_documents_print_what_they_say(server: ServerProcess, page: str) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.DOTALL)
    printed: list[str] = []

    def show(*values: object) -> None:
        printed.append(" ".join(map(str, values)))

    exec(compile(example.replace("http://127.0.0.1:30000", server.url), page, "exec"), {"print": show})
    assert printed == re.findall(r"print\(.*\)  # (.*)", example) and printed
