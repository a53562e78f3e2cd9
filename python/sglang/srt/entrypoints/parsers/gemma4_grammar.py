"""Grammars of calls in Gemma 4's notation, in EBNF.

Of a tool's JSON schema the types, enumerations, required names and nested objects and lists are kept to; arguments come
in the order of their names, as the model writes them. Where a schema says something else, any value may stand.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sglang.srt.entrypoints.parsers.gemma4_arguments import CALL_CLOSE, CALL_OPEN, QUOTE

_MAX_DEPTH = 64
# what can stand anywhere; text has neither "<|" nor "|>", of which every marker has one. A repeated class of
# characters is one state, whose mask is known; a repeated choice would have to be looked into at every token
_COMMON_RULES = rf"""
string ::= {json.dumps(QUOTE)} text {json.dumps(QUOTE)}
text ::= [^<|]* (("<"+ [^<|] | "|"+ [^<|>]) [^<|]*)*
integer ::= "-"? ("0" | [1-9] [0-9]*)
number ::= integer ("." [0-9]+)? ([eE] [+-]? [0-9]+)?
boolean ::= "true" | "false"
value ::= string | number | boolean | "null" | object | list
object ::= "{{" (entry ("," entry)*)? "}}"
entry ::= key ":" value
key ::= [A-Za-z0-9_.$ -]+
list ::= "[" (value ("," value)*)? "]"
"""
_RULE_OF_TYPE: Mapping[str, str] = {
    "string": "string",
    "integer": "integer",
    "number": "number",
    "boolean": "boolean",
    "null": '"null"',
    "object": "object",
    "array": "list",
}


def make_call_grammar(tools: Sequence[Mapping[str, Any]], *, parallel: bool) -> str:
    """EBNF of an answer that is one call of one of the tools, or with ``parallel`` at least one."""
    rules = _Rules()
    calls = []
    for tool in tools:
        function = tool["function"]
        head = json.dumps(f"{CALL_OPEN}call:{function['name']}", ensure_ascii=False)
        calls.append(f"{head} {rules.value(function['parameters'], 0)} {json.dumps(CALL_CLOSE)}")
    root = "root ::= call+" if parallel else "root ::= call"
    return "\n".join((root, "call ::= " + " | ".join(calls), *rules.lines)) + _COMMON_RULES


class _Rules:
    """Rules of one grammar as they are made."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def value(self, schema: Any, depth: int) -> str:
        """An expression for the values of a schema."""
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return "value"
        if isinstance(schema.get("enum"), Sequence) and schema["enum"]:
            return self._any_of([_literal(item) for item in schema["enum"]])
        if "const" in schema:
            return _literal(schema["const"])
        for name in ("anyOf", "oneOf"):
            if isinstance(schema.get(name), Sequence) and schema[name]:
                return self._any_of([self.value(item, depth + 1) for item in schema[name]])
        kinds = schema.get("type")
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not isinstance(kinds, Sequence) or not kinds or not all(kind in _RULE_OF_TYPE for kind in kinds):
            return "value"
        choices = [self._typed(kind, schema, depth) for kind in kinds]
        return self._any_of([*choices, '"null"'] if schema.get("nullable") is True else choices)

    def _typed(self, kind: str, schema: Mapping[str, Any], depth: int) -> str:
        if kind == "object" and isinstance(schema.get("properties"), Mapping):
            # an object without properties is one that may have any, unless the schema forbids it
            if schema["properties"] or schema.get("additionalProperties") is False or depth == 0:
                return self._object(schema, depth)
        if kind == "array" and isinstance(schema.get("items"), Mapping):
            item = self.value(schema["items"], depth + 1)
            return self._add(f'"[" ({item} ("," {item})*)? "]"')
        return _RULE_OF_TYPE[kind]

    def _object(self, schema: Mapping[str, Any], depth: int) -> str:
        """Entries in the order of their names. From the last to the first: what may follow where an entry has come
        before, and where none has."""
        required = schema.get("required")
        required = required if isinstance(required, Sequence) else ()
        behind = first = '""'
        for name, part in sorted(schema["properties"].items(), reverse=True):
            entry = f"{json.dumps(name + ':', ensure_ascii=False)} {self.value(part, depth + 1)} {behind}"
            if name in required:
                behind, first = self._add(f'"," {entry}'), self._add(entry)
            else:
                behind, first = self._add(f'("," {entry}) | {behind}'), self._add(f"({entry}) | {first}")
        return self._add(f'"{{" {first} "}}"')

    def _any_of(self, choices: Sequence[str]) -> str:
        return choices[0] if len(choices) == 1 else self._add(" | ".join(dict.fromkeys(choices)))

    def _add(self, body: str) -> str:
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name} ::= {body}")
        return name


def _literal(value: Any) -> str:
    """One value in the model's notation, as a terminal."""
    return json.dumps(_notation(value), ensure_ascii=False)


def _notation(value: Any) -> str:
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_notation(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_notation, value)) + "]"
    return json.dumps(value)
