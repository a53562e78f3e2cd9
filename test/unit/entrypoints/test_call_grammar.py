"""Grammars of calls: what they take is what the parser reads, and it fits the tool's schema."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest

from sglang.srt.entrypoints.parsers.base import join_events
from sglang.srt.entrypoints.parsers.gemma4 import Gemma4Format, Gemma4Parser
from sglang.srt.entrypoints.parsers.gemma4_grammar import make_call_grammar

xgrammar = pytest.importorskip("xgrammar")

Q = '<|"|>'
TEXT, INT = {"type": "string"}, {"type": "integer"}


def accepts(grammar: str, text: str) -> bool:
    return bool(xgrammar.testing._is_grammar_accept_string(xgrammar.Grammar.from_ebnf(grammar), text))


def tool(name: str, properties: dict[str, Any], required: list[str] | None = None) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": required or []}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def call(name: str, arguments: str) -> str:
    return f"<|tool_call>call:{name}{{{arguments}}}<tool_call|>"


# schema of the argument "a" -> what may stand there, and what may not
VALUES: list[tuple[Any, list[str], list[str]]] = [
    (
        TEXT,
        [f"{Q}{Q}", f'{Q}a "b" {{,}}:\n<b> é << 1 || x{Q}'],
        ["a", f"{Q}a", f"{Q}<|x{Q}", f"{Q}<x|>{Q}", f"{Q}a||>{Q}", f"{Q}<<|x{Q}", "1", '"a"'],
    ),
    (INT, ["0", "-12", "7"], ["01", "1.5", f"{Q}1{Q}", "", "-"]),
    ({"type": "number"}, ["0", "-1.25", "1e9", "2E-3"], ["1.", ".5", "true"]),
    ({"type": "boolean"}, ["true", "false"], ["True", "1"]),
    ({"type": ["string", "null"]}, [f"{Q}x{Q}", "null"], ["1"]),
    ({"type": "integer", "nullable": True}, ["1", "null"], ["true"]),
    ({"enum": ["red", 3, None, ["x"]]}, [f"{Q}red{Q}", "3", "null", f"[{Q}x{Q}]"], [f"{Q}blue{Q}", "red", "4"]),
    ({"const": {"b": "y", "a": 1}}, [f"{{a:1,b:{Q}y{Q}}}"], ["{a:1}"]),
    ({"anyOf": [INT, {"type": "array", "items": INT}]}, ["1", "[]", "[1,2]"], [f"[{Q}1{Q}]", "[1,]"]),
    ({"type": "array"}, ["[]", f"[1,{Q}x{Q},{{b:[]}}]"], ["[", "1"]),
    ({"type": "object"}, ["{}", "{b:1,c d:{e:null}}"], ["{b}", "{:1}"]),
    (
        {"type": "object", "properties": {"b": INT, "c": TEXT}, "required": ["b"]},
        ["{b:1}", f"{{b:1,c:{Q}{Q}}}"],
        ["{}"],
    ),
    ({"type": "object", "properties": {}, "additionalProperties": False}, ["{}"], ["{b:1}"]),
    ({"type": "object", "properties": {}}, ["{}", "{b:1}"], []),
    ({}, ["1", f"{Q}x{Q}", "[{b:null}]"], ["", "x"]),
    ({"$ref": "#/x"}, ["1", f"{Q}x{Q}"], ["x"]),
    (True, ["1"], ["x"]),
]


@pytest.mark.parametrize("schema, good, bad", VALUES, ids=[json.dumps(schema) for schema, _, _ in VALUES])
def test_values(schema: Any, good: list[str], bad: list[str]) -> None:
    grammar = make_call_grammar([tool("f", {"a": schema}, ["a"])], parallel=False)
    assert [value for value in good if not accepts(grammar, call("f", f"a:{value}"))] == []
    assert [value for value in bad if accepts(grammar, call("f", f"a:{value}"))] == []


def test_strings_are_all_texts_without_a_part_of_a_marker() -> None:
    grammar = xgrammar.Grammar.from_ebnf(make_call_grammar([tool("f", {"a": TEXT}, ["a"])], parallel=False))
    for length in range(6):
        for chars in itertools.product("a<|>", repeat=length):
            text = "".join(chars)
            # what is open at the end would join the quote
            expected = re.fullmatch(r"([^<|]|<+[^<|]|\|+[^<|>])*", text) is not None
            taken = xgrammar.testing._is_grammar_accept_string(grammar, call("f", f"a:{Q}{text}{Q}"))
            assert taken is expected, text


def test_names_come_in_order_and_required_ones_always() -> None:
    grammar = make_call_grammar([tool("f", {"c": INT, "a": INT, "b": INT, "d": INT}, ["b", "d"])], parallel=False)
    for names in ("abcd", "bcd", "abd", "bd"):
        assert accepts(grammar, call("f", ",".join(f"{name}:1" for name in names))), names
    for names in ("", "b", "d", "abc", "acd", "ba", "bdd", "abcde"):
        assert not accepts(grammar, call("f", ",".join(f"{name}:1" for name in names))), names
    assert not accepts(grammar, call("f", "b:1,d:1,")) and not accepts(grammar, call("f", ",b:1,d:1"))


def test_a_tool_without_parameters() -> None:
    grammar = make_call_grammar([tool("f", {})], parallel=False)
    assert accepts(grammar, call("f", "")) and not accepts(grammar, call("f", "a:1"))


def test_one_call_or_several() -> None:
    tools = [tool("f", {}), tool("g", {"a": INT}, ["a"])]
    both = call("f", "") + call("g", "a:1")
    one, several = (make_call_grammar(tools, parallel=parallel) for parallel in (False, True))
    assert accepts(one, call("g", "a:1")) and not accepts(one, both)
    assert accepts(several, call("f", "")) and accepts(several, both)
    for grammar in (one, several):
        for text in ("", "text", call("h", ""), call("g", ""), call("f", "") + "text", "<|tool_call>call:f{}"):
            assert not accepts(grammar, text), text


def test_odd_names_and_deep_schemas_make_a_grammar() -> None:
    schema: dict[str, Any] = INT
    for _ in range(200):
        schema = {"type": "array", "items": schema}
    properties = {'quote "x" \\': TEXT, "é": TEXT, "deep": schema}
    grammar = Gemma4Format().call_grammar([tool("f", properties)], parallel=True)
    assert accepts(grammar, call("f", f'quote "x" \\:{Q}a{Q},é:{Q}b{Q}'))


def test_the_parser_reads_what_the_grammar_takes() -> None:
    for _, good, _ in VALUES:
        for value in good:
            parser = Gemma4Parser(reasoning=False, tools=True)
            parsed = join_events([*parser.feed(call("f", f"a:{value}")), *parser.finish()])
            (made,) = parsed.calls
            assert made.is_complete and parsed.content == "" and list(json.loads(made.arguments)) == ["a"]
