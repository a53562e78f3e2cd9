"""Chat completions as clients see them: the pieces of a stream join to the whole, whatever the pieces are."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fixtures.answers import ADD, PARIS, STOP, THOUGHT, output
from sglang.srt.entrypoints.chat_output import AnswerFormat, ChatShape
from sglang.srt.entrypoints.parsers.gemma4 import Gemma4Format
from sglang.srt.managers.io_struct import FinishReason
from sglang.srt.sampling.thought_budget import ThoughtTokens

OPEN, CLOSE = 100, 101
FORMAT = AnswerFormat(Gemma4Format(), reasoning=True, tools=True, thought_tokens=ThoughtTokens(OPEN, CLOSE, 2))


def whole(text: str, answer_format: AnswerFormat = FORMAT, finish: FinishReason = STOP) -> dict[str, Any]:
    return ChatShape(answer_format).choice(output(text, finish))


def stream(
    pieces: list[str], answer_format: AnswerFormat = FORMAT, finish: FinishReason = STOP
) -> list[dict[str, Any]]:
    shape = ChatShape(answer_format)
    outputs = [output(piece) for piece in pieces[:-1]] + [output(pieces[-1], finish)]
    return [choice for i, out in enumerate(outputs) for choice in shape.pieces(out, i == 0)]


def joined(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client makes of a stream: the message, and the end."""
    content, reasoning, calls = "", "", []
    for choice in choices:
        delta = choice["delta"]
        content += delta.get("content") or ""
        reasoning += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls") or []:
            if call["index"] == len(calls):
                assert call["id"].startswith("call_") and call["type"] == "function"
                calls.append({"name": call["function"]["name"], "arguments": ""})
            else:
                assert call["index"] == len(calls) - 1 and set(call["function"]) == {"arguments"}
            calls[-1]["arguments"] += call["function"]["arguments"]
    return {"content": content, "reasoning": reasoning, "calls": calls, "end": choices[-1]["finish_reason"]}


def simplified(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice["message"]
    return {
        "content": message["content"] or "",
        "reasoning": message["reasoning_content"] or "",
        "calls": [call["function"] for call in message["tool_calls"] or []],
        "end": choice["finish_reason"],
    }


def test_whole_messages() -> None:
    message = whole(f"{THOUGHT}{PARIS}{ADD}")["message"]
    assert message["content"] is None and message["reasoning_content"] == "One, two."
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "get_weather", "arguments": '{"city":"Paris"}'},
        {"name": "add", "arguments": '{"a":1,"b":2}'},
    ]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert all(set(call) == {"id", "type", "function"} for call in message["tool_calls"])
    plain = whole("Hi.")["message"]
    assert (plain["content"], plain["reasoning_content"], plain["tool_calls"]) == ("Hi.", None, None)
    assert whole("")["message"]["content"] == ""


@pytest.mark.parametrize(
    "text, finish, expected",
    [
        (PARIS, STOP, "tool_calls"),
        (f"{PARIS}text", STOP, "tool_calls"),
        ("text", STOP, "stop"),
        (PARIS, FinishReason("length", length=9), "length"),
        (PARIS[:-30], FinishReason("length", length=9), "length"),
        (PARIS[:-25], STOP, "stop"),
        (PARIS, FinishReason("abort"), "abort"),
    ],
)
def test_why_it_ended(text: str, finish: FinishReason, expected: str) -> None:
    assert whole(text, finish=finish)["finish_reason"] == expected
    assert stream([text], finish=finish)[-1]["finish_reason"] == expected


TEXTS = st.lists(st.sampled_from([THOUGHT, PARIS, ADD, "text ", "<channel|>", "\n", PARIS[:-20]]), max_size=8).map(
    "".join
)


