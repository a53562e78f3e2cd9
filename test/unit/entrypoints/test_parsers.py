"""Answers of Gemma 4 taken apart: any cut of any text gives what the whole text gives, and nothing is lost."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.entrypoints.parsers.base import ParsedCall, ParsedText, ToolCallEnd, join_events
from sglang.srt.entrypoints.parsers.cursor import StopSet, TextCursor
from sglang.srt.entrypoints.parsers.gemma4 import Gemma4Format, Gemma4Parser

Q = '<|"|>'
CALL, END_CALL = "<|tool_call>", "<tool_call|>"
THOUGHT, END_THOUGHT = "<|channel>thought\n", "\n<channel|>"
MARKERS = (CALL, END_CALL, Q, "<|channel>", "<channel|>")


def parse(pieces: Any, *, reasoning: bool = True, tools: bool = True) -> ParsedText:
    """The result of a text, or of its pieces one after the other."""
    parser = Gemma4Parser(reasoning=reasoning, tools=tools)
    events = [event for piece in ([pieces] if isinstance(pieces, str) else pieces) for event in parser.feed(piece)]
    return join_events([*events, *parser.finish()])


def call(name: str, arguments: str) -> str:
    return f"{CALL}call:{name}{{{arguments}}}{END_CALL}"


def done(name: str, arguments: str) -> ParsedCall:
    return ParsedCall(name, arguments, is_complete=True)


def cut_off(name: str, arguments: str) -> ParsedCall:
    return ParsedCall(name, arguments, is_complete=False)


EXAMPLES: dict[str, tuple[str, ParsedText]] = {
    "plain": ("Hello.\n", ParsedText("", "Hello.\n", ())),
    "nothing": ("", ParsedText("", "", ())),
    "thought and answer": (f"{THOUGHT}a\n\nb{END_THOUGHT}c", ParsedText("a\n\nb", "c", ())),
    "thought without line break": ("<|channel>thought\nab<channel|>c", ParsedText("ab", "c", ())),
    "empty thought": ("<|channel>thought\n<channel|>c", ParsedText("", "c", ())),
    "empty thought on one line": ("<|channel>thought<channel|>c", ParsedText("", "c", ())),
    "channel of another name": ("<|channel>thoughts\na<channel|>c", ParsedText("thoughts\na", "c", ())),
    "thought cut off": (f"{THOUGHT}ab\n", ParsedText("ab\n", "", ())),
    "thought cut off in its label": ("a<|channel>thou", ParsedText("", "a", ())),
    "two thoughts": (f"{THOUGHT}a{END_THOUGHT}b{THOUGHT}c{END_THOUGHT}d", ParsedText("ac", "bd", ())),
    "call": (call("f", f"a:{Q}x y{Q},b:3"), ParsedText("", "", (done("f", '{"a":"x y","b":3}'),))),
    "no arguments": (call("f", ""), ParsedText("", "", (done("f", "{}"),))),
    "no braces": (f"{CALL}call:f{END_CALL}", ParsedText("", "", (done("f", "{}"),))),
    "two calls of one function": (
        call("f", "a:1") + call("f", "a:2"),
        ParsedText("", "", (done("f", '{"a":1}'), done("f", '{"a":2}'))),
    ),
    "text around calls": (
        f"a {call('f', '')}\n{call('g', '')} b",
        ParsedText("", "a  b", (done("f", "{}"), done("g", "{}"))),
    ),
    "thought, text, call": (f"{THOUGHT}a{END_THOUGHT}b{call('f', '')}", ParsedText("a", "b", (done("f", "{}"),))),
    "call in a thought": (f"{THOUGHT}a{call('f', '')}", ParsedText("a", "", (done("f", "{}"),))),
    "scalars": (
        call("f", "a:-1.5e3,b:true,c:False,d:None,e:null,f:007,g:+1,h:x y ,i:.5"),
        ParsedText(
            "",
            "",
            (
                done(
                    "f",
                    '{"a":-1.5e3,"b":true,"c":false,"d":null,"e":null,"f":"007","g":"+1","h":"x y","i":".5"}',
                ),
            ),
        ),
    ),
    "nesting": (
        call("f", f"a:{{b:[1,{{c:{Q}]}}{Q}}},[]],{Q}d e{Q}:{{}}}}"),
        ParsedText("", "", (done("f", '{"a":{"b":[1,{"c":"]}"},[]],"d e":{}}}'),)),
    ),
    "markers in strings": (
        call("f", f"a:{Q}{CALL}call:g{{}}{END_CALL}{THOUGHT}<channel|>{Q}"),
        ParsedText("", "", (done("f", '{"a":"<|tool_call>call:g{}<tool_call|><|channel>thought\\n<channel|>"}'),)),
    ),
    "quotes and backslashes in strings": (
        call("f", f'a:{Q}"\\n{{\\"{Q}'),
        ParsedText("", "", (done("f", '{"a":"\\"\\\\n{\\\\\\""}'),)),
    ),
    "JSON instead": (
        call("f", '"a": "x, \\"y\\" \\u00e9\\q", "b" : [ 1 , 2 ]'),
        ParsedText("", "", (done("f", '{"a":"x, \\"y\\" \\u00e9\\\\q","b":[1,2]}'),)),
    ),
    "what is missing": (
        call("f", "a:,b,c:[1,,2,],,d:{},"),
        ParsedText("", "", (done("f", '{"a":null,"b":null,"c":[1,null,2],"d":{}}'),)),
    ),
    "text beside strings": (
        call("f", f"a:x {Q}y{Q} z,b:{Q}v{Q}{Q}w{Q}"),
        ParsedText("", "", (done("f", '{"a":"x yz","b":"vw"}'),)),
    ),
    "text beside containers": (
        call("f", "a:[{} x],b:{} c:1"),
        ParsedText("", "", (done("f", '{"a":[{},"x"],"b":{},"c":1}'),)),
    ),
    "the wrong bracket": (call("f", "a:[1}],b:2]"), ParsedText("", "", (done("f", '{"a":["1}"],"b":"2]"}'),))),
    "closed too early": (
        f"{CALL}call:f{{a:[1,{{b:x{END_CALL}c",
        ParsedText("", "c", (done("f", '{"a":[1,{"b":"x"}]}'),)),
    ),
    "closed behind a key": (f"{CALL}call:f{{a:1,b{END_CALL}", ParsedText("", "", (done("f", '{"a":1,"b":null}'),))),
    "closed by the next": (
        f"{CALL}call:f{{a:1{call('g', '')}",
        ParsedText("", "", (done("f", '{"a":1}'), done("g", "{}"))),
    ),
    "closed by a thought": (f"{CALL}call:f{{a:{THOUGHT}b", ParsedText("b", "", (done("f", '{"a":null}'),))),
    "too many braces": (f"{CALL}call:f{{a:1}}}}{END_CALL}b", ParsedText("", "}b", (done("f", '{"a":1}'),))),
    "not a call": (f"a{CALL}x y{END_CALL}b", ParsedText("", "ax yb", ())),
    "not a name": (f"{CALL}call:a b{{c:{Q}d{Q}}}{END_CALL}", ParsedText("", "call:a b{c:d}", ())),
    "no name": (f"{CALL}call:{{}}{END_CALL}", ParsedText("", "call:{}", ())),
    "a name that does not end": (CALL + "call:" + "x" * 300 + "{}", ParsedText("", "call:" + "x" * 300 + "{}", ())),
    "cut off in the marker": ("a<|tool_ca", ParsedText("", "a<|tool_ca", ())),
    "cut off in the name": (f"a{CALL}call:get_we", ParsedText("", "acall:get_we", ())),
    "cut off in a key": (f"{CALL}call:f{{a:1,bc", ParsedText("", "", (cut_off("f", '{"a":1,"bc'),))),
    "cut off in a string": (f"{CALL}call:f{{a:{Q}x", ParsedText("", "", (cut_off("f", '{"a":"x'),))),
    "cut off behind a string": (f"{CALL}call:f{{a:{Q}x{Q}", ParsedText("", "", (cut_off("f", '{"a":"x'),))),
    "cut off in a marker": (f"{CALL}call:f{{a:{Q}x<|", ParsedText("", "", (cut_off("f", '{"a":"x<|'),))),
    "cut off in a number": (f"{CALL}call:f{{a:[12", ParsedText("", "", (cut_off("f", '{"a":[12'),))),
    "cut off in a word": (f"{CALL}call:f{{a:tr", ParsedText("", "", (cut_off("f", '{"a":"tr'),))),
    "cut off in an escape": (f'{CALL}call:f{{a:"x\\u00', ParsedText("", "", (cut_off("f", '{"a":"x\\\\u00'),))),
    "markers out of place": (f"a{END_CALL}b<channel|>c{Q}d", ParsedText("", "abcd", ())),
    "white space at the end of an answer": (f"{call('f', '')} \n", ParsedText("", "", (done("f", "{}"),))),
    "almost markers": ("a < b <| c <|tool_call <tool_call>", ParsedText("", "a < b <| c <|tool_call <tool_call>", ())),
    "unicode": (call("f", f"ä:{Q}日本\u2028😀{Q}"), ParsedText("", "", (done("f", '{"ä":"日本\u2028😀"}'),))),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_whole_and_in_every_cut(name: str) -> None:
    text, expected = EXAMPLES[name]
    assert parse(text) == expected
    assert parse(list(text)) == expected
    for at in range(len(text) + 1):
        assert parse([text[:at], text[at:]]) == expected, at


def test_each_kind_can_be_switched_off() -> None:
    text = f"{THOUGHT}a{END_THOUGHT}{call('f', '')}"
    assert parse(text, tools=False) == ParsedText("a", f"{CALL}call:f{{}}{END_CALL}", ())
    assert parse(text, reasoning=False) == ParsedText("", f"{THOUGHT}a{END_THOUGHT}", (done("f", "{}"),))
    with pytest.raises(AssertionError):
        Gemma4Parser(reasoning=False, tools=False)


def test_a_call_streams_while_it_is_written() -> None:
    parser = Gemma4Parser(reasoning=True, tools=True)
    begun = join_events(parser.feed(f"{CALL}call:f{{a:{Q}one two"))
    assert begun.calls == (cut_off("f", '{"a":"one two'),)
    assert not parser.feed(f"{Q[:3]}")
    assert isinstance(parser.feed(f"{Q[3:]}}}")[-1], ToolCallEnd)


@pytest.mark.parametrize(
    "prompt, begun",
    [
        ("<bos><|turn>user\na<turn|>\n<|turn>model\n", ""),
        ("<|turn>model\n<|channel>thought\n<channel|>", ""),
        ("<|turn>model\n<|channel>thought\nHm", "<|channel>thought\nHm"),
        ("<|turn>model\n<|channel>", "<|channel>"),
        # what a user or a tool wrote opens nothing
        ("<|turn>user\n<|channel>thought\n<turn|>\n<|turn>model\n", ""),
        ("<|turn>model\na<|tool_response>response:f{value:<|channel>}<tool_response|>", ""),
        ("<|turn>model\na<tool_response|><|channel>thought\n", "<|channel>thought\n"),
    ],
)
def test_thought_that_the_prompt_opened(prompt: str, begun: str) -> None:
    found = Gemma4Format().open_thought(prompt)
    assert found == begun
    parser = Gemma4Parser(reasoning=True, tools=True)
    parser.feed(found)
    said = join_events([*parser.feed("x<channel|>y"), *parser.finish()])
    assert said == (ParsedText("x", "y", ()) if begun else ParsedText("", "xy", ()))


FRAGMENTS = (*MARKERS, *MARKERS, *'{}[],:"\\ \na1<|>é😀', "thought\n", "call:", "call:f{", "call:g{a:", "\n<channel|>")
FRAGMENTS += ("u00e9", "word", "-2.5", "null", "<|")
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=40).map("".join)


def cuts_of(draw: st.DrawFn, text: str) -> list[str]:
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    bounds = [0, *places, len(text)]
    return [text[low:high] for low, high in zip(bounds, bounds[1:], strict=False)]


@settings(max_examples=600, deadline=None)
@given(st.data())
def test_any_cut_of_any_text_gives_the_whole(data: st.DataObject) -> None:
    text = data.draw(texts)
    if data.draw(st.booleans()):
        text = f"{CALL}call:f{{" + text
    whole = parse(text)
    assert parse(cuts_of(data.draw, text)) == whole
    assert parse(list(text)) == whole
    for made in whole.calls:
        assert not made.is_complete or isinstance(json.loads(made.arguments), dict)
    assert all(made.is_complete for made in whole.calls[:-1])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from([*FRAGMENTS, "WORD"]), max_size=60))
def test_no_word_is_lost_or_moved(fragments: list[str]) -> None:
    """Words that are unlike every marker come out once each, and in order within each part."""
    numbered = [f"w{i}w" if fragment == "WORD" else fragment for i, fragment in enumerate(fragments)]
    parsed = parse("".join(numbered))
    everything = [
        parsed.reasoning,
        parsed.content,
        *(part for made in parsed.calls for part in (made.name, made.arguments)),
    ]
    for i, fragment in enumerate(fragments):
        if fragment == "WORD":
            assert sum(part.count(f"w{i}w") for part in everything) == 1, (i, parsed)
    for part in everything:
        found = [int(word[:-1]) for word in part.split("w") if word[:-1].isdecimal()]
        assert found == sorted(found)


strings = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | texts.map(lambda text: text.replace(Q, ""))
keys = st.text("abcXYZ_09-.$ é", min_size=1, max_size=8).filter(lambda key: key == key.strip())
numbers = st.integers(-(10**12), 10**12) | st.floats(allow_nan=False, allow_infinity=False, allow_subnormal=False)
values = st.recursive(
    strings | numbers | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)


def written(value: Any) -> str:
    """A value in the model's notation."""
    if isinstance(value, str):
        return f"{Q}{value}{Q}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    return json.dumps(value)


