"""Grammars by xgrammar on the shipped tokenizer."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

from sglang.srt.constrained.base_grammar import allocate_masks
from sglang.srt.constrained.xgrammar_backend import XGrammarBackend
from sglang.srt.server_args_slices import GrammarConfig
from sglang.srt.utils.embedded import EMBEDDED_MODELS
from sglang.srt.utils.hf_transformers.tokenizer import load_tokenizer

pytest.importorskip("xgrammar")

VOCAB, EOS, TURN_END, CALL = 4096, 1, 6, 12
TOKENIZER = load_tokenizer(EMBEDDED_MODELS["tiny-gemma4"].target, trust_remote_code=False)
PERSON = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a", "b"]}


def backend(*, any_whitespace: bool = False, most: int | None = None, vocab: int = VOCAB) -> XGrammarBackend:
    return XGrammarBackend(TOKENIZER, vocab, (EOS, TURN_END), GrammarConfig("xgrammar", any_whitespace, most))


COMPACT = backend()


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def matches(grammar: Any, text: str) -> bool:
    """Whether a text and the end are accepted, with a mask that allows each token as it comes."""
    state = grammar.fork()
    for token in (*ids(text), TURN_END):
        masks = allocate_masks(1, VOCAB)
        state.fill_mask(masks, 0)
        is_allowed = bool(int(masks[0, token // 32]) >> (token % 32) & 1)
        accepted = state.accept(token)
        assert accepted == is_allowed
        if not accepted:
            return False
    return state.is_terminated


def test_schemas_are_compact_by_default() -> None:
    grammar = COMPACT.compile("json_schema", json.dumps(PERSON))
    assert matches(grammar, json.dumps({"a": 5, "b": "x y\u00e9\U0001f600"}, ensure_ascii=False))
    assert matches(grammar, json.dumps({"a": -10, "b": '"\\\n'}))
    for text in (
        '{"a":5,"b":"x"}',
        '{ "a": 5, "b": "x"}',
        '{"a": 5, "b": "x", "c": 1}',
        '{"a": 5}',
        '{"b": "x", "a": 5}',
    ):
        assert not matches(grammar, text), text


@pytest.mark.parametrize("most", [None, 2])
def test_whitespace_when_it_is_asked_for(most: int | None) -> None:
    grammar = backend(any_whitespace=True, most=most).compile("json_schema", json.dumps(PERSON))
    assert matches(grammar, '{"a":5,"b":"x"}') and matches(grammar, '{\n "a": 5,\n "b": "x"\n}')
    assert matches(grammar, '{\n\n\n"a": 5, "b": "x"}') == (most is None)


def test_any_object() -> None:
    grammar = COMPACT.compile("json_schema", '{"type": "object"}')
    assert matches(grammar, "{}") and matches(grammar, '{"x": {"y": [1, null, true, "z"]}}')
    assert not matches(grammar, "[]")


def test_regular_expressions_match_whole_answers() -> None:
    grammar = COMPACT.compile("regex", r"(yes|no)[.!]?")
    assert all(matches(grammar, text) for text in ("yes", "no.", "yes!"))
    assert not any(matches(grammar, text) for text in ("yes no", "", "maybe", "yes!!"))


def test_ebnf() -> None:
    grammar = COMPACT.compile("ebnf", 'root ::= term ("+" term)*\nterm ::= [0-9]+')
    assert matches(grammar, "1+22+3") and not matches(grammar, "1+") and not matches(grammar, "+")


TAGS = [
    {
        "type": "structural_tag",
        "format": {
            "type": "triggered_tags",
            "triggers": ["<|tool_call>"],
            "tags": [
                {
                    "begin": "<|tool_call>call:add",
                    "content": {"type": "json_schema", "json_schema": PERSON},
                    "end": "<tool_call|>",
                }
            ],
        },
    },
    {
        "type": "structural_tag",
        "structures": [{"begin": "<|tool_call>call:add", "schema": PERSON, "end": "<tool_call|>"}],
        "triggers": ["<|tool_call>"],
    },
]


@pytest.mark.parametrize("tag", TAGS, ids=["format", "structures"])
def test_structural_tags(tag: dict[str, Any]) -> None:
    grammar = COMPACT.compile("structural_tag", json.dumps(tag))
    call = '<|tool_call>call:add{"a": 5, "b": "x"}<tool_call|>'
    assert CALL in ids(call), "the marker is one token"
    assert matches(grammar, "plain text") and matches(grammar, f"I say {call} and {call}")
    assert not matches(grammar, '<|tool_call>call:add{"a": "5"}<tool_call|>') and not matches(
        grammar, "<|tool_call>call:sub"
    )
    assert not matches(grammar, '<|tool_call>call:add{  "a": 5, "b": "x"}<tool_call|>'), "white space is bounded"


def test_special_tokens_are_no_text_unless_they_are_spelled_out() -> None:
    special = [i for i, token in TOKENIZER.added_tokens_decoder.items() if token.special and i not in (EOS, TURN_END)]
    masks = allocate_masks(1, VOCAB)
    inside = COMPACT.compile("json_schema", '{"type": "string"}')
    assert inside.accept(ids('"')[0])
    inside.fill_mask(masks, 0)
    assert not any(int(masks[0, t // 32]) >> (t % 32) & 1 for t in special)
    assert not any(inside.accept(t) for t in (*special, EOS))
    spelled = COMPACT.compile("ebnf", 'root ::= "<|tool_call>" [a-z]+')
    assert spelled.accept(CALL) and not spelled.accept(CALL)


def test_ids_behind_the_tokenizer_are_never_allowed() -> None:
    grammar = backend(vocab=VOCAB + 70).compile("regex", ".*")
    masks = allocate_masks(1, VOCAB + 70)
    assert masks.shape == (1, 131)
    grammar.fill_mask(masks, 0)
    assert torch.equal(masks[0, 128:130], torch.zeros(2, dtype=torch.int32))
    assert int(masks[0, 130]) & ((1 << 6) - 1) == 0


BAD = [
    ("json_schema", '{"type": 5}', "Type should be a string"),
    ("json_schema", "{bad", "Expecting property name"),
    ("json_schema", '{"$ref": "#/nowhere"}', "Cannot find field"),
    ("json_schema", "[]", "object or bool"),
    ("json_schema", "[" * 100_000, "recursion"),
    ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 1}', "minimum greater than maximum"),
    ("regex", "(a", "parenthesis is not closed"),
    ("regex", "(" * 100_000 + ")" * 100_000, "exceeded the maximum"),
    ("regex", r"(?=a)b", "not supported"),
    ("ebnf", "root ::= foo", 'Rule "foo" is not defined'),
    ("ebnf", "other ::= [a]", "root"),
    ("structural_tag", "5", ""),
    ("structural_tag", '{"structures": [5]}', ""),
    ("structural_tag", '{"type": "structural_tag", "structures": [{"schema": {}}]}', "begin"),
]


@pytest.mark.parametrize("kind, text, reason", BAD, ids=[f"{kind}-{text:.20}" for kind, text, _ in BAD])
def test_what_is_no_grammar_is_one_sentence(kind: Any, text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^{kind} cannot be used: .*{re.escape(reason)}") as caught:
        COMPACT.compile(kind, text)
    message = str(caught.value)
    assert len(message) < 400 and "/project/" not in message and "Check failed" not in message
    assert "\n" not in message
