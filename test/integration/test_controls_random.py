"""Requests with any controls at all: the same alone, in a batch, with chains of drafts and with trees."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sglang
from fixtures.logit_processors import FailsAt, NoRepeatAfter
from fixtures.scheduler_driver import SchedulerDriver
from fixtures.schemas import SCHEMAS
from sglang.srt.managers.detokenizer_manager import IncrementalDetokenizer, TokenPieces
from sglang.srt.managers.grammar_manager import make_grammar_manager
from sglang.srt.managers.io_struct import TokenOut
from sglang.srt.sampling.logprobs import LogprobOptions
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args_slices import GrammarConfig
from sglang.srt.utils.embedded import EmbeddedModel
from sglang.srt.utils.hf_transformers.tokenizer import load_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

TAG = json.dumps(
    {
        "type": "structural_tag",
        "structures": [{"begin": "1", "schema": {"type": "integer", "maximum": 99, "minimum": 0}, "end": ";"}],
        "triggers": ["1"],
    }
)
FLAGS: dict[str, Any] = {"enable_custom_logit_processor": True, "enable_return_hidden_states": True}
QUESTIONS = ("Count from 1 to 20.", "Tell me a story.", "Say fox 9 times.", "What is 17 + 8?", "Spell the word river.")
EXAMPLES = settings(
    max_examples=10, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@dataclass(frozen=True, slots=True)
class Wish:
    """One request: which of the prompts, its controls, and further fields of its message."""

    prompt: int
    params: SamplingParams
    fields: dict[str, Any]


def tenths(low: int, high: int) -> st.SearchStrategy[float]:
    """Not ``floats``: those want subnormal numbers, which the compiled operators have switched off."""
    return st.integers(low, high).map(lambda number: number / 10)


def controls(low: int, high: int) -> st.SearchStrategy[dict[str, Any]]:
    """Controls by name, each given or not; token ids from ``low`` to ``high``."""
    ids = st.integers(low, high - 1)
    return st.fixed_dictionaries(
        {"temperature": st.sampled_from([0.0, 0.0, 0.8, 1.5]), "sampling_seed": st.integers(0, 99)},
        optional={
            "top_k": st.integers(2, 40),
            "top_p": tenths(3, 10),
            "min_p": tenths(0, 2),
            "repetition_penalty": tenths(7, 15),
            "frequency_penalty": tenths(-10, 20),
            "presence_penalty": tenths(-10, 20),
            "min_new_tokens": st.integers(0, 12),
            "logit_bias": st.dictionaries(ids, tenths(-1000, 80), max_size=6).map(lambda bias: tuple(bias.items())),
            "stop": st.sampled_from([(" 7",), ("e",), (", 1", "x"), ("zzz",)]),
            "stop_regex": st.sampled_from([(r"\d\d",), ("[aeiou]{2}", "q+"), (r"(?:\w\W)+5",)]),
            "stop_token_ids": st.lists(ids, min_size=1, max_size=9).map(tuple),
            "ignore_eos": st.booleans(),
            "max_thinking_tokens": st.integers(0, 6),
            "skip_special_tokens": st.booleans(),
            "speculative_num_steps": st.integers(0, 3),
        },
    )  # fmt: skip


GRAMMARS: tuple[dict[str, str], ...] = (
    {"regex": "[a-c ]{3,9}"},
    {"ebnf": 'root ::= "x" [0-9]{2,4} "y"'},
    {"json_schema": '{"enum": ["yes", "no", [1, 2]]}'},
    {"json_schema": json.dumps(SCHEMAS[3])},
    {"structural_tag": TAG},
)


def wishes(num_prompts: int, low: int, high: int, *, thoughts: bool) -> st.SearchStrategy[list[Wish]]:
    message = st.fixed_dictionaries(
        {},
        optional={
            "logprobs": st.builds(LogprobOptions, st.sampled_from([-1, 0, 3]), st.integers(0, 2)),
            "return_hidden_states": st.booleans(),
            "custom_logit_processor": st.just(NoRepeatAfter.to_str()),
        },
    )

    def make(prompt: int, values: dict[str, Any], fields: dict[str, Any], length: int, grammar: dict[str, str]) -> Wish:
        if not thoughts:
            values.pop("max_thinking_tokens", None)
        length = max(length, values.get("min_new_tokens", 0))
        params = SamplingParams(max_new_tokens=length, custom_params={"window": 2}, **values, **grammar)
        return Wish(prompt, params, fields)

    numbers, grammars = st.integers(0, num_prompts - 1), st.sampled_from([{}, {}, *GRAMMARS] if thoughts else [{}])
    one = st.builds(make, numbers, controls(low, high), message, st.integers(1, 24), grammars)
    return st.lists(one, min_size=2, max_size=4)


class Engines:
    """Plain decode and the ways to speculate, over one pair; made once, as they take a while to make."""

    def __init__(self, target: Path, assistant: Path, tokenizer: Path, **options: Any) -> None:
        loaded = load_tokenizer(tokenizer, trust_remote_code=False)
        self.pieces = TokenPieces(loaded)
        common = {"pieces": self.pieces, **FLAGS, **options}
        self.plain = SchedulerDriver(target, None, 0, **common)
        self.others = {
            "chain": SchedulerDriver(target, assistant, 4, page_size=4, chunked_prefill_size=12, **common),
            "mixed": SchedulerDriver(target, assistant, 3, enable_mixed_chunk=True, chunked_prefill_size=8, **common),
            "tree": SchedulerDriver(
                target, assistant, 3, **common, speculative_eagle_topk=2, speculative_num_draft_tokens=7
            ),
        }
        config = GrammarConfig("xgrammar", any_whitespace=False, max_whitespace=None)
        for driver in (self.plain, *self.others.values()):
            driver.scheduler.grammars = make_grammar_manager(config, loaded, driver.worker.describe())

    def check(self, prompts: Sequence[Sequence[int]], asked: Sequence[Wish]) -> None:
        def run(driver: SchedulerDriver, some: Sequence[Wish], arrivals: list[int] | None = None) -> list[TokenOut]:
            return driver.run(
                [prompts[w.prompt] for w in some],
                [w.params for w in some],
                wishes=[w.fields for w in some],
                arrivals=arrivals,
            )

        alone = [run(self.plain, [wish])[0] for wish in asked]
        self.compare("batch", run(self.plain, asked, arrivals=list(range(len(asked)))), alone, asked)
        for name, driver in self.others.items():
            arrivals = [3 * i for i in range(len(asked))] if name == "mixed" else None
            self.compare(name, run(driver, asked, arrivals), alone, asked)

    def compare(self, name: str, outs: list[TokenOut], alone: list[TokenOut], asked: Sequence[Wish]) -> None:
        for out, ref, wish in zip(outs, alone, asked, strict=True):
            assert (out.token_ids, out.finish_reason) == (ref.token_ids, ref.finish_reason), (name, wish)
            num = len(out.token_ids)
            assert len(out.logprobs) == (num if "logprobs" in wish.fields else 0)
            assert len(out.hidden_states) == (num if wish.fields.get("return_hidden_states") else 0)
            for a, b in zip((*out.prompt_logprobs, *out.logprobs), (*ref.prompt_logprobs, *ref.logprobs), strict=True):
                assert a.token_id == b.token_id and len(a.top) == len(b.top)
                assert a.logprob == b.logprob or a.logprob == pytest.approx(b.logprob, abs=1e-4, rel=1e-4)
                for x, y in zip(a.top, b.top, strict=True):
                    assert x[0] == pytest.approx(y[0], abs=1e-4, rel=1e-4)
            self.check_text(out, wish.params)

    def check_text(self, out: TokenOut, params: SamplingParams) -> None:
        """The text of a stream, token by token, is the text of the whole."""
        at_once = IncrementalDetokenizer(self.pieces, params).feed(out.token_ids, out.finish_reason)
        stream = IncrementalDetokenizer(self.pieces, params)
        parts = [stream.feed((token,)) for token in out.token_ids[:-1]]
        assert "".join(parts) + stream.feed(out.token_ids[-1:], out.finish_reason) == at_once


@pytest.fixture(scope="module")
def trained(trained_pair: EmbeddedModel) -> Engines:
    return Engines(trained_pair.target, trained_pair.assistant, trained_pair.target)


@pytest.fixture(scope="module")
def random_weights(tiny_checkpoints: Path, byte_tokenizer: Path) -> Engines:
    return Engines(tiny_checkpoints / "eseries", tiny_checkpoints / "eseries-assistant", byte_tokenizer)


@pytest.fixture(scope="module")
def questions(trained_pair: EmbeddedModel) -> list[list[int]]:
    tokenizer = load_tokenizer(trained_pair.target, trust_remote_code=False)
    return [
        list(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, enable_thinking=thinking
            )["input_ids"]
        )
        for text in QUESTIONS
        for thinking in (False, True)
    ]


@EXAMPLES
@given(asked=wishes(2 * len(QUESTIONS), 5, 700, thoughts=True))
def test_trained_pair(trained: Engines, questions: list[list[int]], asked: list[Wish]) -> None:
    trained.check(questions, asked)


@EXAMPLES
@given(asked=wishes(4, 4, 260, thoughts=False))
def test_random_weights(random_weights: Engines, asked: list[Wish]) -> None:
    random_weights.check([[2, *range(5, 5 + n)] for n in (1, 9, 22, 14)], asked)


HOT: dict[str, Any] = {"temperature": 2.0, "sampling_seed": 4}
# by the name of a control: its values, and what it needs beside (which alone is what it must differ from)
ACTING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "temperature": ({"temperature": 1.4}, {"sampling_seed": 4}),
    "sampling_seed": ({"sampling_seed": 5}, HOT),
    "top_k": ({"top_k": 3}, HOT),
    "top_p": ({"top_p": 0.6}, HOT),
    "min_p": ({"min_p": 0.3}, HOT),
    "repetition_penalty": ({"repetition_penalty": 1.3}, HOT),
    "frequency_penalty": ({"frequency_penalty": 2.0}, {}),
    "presence_penalty": ({"presence_penalty": 2.0}, HOT),
    "logit_bias": ({"logit_bias": ((292, -100.0), (608, 3.0), (1166, -100.0))}, {}),
    "min_new_tokens": ({"min_new_tokens": 31}, {}),
    "max_new_tokens": ({"max_new_tokens": 7}, {}),
    "stop": ({"stop": (" 7", "o")}, {}),
    "stop_regex": ({"stop_regex": (r"1\D+2", "o")}, {}),
    "stop_token_ids": ({"stop_token_ids": (298, 608, 1166)}, {}),
    "ignore_eos": ({"ignore_eos": True}, {"max_new_tokens": 60}),
    "max_thinking_tokens": ({"max_thinking_tokens": 3}, {}),
    "custom_logit_processor": ({}, {"custom_params": {"window": 4}}),
    "regex": ({"regex": "[a-c ]{3,9}"}, {}),
    "json_schema": ({"json_schema": '{"enum": ["yes", "no", [1, 2]]}'}, {}),
    "ebnf": ({"ebnf": 'root ::= "x" [0-9]{2,4} "y"'}, {}),
    "structural_tag": ({"structural_tag": TAG}, {}),
    "all penalties": (
        {
            "repetition_penalty": 1.2,
            "frequency_penalty": 0.6,
            "presence_penalty": -0.7,
            "logit_bias": ((300, 4.0),),
            "min_new_tokens": 12,
        },
        HOT,
    ),
}
# what changes no token, and is compared beside the tokens
ASKED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "return_logprob": ({}, {"logprobs": LogprobOptions()}),
    "logprob_start_len": ({}, {"logprobs": LogprobOptions(start_len=0)}),
    "top_logprobs_num": (HOT, {"logprobs": LogprobOptions(start_len=2, top_num=4)}),
    "token_ids_logprob": (HOT, {"logprobs": LogprobOptions(token_ids=(7, 300))}),
    "return_hidden_states": ({}, {"return_hidden_states": True}),
    "speculative": ({"speculative_num_steps": 0}, {}),
    "speculative_num_steps": ({**HOT, "speculative_num_steps": 2}, {}),
    "no_stop_trim": ({"stop": (" 7",), "no_stop_trim": True}, {}),
    "skip_special_tokens": ({"skip_special_tokens": False}, {}),
}


def one_by_one(values: dict[str, Any], fields: dict[str, Any]) -> list[Wish]:
    return [Wish(i, SamplingParams(**{"temperature": 0.0, "max_new_tokens": 32, **values}), fields) for i in (0, 3, 6)]


@pytest.mark.parametrize("name", ACTING)
def test_each_control_acts_and_is_the_same_on_and_off(name: str, trained: Engines, questions: list[list[int]]) -> None:
    values, beside = ACTING[name]
    fields = {name: NoRepeatAfter.to_str()} if name == "custom_logit_processor" else {}
    asked = one_by_one({**beside, **values}, fields)
    trained.check(questions, asked)
    bare = one_by_one(beside, {})
    prompts = [questions[wish.prompt] for wish in asked]
    with_it = trained.plain.tokens(prompts, [w.params for w in asked], wishes=[w.fields for w in asked])
    assert with_it != trained.plain.tokens(prompts, [w.params for w in bare]), "the control has no effect"


@pytest.mark.parametrize("name", ASKED)
def test_each_thing_asked_for_is_the_same_on_and_off(name: str, trained: Engines, questions: list[list[int]]) -> None:
    asked = one_by_one(*ASKED[name])
    trained.check(questions, asked)
    prompts = [questions[wish.prompt] for wish in asked]
    bare = [replace(wish.params, speculative_num_steps=None) for wish in asked]
    assert trained.plain.tokens(prompts, bare) == [
        out.token_ids
        for out in trained.others["chain"].run(prompts, [w.params for w in asked], wishes=[w.fields for w in asked])
    ], "asking changes no token"


def test_every_control_of_a_request_has_a_case() -> None:
    # the others say how ids become text, or are arguments of a control
    elsewhere = {"n", "custom_params", "spaces_between_special_tokens"}
    cases = {*ACTING, *ASKED}
    missing = {f.name for f in fields(SamplingParams)} - cases - elsewhere
    missing |= {f.name for f in fields(LogprobOptions)} - {"start_len", "top_num", "token_ids"}
    assert not missing, f"on = off is not shown for {sorted(missing)}"


def test_samples_of_one_prompt_are_the_same_on_and_off() -> None:
    """``n``, and whole replies with their texts, through the engine as users have it."""
    prompts = ["Count from 1 to 12.", "Tell me a story."]
    params = {"n": 3, "temperature": 1.0, "sampling_seed": 8, "max_new_tokens": 24, "stop": ["9"], "ignore_eos": True}
    replies = []
    for options in ({}, {"speculative_algorithm": "FROZEN_KV_MTP", "speculative_num_steps": 4}):
        with sglang.Engine(model_path="tiny-gemma4", log_level="warning", **options) as engine:
            outs = engine.generate(prompts, params, return_logprob=True, top_logprobs_num=2)
            alone = [engine.generate(prompts[0], {**params, "n": 1, "sampling_seed": 8 + i}) for i in range(3)]
        assert [out["text"] for out in alone] == [out["text"] for out in outs[:3]]
        replies.append(outs)
    assert len({out["text"] for out in replies[0]}) > 3, "samples differ"
    for off, on in zip(*replies, strict=True):
        assert (on["text"], on["output_ids"]) == (off["text"], off["output_ids"])
        names = ("finish_reason", "prompt_tokens", "completion_tokens", "cached_tokens")
        assert [on["meta_info"][name] for name in names] == [off["meta_info"][name] for name in names]
        assert on["meta_info"]["spec_verify_ct"] > 0 and "spec_verify_ct" not in off["meta_info"]
        for mine, its in zip(*(out["meta_info"]["output_token_logprobs"] for out in (on, off)), strict=True):
            assert mine[0] == pytest.approx(its[0], abs=1e-4) and mine[1:] == its[1:]


@pytest.mark.parametrize("mode", ["plain", "chain", "mixed", "tree"])
@pytest.mark.parametrize("length", [0, 1, 5])
def test_a_failing_processor_ends_its_own_request_only(
    mode: str, length: int, trained: Engines, questions: list[list[int]]
) -> None:
    driver = trained.plain if mode == "plain" else trained.others[mode]
    params = [SamplingParams(temperature=0.0, max_new_tokens=30, custom_params={"length": length})] * 3
    alone = trained.plain.tokens(questions[:3], params)
    outs = driver.run(
        questions[:3],
        params,
        wishes=[{}, {"custom_logit_processor": FailsAt.to_str()}, {"logprobs": LogprobOptions(0)}],
    )
    assert [outs[0].token_ids, outs[2].token_ids] == [alone[0], alone[2]]
    assert len(outs[2].logprobs) == len(alone[2])
    reason = outs[1].finish_reason
    assert reason is not None and (reason.type, reason.status) == ("abort", 400)
    assert "ZeroDivisionError" in (reason.message or "") and outs[1].token_ids == alone[1][: len(outs[1].token_ids)]