@settings(max_examples=200, deadline=None)
@given(text=TEXTS, places=st.lists(st.integers(0, 300), max_size=10), flags=st.tuples(st.booleans(), st.booleans()))
def test_streams_join_to_the_whole(text: str, places: list[int], flags: tuple[bool, bool]) -> None:
    chosen = AnswerFormat(
        Gemma4Format(), reasoning=True, tools=True, separate_reasoning=flags[0], stream_reasoning=flags[1]
    )
    bounds = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    pieces = [text[low:high] for low, high in zip(bounds, bounds[1:], strict=False)]
    choices = stream(pieces, chosen)
    assert joined(choices) == simplified(whole(text, chosen))
    assert choices[0]["delta"]["role"] == "assistant" and choices[-1]["delta"] == {}
    assert all(choice["finish_reason"] is None for choice in choices[:-1])


def test_reasoning_that_is_not_streamed_comes_at_its_end() -> None:
    held = AnswerFormat(Gemma4Format(), reasoning=True, stream_reasoning=False)
    deltas = [choice["delta"] for choice in stream(list(f"{THOUGHT}ab"), held)]
    assert [delta["reasoning_content"] for delta in deltas if delta.get("reasoning_content")] == ["One, two."]
    assert [delta.get("content") for delta in deltas] == ["", None, "a", "b", None]
    cut = stream(list(THOUGHT.split(".")[0]), held, FinishReason("length", length=3))
    assert [choice["delta"].get("reasoning_content") for choice in cut] == [None, "One, two", None]


def test_reasoning_that_is_not_separated_is_content_without_markers() -> None:
    together = AnswerFormat(Gemma4Format(), reasoning=True, separate_reasoning=False)
    message = whole(f"{THOUGHT}ab", together)["message"]
    assert (message["content"], message["reasoning_content"]) == ("One, two.ab", None)


def test_answers_of_one_request_do_not_mix() -> None:
    shape = ChatShape(FORMAT)
    texts = [f"{THOUGHT}{PARIS}", f"a{ADD}b", "plain"]
    seen: dict[int, list[dict[str, Any]]] = {i: [] for i in range(3)}
    for at in range(0, 120, 3):
        for index, text in enumerate(texts):
            is_last = at <= len(text) < at + 3
            if at <= len(text):
                seen[index] += shape.pieces(output(text[at : at + 3], STOP if is_last else None, index), at == 0)
    assert [joined(seen[index]) for index in range(3)] == [simplified(whole(text)) for text in texts]
    assert all(choice["index"] == index for index in seen for choice in seen[index])


def test_tokens_of_thoughts() -> None:
    shape = ChatShape(FORMAT)
    # two tokens are the header of the thought, three its text; the marks count as neither
    shape.choice(output("", STOP, ids=(OPEN, 1, 2, 3, 4, 5, CLOSE, 6, 7)))
    assert shape.reasoning_tokens == 3
    shape.pieces(output("", index=1, ids=(OPEN, 1, 2)), True)
    shape.pieces(output("", index=1, ids=(3, 4)), False)
    assert shape.reasoning_tokens == 3 + 2
    begun = ChatShape(
        AnswerFormat(Gemma4Format(), reasoning=True, thought_tokens=FORMAT.thought_tokens, num_thought_begun=2)
    )
    begun.choice(output("", STOP, ids=(3, CLOSE, 6)))
    assert begun.reasoning_tokens == 1


def test_a_thought_that_the_prompt_opened_goes_on() -> None:
    begun = AnswerFormat(Gemma4Format(), reasoning=True, thought_begun="<|channel>thought\nHm")
    message = whole("m.<channel|>a", begun)["message"]
    assert (message["reasoning_content"], message["content"]) == ("m.", "a")


def test_without_a_format_the_text_stands() -> None:
    assert whole(THOUGHT + PARIS, AnswerFormat())["message"]["content"] == THOUGHT + PARIS
    assert joined(stream(list(PARIS), AnswerFormat())) == simplified(whole(PARIS, AnswerFormat()))
