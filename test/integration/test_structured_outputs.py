"""Answers that follow a grammar, from the shipped pair: valid at every load, the same with and without speculation."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

import sglang
from fixtures.scheduler_driver import SchedulerDriver
from fixtures.schemas import SCHEMAS, conforms
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.grammar_manager import make_grammar_manager
from sglang.srt.managers.io_struct import AbortReq, BatchTokenOut, TokenizedGenerateReqInput, TokenOut
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args_slices import GrammarConfig
from sglang.srt.utils.embedded import EMBEDDED_MODELS
from sglang.srt.utils.hf_transformers.tokenizer import load_tokenizer

pytest.importorskip("xgrammar")
pytestmark = pytest.mark.usefixtures("one_thread")

PAIR = EMBEDDED_MODELS["tiny-gemma4"]
TOKENIZER = load_tokenizer(PAIR.target, trust_remote_code=False)
END, THOUGHT_START, THOUGHT_END = 6, 7, 8
QUESTIONS = ("Count from 1 to 9.", "Tell me a story.", "Describe a person.", "What is 12 + 7?", "Spell the word river.")


def prompt(question: str, *, thinking: bool = False) -> list[int]:
    turn = [{"role": "user", "content": question}]
    ids: list[int] = TOKENIZER.apply_chat_template(
        turn, add_generation_prompt=True, enable_thinking=thinking, return_dict=False
    )
    return ids


def make_driver(num_steps: int, **kwargs: object) -> SchedulerDriver:
    driver = SchedulerDriver(PAIR.target, PAIR.assistant, num_steps, **kwargs)
    config = GrammarConfig("xgrammar", any_whitespace=False, max_whitespace=None)
    driver.scheduler.grammars = make_grammar_manager(config, TOKENIZER, driver.worker.describe())
    return driver


@pytest.fixture(scope="module")
def drivers() -> dict[int, SchedulerDriver]:
    """By number of draft steps; 0 is plain decode."""
    return {steps: make_driver(steps, max_total_tokens=1 << 16, max_running_requests=200) for steps in (0, 1, 4)}


def same_everywhere(
    drivers: dict[int, SchedulerDriver], prompts: list[list[int]], params: list[SamplingParams]
) -> list[TokenOut]:
    """Replies with drafts, after a check that they are those without."""
    plain = drivers[0].run(prompts, params)
    for steps in sorted(drivers)[1:]:
        drafted = drivers[steps].run(prompts, params)
        assert [out.token_ids for out in drafted] == [out.token_ids for out in plain], f"{steps=}"
        assert [out.finish_reason for out in drafted] == [out.finish_reason for out in plain]
    assert sum(out.spec.accepted_tokens for out in drafted if out.spec is not None) > 0
    return drafted


def text_of(out: TokenOut) -> str:
    """The answer behind its thought."""
    ids = list(out.token_ids)
    if THOUGHT_END in ids:
        assert ids[0] == THOUGHT_START and ids.count(THOUGHT_END) == 1
        ids = ids[ids.index(THOUGHT_END) + 1 :]
    text: str = TOKENIZER.decode(ids, skip_special_tokens=True)
    return text


def controls(seed: int) -> dict[str, Any]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "sampling_seed": seed},
        {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "sampling_seed": seed},
        {"temperature": 1.5, "min_p": 0.02, "repetition_penalty": 1.2, "sampling_seed": seed},
        {"temperature": 0.0, "min_new_tokens": 50, "frequency_penalty": 0.3},
    ]
    return kinds[seed % len(kinds)]


@pytest.mark.slow
def test_two_hundred_requests_of_ten_schemas_at_once(drivers: dict[int, SchedulerDriver]) -> None:
    """Every schema twenty times, with and without a thought, under all kinds of sampling: all valid, none cut off."""
    cases = [(schema, i % 2 == 1) for schema in SCHEMAS for i in range(20)]
    prompts = [prompt(QUESTIONS[i % len(QUESTIONS)], thinking=thinking) for i, (_, thinking) in enumerate(cases)]
    params = [
        SamplingParams(json_schema=json.dumps(schema), max_new_tokens=300, **controls(i // 2))
        for i, (schema, _) in enumerate(cases)
    ]
    outs = same_everywhere({steps: drivers[steps] for steps in (0, 4)}, prompts, params)
    assert min(drivers[steps].most_running for steps in (0, 4)) == len(cases), "they were not all there at once"
    for (schema, thinking), out in zip(cases, outs, strict=True):
        assert out.finish_reason is not None and out.finish_reason.type == "stop", out
        text = text_of(out)
        assert conforms(json.loads(text), schema), (schema, text)
        assert out.token_ids[-1] in (1, 6, 14) and "\n" not in text
        assert thinking or THOUGHT_END not in out.token_ids
    assert sum(THOUGHT_END in out.token_ids for out in outs) > 80


def test_regular_expressions_and_ebnf(drivers: dict[int, SchedulerDriver]) -> None:
    date, terms = r"20[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]", 'root ::= n (" + " n){1,3}\nn ::= [1-9] [0-9]?'
    params = [SamplingParams(regex=date, max_new_tokens=60, **controls(i)) for i in range(5)]
    params += [SamplingParams(ebnf=terms, max_new_tokens=60, **controls(i)) for i in range(5)]
    outs = same_everywhere(drivers, [prompt(q) for q in QUESTIONS] * 2, params)
    for out in outs[:5]:
        assert re.fullmatch(date, text_of(out)), text_of(out)
    for out in outs[5:]:
        assert re.fullmatch(r"[1-9][0-9]?( \+ [1-9][0-9]?){1,3}", text_of(out)), text_of(out)
    assert all(out.finish_reason is not None and out.finish_reason.type == "stop" for out in outs)


def test_structural_tags_bind_only_what_they_begin(drivers: dict[int, SchedulerDriver]) -> None:
    tag = {
        "type": "structural_tag",
        "structures": [{"begin": "<sum>", "schema": {"type": "integer", "maximum": 99, "minimum": 0}, "end": "</sum>"}],
        "triggers": ["<sum>"],
    }
    params = SamplingParams(structural_tag=json.dumps(tag), max_new_tokens=40, temperature=0.0)
    free = SamplingParams(max_new_tokens=40, temperature=0.0)
    outs = same_everywhere(drivers, [prompt(QUESTIONS[3])] * 2, [params, free])
    assert outs[0].token_ids == outs[1].token_ids, "an answer without the tag is as it was"


def test_answers_beside_constrained_ones_are_as_they_were(drivers: dict[int, SchedulerDriver]) -> None:
    free = [SamplingParams(max_new_tokens=40, **controls(i)) for i in range(4)]
    prompts = [prompt(question) for question in QUESTIONS[:4]]
    alone = drivers[0].tokens(prompts, free)
    bound = [SamplingParams(json_schema=json.dumps(SCHEMAS[i]), max_new_tokens=200, **controls(i)) for i in range(4)]
    alone += drivers[0].tokens(prompts, bound)
    # the last one pads its steps, and starts them ahead of results where no request has a grammar
    for driver in (drivers[0], drivers[4], make_driver(4, cuda_graph_bs=(1, 2, 4, 8))):
        for arrivals in ([0, 0, 0, 0, 1, 2, 3, 6], [4, 3, 9, 1, 0, 0, 2, 0]):
            assert driver.tokens(prompts * 2, [*free, *bound], arrivals=arrivals) == alone


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_grammar_ends_inside_a_run(drivers: dict[int, SchedulerDriver], ignore_eos: bool) -> None:
    """The drafts go on behind the end: nothing of them is kept."""
    params = SamplingParams(regex="[1-3](, [1-9])?", temperature=0.0, max_new_tokens=50, ignore_eos=ignore_eos)
    outs = same_everywhere(drivers, [prompt("Count from 1 to 9.")] * 2, [params] * 2)
    for out in outs:
        assert re.fullmatch("[1-3](, [1-9])?", text_of(out)) and out.token_ids[-1] in (1, 6, 14)
        assert out.finish_reason is not None and out.finish_reason.matched == out.token_ids[-1]


def test_length_ends_an_answer_before_its_grammar(drivers: dict[int, SchedulerDriver]) -> None:
    params = [SamplingParams(json_schema=json.dumps(SCHEMAS[0]), temperature=0.0, max_new_tokens=n) for n in range(9)]
    outs = same_everywhere(drivers, [prompt(QUESTIONS[2])] * 9, params)
    assert [len(out.token_ids) for out in outs] == list(range(9))
    assert all(out.finish_reason is not None and out.finish_reason.type == "length" for out in outs)


def test_drafts_keep_to_the_grammar(drivers: dict[int, SchedulerDriver]) -> None:
    """Without its mask the assistant would say what the target says without a grammar, and nothing were accepted."""
    params = SamplingParams(regex="[x-z]{9}", temperature=0.0, max_new_tokens=60)
    outs = same_everywhere(drivers, [prompt("Count from 1 to 9.")], [params])
    assert re.fullmatch("[x-z]{9}", text_of(outs[0]))


BESIDE_CHAINS = [
    {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 7},
    {"speculative_eagle_topk": 3, "speculative_num_draft_tokens": 12, "page_size": 16},
    {"speculative_use_rejection_sampling": True},
    {"speculative_adaptive": True},
]


@pytest.mark.parametrize("options", BESIDE_CHAINS, ids=lambda options: next(iter(options)))
def test_drafts_outside_the_grammar_are_never_kept(
    drivers: dict[int, SchedulerDriver], options: dict[str, Any]
) -> None:
    """Drafts of trees, and those that are drawn, do not know the grammar."""
    driver = make_driver(4, max_total_tokens=1 << 14, **options)
    params = [SamplingParams(json_schema=json.dumps(SCHEMAS[i]), max_new_tokens=200, **controls(i)) for i in range(10)]
    prompts = [prompt(QUESTIONS[i % 5], thinking=i % 3 == 0) for i in range(10)]
    outs = driver.run(prompts, params)
    plain = drivers[0].run(prompts, params)
    for i, out in enumerate(outs):
        assert out.finish_reason is not None and out.finish_reason.type == "stop", out
        assert conforms(json.loads(text_of(out)), SCHEMAS[i]), text_of(out)
        # drawn drafts give another answer of the same distribution
        if params[i].is_greedy or "speculative_use_rejection_sampling" not in options:
            assert out.token_ids == plain[i].token_ids
    assert sum(out.spec.accepted_tokens for out in outs if out.spec is not None) > 0


def test_reasoning_ends_inside_a_run(drivers: dict[int, SchedulerDriver]) -> None:
    params = SamplingParams(json_schema='{"enum": ["19", "20"]}', temperature=0.0, max_new_tokens=100)
    thinking, plain = prompt("What is 12 + 7?", thinking=True), prompt("What is 12 + 7?")
    opened = [*thinking, THOUGHT_START, *TOKENIZER.encode("thought\n", add_special_tokens=False)]
    closed = [*opened, THOUGHT_END]
    outs = same_everywhere(drivers, [thinking, plain, opened, closed], [params] * 4)
    answers = [TOKENIZER.decode(out.token_ids, skip_special_tokens=True) for out in outs]
    assert outs[0].token_ids[0] == THOUGHT_START and text_of(outs[0]) == '"19"'
    assert answers[1] in ('"19"', '"20"') and answers[3] in ('"19"', '"20"')
    behind = outs[2].token_ids[outs[2].token_ids.index(THOUGHT_END) + 1 :]
    assert TOKENIZER.decode(behind, skip_special_tokens=True) in ('"19"', '"20"')


@pytest.mark.parametrize("num_steps", [0, 3])
def test_retraction_keeps_the_place_in_the_grammar(drivers: dict[int, SchedulerDriver], num_steps: int) -> None:
    params = [
        SamplingParams(json_schema=json.dumps(SCHEMAS[i % 3]), max_new_tokens=60, **controls(i)) for i in range(6)
    ]
    prompts = [prompt(QUESTIONS[i % 5], thinking=i % 2 == 1) for i in range(6)]
    expected = drivers[0].tokens(prompts, params)
    driver = make_driver(
        num_steps, max_total_tokens=135, schedule_conservativeness=0.001, max_running_requests=6, chunked_prefill_size=8
    )
    assert driver.tokens(prompts, params) == expected
    assert driver.scheduler.metrics.totals.num_retractions > 0, "memory was not short, so nothing was tested"


def test_chunks_pages_and_prefixes(drivers: dict[int, SchedulerDriver]) -> None:
    params = [SamplingParams(json_schema=json.dumps(SCHEMAS[i]), max_new_tokens=200, **controls(i)) for i in range(4)]
    prompts = [prompt("Tell me a story. " * 6 + QUESTIONS[i]) for i in range(4)]
    expected = drivers[0].tokens(prompts, params)
    for mixed in (False, True):
        driver = make_driver(3, page_size=16, chunked_prefill_size=16, enable_mixed_chunk=mixed)
        for arrivals in ([0, 0, 0, 0], [0, 2, 4, 9]):
            assert driver.tokens(prompts, params, arrivals=arrivals) == expected


class SlowBackend:
    """Never done before it is told to be."""

    def __init__(self) -> None:
        self.is_open = False

    def compile(self, kind: str, text: str) -> Any:
        end = time.monotonic() + 10
        while not self.is_open:
            assert time.monotonic() < end
            time.sleep(0.005)
        raise ValueError(f"{kind} cannot be used: too late")


def test_abort_while_a_grammar_is_compiled(drivers: dict[int, SchedulerDriver]) -> None:
    driver = make_driver(3)
    backend = driver.scheduler.grammars._backend = SlowBackend()
    scheduler = driver.scheduler
    ask = SamplingParams(regex="a", max_new_tokens=5)
    for rid in ("left", "stays"):
        scheduler.handle(TokenizedGenerateReqInput(rid, tuple(prompt("x")), ask, stream=False))
    free = SamplingParams(max_new_tokens=3, temperature=0.0, ignore_eos=True)
    scheduler.handle(TokenizedGenerateReqInput("free", tuple(prompt("x")), free, stream=False))
    for _ in range(6):
        scheduler.step()
    assert scheduler.server_info()["num_queue_reqs"] == 2 and not scheduler.running.reqs, "the free one is done"
    scheduler.handle(AbortReq("left"))
    assert scheduler.server_info()["num_queue_reqs"] == 1
    backend.is_open = True
    while scheduler.has_work:
        scheduler.step()
    scheduler._send_outputs()
    outs = {out.rid: out for m in driver.channel.sent if isinstance(m, BatchTokenOut) for out in m.outs}
    ends = {rid: out.finish_reason.to_dict() for rid, out in outs.items() if out.finish_reason is not None}
    assert ends["free"] == {"type": "length", "length": 3}
    assert ends["left"] == {"type": "abort", "message": "the request was aborted", "status_code": None}
    assert ends["stays"] == {"type": "abort", "message": "regex cannot be used: too late", "status_code": 400}
    scheduler.kv_manager.check_integrity()


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with sglang.Engine(model_path="tiny-gemma4", speculative_algorithm="FROZEN_KV_MTP", log_level="warning") as running:
        yield running


def test_samples_of_one_request(engine: Engine) -> None:
    schema = json.dumps(SCHEMAS[0])
    text = TOKENIZER.decode(prompt("Describe a person."))
    sampling = {"json_schema": schema, "n": 4, "temperature": 1.0, "sampling_seed": 3, "max_new_tokens": 200}
    replies = engine.generate(text, sampling)
    values = [json.loads(reply["text"]) for reply in replies]
    assert all(conforms(value, SCHEMAS[0]) for value in values) and len({r["text"] for r in replies}) > 1
    for i, reply in enumerate(replies):
        alone = engine.generate(text, {**sampling, "n": 1, "sampling_seed": 3 + i})
        assert alone["text"] == reply["text"]


def test_schemas_as_objects_and_bad_ones(engine: Engine) -> None:
    reply = engine.generate("<bos>", {"json_schema": {"const": {"a": [1, 2]}}, "max_new_tokens": 50})
    assert json.loads(reply["text"]) == {"a": [1, 2]} and "\n" not in reply["text"]
    with pytest.raises(ValueError, match="^json_schema cannot be used: Type should be a string"):
        engine.generate("<bos>", {"json_schema": '{"type": 5}'})
    with pytest.raises(ValueError, match="^regex and ebnf exclude each other"):
        engine.generate("<bos>", {"regex": "a", "ebnf": "root ::= [a]"})


def test_streams_join_to_the_whole(engine: Engine) -> None:
    sampling = {"json_schema": json.dumps(SCHEMAS[1]), "temperature": 0.0, "max_new_tokens": 200}
    text = TOKENIZER.decode(prompt("Describe a person."))
    events = list(engine.generate(text, sampling, stream=True))
    assert len(events) > 2 and events[-1]["text"] == engine.generate(text, sampling)["text"]
    assert conforms(json.loads(events[-1]["text"]), SCHEMAS[1])


def test_a_server_without_a_backend_refuses() -> None:
    with sglang.Engine(model_path="tiny-gemma4", grammar_backend="none", log_level="warning") as plain:
        with pytest.raises(ValueError, match="^json_schema needs a grammar backend, and this server has none"):
            plain.generate("<bos>", {"json_schema": "{}"})
        assert plain.generate("<bos>", {"max_new_tokens": 2, "ignore_eos": True})["output_ids"]