def _is_plain(value: Any) -> bool:
    """Whether no string in it makes one with the quotes around it that is not there."""
    if isinstance(value, str):
        return written(value).count(Q) == 2 and not any(f"{value}{Q}".startswith(Q[i:]) for i in range(1, len(Q)))
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return all(_is_plain(part) for part in parts)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_calls_come_back_as_they_were_meant(data: st.DataObject) -> None:
    plain = st.dictionaries(keys, values, max_size=4).filter(_is_plain)
    calls = data.draw(st.lists(st.tuples(st.sampled_from(["f", "get_weather", "a.b-c"]), plain), max_size=3))
    thought, before = (
        data.draw(st.sampled_from(["", "Hm.", "a\n b"])),
        data.draw(st.sampled_from(["", "Well: ", "{x}"])),
    )
    text = f"{THOUGHT}{thought}{END_THOUGHT}{before}" + "".join(
        f"{CALL}call:{name}{written(arguments)}{END_CALL}" for name, arguments in calls
    )
    parsed = parse(cuts_of(data.draw, text))
    assert (parsed.reasoning, parsed.content) == (thought, before)
    assert [(made.name, json.loads(made.arguments)) for made in parsed.calls] == calls


ADVERSARIAL: dict[str, Callable[[int], str]] = {
    "text": lambda n: "a" * n,
    "blanks": lambda n: END_CALL + " " * n,
    "almost markers": lambda n: "<" * n,
    "markers": lambda n: "<|channel>" * (n // 10),
    "calls": lambda n: f"{CALL}call:f{{}}{END_CALL}" * (n // 32),
    "head": lambda n: CALL + "call:" * (n // 5),
    "string": lambda n: f"{CALL}call:f{{a:{Q}" + '{"[,' * (n // 4),
    "almost the end of a string": lambda n: f"{CALL}call:f{{a:{Q}" + '<|"|' * (n // 4),
    "strings": lambda n: f"{CALL}call:f{{a:" + Q * (n // 5),
    "brackets": lambda n: f"{CALL}call:f{{a:" + "[" * n,
    "objects": lambda n: f"{CALL}call:f{{" + "a:{" * (n // 3),
    "elements": lambda n: f"{CALL}call:f{{a:[" + "[]," * (n // 3),
    "commas": lambda n: f"{CALL}call:f{{a:[" + "," * n,
    "word": lambda n: f"{CALL}call:f{{a: x" + "{" * n,
    "key": lambda n: f"{CALL}call:f{{ a" + '"' * n,
    "backslashes": lambda n: f'{CALL}call:f{{a:"' + "\\" * n,
    "behind a string": lambda n: f"{CALL}call:f{{a:{Q}x{Q}" + " <" * (n // 2),
}


@pytest.fixture
def read_chars(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Characters that were searched or joined, counted in place of time."""
    count = [0]
    search, add = StopSet.search, TextCursor.add

    def counted_search(self: StopSet, text: str, pos: int) -> Any:
        match = search(self, text, pos)
        count[0] += (len(text) if match is None else match.end()) - pos
        return match

    def counted_add(self: TextCursor, text: str, *, is_last: bool) -> None:
        add(self, text, is_last=is_last)
        count[0] += len(self.peek(1 << 30))

    monkeypatch.setattr(StopSet, "search", counted_search)
    monkeypatch.setattr(TextCursor, "add", counted_add)
    return count


def _lines_run(work: Callable[[], object]) -> int:
    """Lines of Python that some work runs."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def _pieces(text: str, length: int) -> Iterator[str]:
    return (text[at : at + length] for at in range(0, len(text), length))


@pytest.mark.parametrize("kind", ADVERSARIAL)
@pytest.mark.parametrize("piece_len", [1, 7, 1 << 20])
def test_work_grows_with_the_length_of_the_text(kind: str, piece_len: int, read_chars: list[int]) -> None:
    steps = []
    for length in (2000, 4000):
        text = ADVERSARIAL[kind](length)
        read_chars[0] = 0
        lines = _lines_run(lambda text=text: parse(_pieces(text, piece_len)))
        steps.append(lines + read_chars[0])
    assert steps[1] < 2.1 * steps[0] + 500, steps
    # however short the pieces, no character is read more often than a marker is long, and joined as often again
    assert read_chars[0] <= len(text) * 2 * len(CALL) + 500


def test_a_megabyte_of_arguments(read_chars: list[int]) -> None:
    value = '{"[,]}\\ <|tool_call> é\n' * (1 << 20 >> 4)
    text = f"{CALL}call:f{{a:{Q}{value}{Q},b:{'[' * 1000}{']' * 1000}}}{END_CALL}"
    assert len(text) > 1 << 20
    for piece_len in (100, 1 << 16):
        read_chars[0] = 0
        (made,) = parse(_pieces(text, piece_len)).calls
        assert made == done(
            "f", '{"a":' + json.dumps(value, ensure_ascii=False) + ',"b":' + "[" * 1000 + "]" * 1000 + "}"
        )
        # each piece is joined once and searched once, but for the ends that could have become a marker
        assert read_chars[0] < 2.5 * len(text)
