"""Log-probabilities, echo, usage and the other fields of OpenAI's routes, with OpenAI's client and the shipped pair."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from fixtures.logit_processors import NoRepeatAfter
from fixtures.server_process import ServerProcess, ready_server

CONTEXT = 512
COUNT = "Count from 3 to 20."
COUNTED = ", ".join(str(i) for i in range(3, 21))
PROMPT = f"<bos><|turn>user\n{COUNT}<turn|>\n<|turn>model\n"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "The city."}},
            "required": ["city"],
        },
    },
}
# fields that are not parameters of the client's methods
EXTRA = (
    "continue_final_message",
    "custom_logit_processor",
    "custom_params",
    "enable_thinking",
    "ignore_eos",
    "min_p",
    "min_tokens",
    "no_stop_trim",
    "priority",
    "regex",
    "repetition_penalty",
    "return_hidden_states",
    "rid",
    "safety_identifier",
    "skip_special_tokens",
    "speculative",
    "speculative_num_steps",
    "speculative_usage",
    "stop_regex",
    "stop_token_ids",
    "stream_reasoning",
    "top_k",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    switches = ("enable-cache-report", "allow-auto-truncate", "enable-return-hidden-states")
    switches += ("enable-custom-logit-processor", "disable-radix-cache")
    args = (
        "--speculative-algorithm",
        "FROZEN_KV_MTP",
        "--speculative-num-steps",
        "4",
        "--context-length",
        str(CONTEXT),
    )
    with ready_server(tmp_path_factory.mktemp("logprobs"), *args, *(f"--{name}" for name in switches)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30)


def _with_extra(options: dict[str, Any]) -> dict[str, Any]:
    extra = {name: options.pop(name) for name in EXTRA if name in options}
    return {"temperature": 0, "max_tokens": 100, "model": "default", **options, "extra_body": extra}


def _chat(client: openai.OpenAI, question: str = COUNT, **options: Any) -> Any:
    messages = options.pop("messages", [{"role": "user", "content": question}])
    return client.chat.completions.create(messages=messages, **_with_extra(options))


def _complete(client: openai.OpenAI, prompt: Any = PROMPT, **options: Any) -> Any:
    return client.completions.create(prompt=prompt, **_with_extra(options))


def _close(entries: list[float | None], others: list[float | None]) -> bool:
    pairs = list(zip(entries, others, strict=True))
    return all((a is None and b is None) or math.isclose(a, b, abs_tol=2e-3) for a, b in pairs)  # type: ignore[arg-type]


def _spoken(entries: list[Any]) -> str:
    return b"".join(bytes(entry.bytes) for entry in entries).decode()


CHATS: list[tuple[dict[str, Any], str]] = [
    ({}, f"{COUNTED}<turn|>"),
    ({"stop": "9, 10"}, "3, 4, 5, 6, 7, 8, 9, 10"),
    ({"max_tokens": 1}, "3"),
    ({"max_tokens": 7}, "3, 4, 5"),
    ({"temperature": 0.7, "seed": 3, "top_p": 0.9}, f"{COUNTED}<turn|>"),
    (
        {"question": "What is the weather in Paris?", "tools": [WEATHER]},
        '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|><|tool_response>',
    ),
    (
        {"question": "What is 17 + 25?", "enable_thinking": True},
        "<|channel>thought\nTens: 10 + 20 = 30. Ones: 7 + 5 = 12. 30 + 12 = 42.\n<channel|>17 + 25 = 42<turn|>",
    ),
    (
        {"question": "What is 17 + 25?", "enable_thinking": True, "stream_reasoning": False, "max_tokens": 12},
        "",
    ),
]


@pytest.mark.parametrize("options, spoken", CHATS, ids=[json.dumps(options)[:60] for options, _ in CHATS])
def test_chats_have_one_entry_for_each_token(client: openai.OpenAI, options: dict[str, Any], spoken: str) -> None:
    """Streamed or whole, with speculation and without: tokens, their texts, and the most likely ones beside them."""
    asked = {**options, "logprobs": True, "top_logprobs": 3}
    reply = _chat(client, **asked)
    (choice,) = reply.choices
    entries = choice.logprobs.content
    assert len(entries) == reply.usage.completion_tokens
    assert not spoken or _spoken(entries) == spoken
    unasked = _chat(client, **options).choices[0]
    assert unasked.logprobs is None and unasked.message.content == choice.message.content
    for entry in entries:
        top = [pair.logprob for pair in entry.top_logprobs]
        assert len(top) == 3 and top == sorted(top, reverse=True) and entry.logprob <= top[0] + 1e-6
        if "seed" not in options:
            assert entry.token == entry.top_logprobs[0].token and entry.logprob == top[0]
    plain = _chat(client, **asked, speculative=False).choices[0].logprobs.content
    assert [entry.bytes for entry in plain] == [entry.bytes for entry in entries]
    assert _close([entry.logprob for entry in plain], [entry.logprob for entry in entries])
    *chunks, last = _chat(client, **asked, stream=True, stream_options={"include_usage": True})
    streamed = [entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert [entry.bytes for entry in streamed] == [entry.bytes for entry in entries]
    assert _close([entry.logprob for entry in streamed], [entry.logprob for entry in entries])
    assert last.usage.completion_tokens == len(entries)


def test_logprobs_are_the_engines_own(client: openai.OpenAI, server: ServerProcess) -> None:
    native = client.with_options(base_url=server.url).post(
        "/generate",
        body={
            "text": PROMPT,
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 2,
            "sampling_params": {"temperature": 0, "max_new_tokens": 9},
        },
        cast_to=object,
    )
    info = native["meta_info"]  # type: ignore[index]
    chat = _chat(client, logprobs=True, top_logprobs=2, max_tokens=9).choices[0].logprobs.content
    assert _close([entry.logprob for entry in chat], [entry[0] for entry in info["output_token_logprobs"]])
    text = _complete(client, logprobs=2, echo=True, max_tokens=9).choices[0].logprobs
    expected = [entry[0] for side in ("input", "output") for entry in info[f"{side}_token_logprobs"]]
    assert text.token_logprobs[0] is None and _close(text.token_logprobs, expected)
    best = [entry and entry[0][0] for side in ("input", "output") for entry in info[f"{side}_top_logprobs"]]
    assert _close([top and max(top.values()) for top in text.top_logprobs], best)


@pytest.mark.parametrize("max_tokens", [0, 1, 12])
@pytest.mark.parametrize("n", [1, 2])
def test_echo(client: openai.OpenAI, max_tokens: int, n: int) -> None:
    """The prompt before every answer, as it was given; with log-probabilities its tokens too."""
    answer = _complete(client, max_tokens=max_tokens).choices[0].text
    for prompt in (PROMPT, "The quick brown fox"):
        plain = _complete(client, prompt, echo=True, max_tokens=max_tokens, n=n)
        asked = {"echo": True, "logprobs": 1, "max_tokens": max_tokens, "n": n, "ignore_eos": True}
        asked["skip_special_tokens"] = False
        whole = _complete(client, prompt, **asked)
        assert plain.usage.prompt_tokens == whole.usage.prompt_tokens
        for choice, other in zip(plain.choices, whole.choices, strict=True):
            assert choice.text.startswith(prompt) and other.text.startswith(prompt) and choice.logprobs is None
            assert prompt != PROMPT or choice.text == prompt + answer
            logprobs = other.logprobs
            num = whole.usage.prompt_tokens + max_tokens
            assert {len(values) for values in logprobs.model_dump(exclude_none=True).values()} == {num}
            for token, offset in list(zip(logprobs.tokens, logprobs.text_offset, strict=True))[1:]:
                assert other.text.startswith(token, offset)
            assert all(token in top for token, top in zip(logprobs.tokens[1:], logprobs.top_logprobs[1:], strict=True))
        chunks = list(_complete(client, prompt, **asked, stream=True))
        for index, choice in enumerate(whole.choices):
            mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
            assert "".join(piece.text for piece in mine) == choice.text
            assert mine[-1].finish_reason == choice.finish_reason == "length"
            tokens = [token for piece in mine if piece.logprobs for token in piece.logprobs.tokens]
            assert tokens == choice.logprobs.tokens
            offsets = [offset for piece in mine if piece.logprobs for offset in piece.logprobs.text_offset]
            assert offsets == choice.logprobs.text_offset


def test_prompts_of_every_kind(client: openai.OpenAI, server: ServerProcess) -> None:
    by_text = _complete(client, logprobs=0, max_tokens=5)
    tokenized = client.with_options(base_url=server.url).post("/tokenize", body={"prompt": PROMPT}, cast_to=object)
    ids = tokenized["tokens"]  # type: ignore[index]
    for prompts, count in ((ids, 1), ([PROMPT], 1), ([PROMPT, PROMPT], 2), ([ids, ids, ids], 3)):
        reply = _complete(client, prompts, logprobs=0, max_tokens=5)
        assert [choice.text for choice in reply.choices] == [by_text.choices[0].text] * count
        assert [choice.index for choice in reply.choices] == list(range(count))
        assert all(choice.logprobs.tokens == by_text.choices[0].logprobs.tokens for choice in reply.choices)
        assert reply.usage.prompt_tokens == count * len(ids)
    shown = COUNT + "\n"
    echoed = _complete(client, ids, echo=True, max_tokens=5).choices[0].text
    assert echoed.startswith("user\n" + shown) and "<" not in echoed
    full = _complete(client, ids, echo=True, max_tokens=5, skip_special_tokens=False).choices[0].text
    assert full.startswith(PROMPT)


def test_stops_within_accepted_runs(client: openai.OpenAI) -> None:
    """Wherever an answer is cut, text, tokens, entries and usage are cut at the same token."""
    whole = _complete(client, logprobs=0, max_tokens=100).choices[0]
    for stop in ("5", "8, 9", ", 1", "17", "20"):
        for options in ({"stop": stop}, {"stop_regex": stop}, {"stop": stop, "no_stop_trim": True}):
            reply = _complete(client, logprobs=0, speculative_usage=True, **options)
            (choice,) = reply.choices
            at = COUNTED.index(stop)
            assert choice.text == COUNTED[: at + (len(stop) if "no_stop_trim" in options else 0)]
            num = reply.usage.completion_tokens
            assert choice.logprobs.tokens == whole.logprobs.tokens[:num]
            assert stop in "".join(choice.logprobs.tokens) and stop not in "".join(choice.logprobs.tokens[:-1])
            assert (choice.finish_reason, choice.matched_stop) == ("stop", stop)
    for length in range(1, 12):
        reply = _complete(client, logprobs=0, max_tokens=length, speculative_num_steps=1 + length % 4)
        (choice,) = reply.choices
        assert choice.logprobs.tokens == whole.logprobs.tokens[:length] and choice.finish_reason == "length"
        assert reply.usage.completion_tokens == length and whole.text.startswith(choice.text)


def test_tokens_of_thoughts_are_counted_as_far_as_they_are_sent(client: openai.OpenAI) -> None:
    options = {"question": "What is 17 + 25?", "enable_thinking": True, "logprobs": True}
    whole = _chat(client, **options)
    entries, used = whole.choices[0].logprobs.content, whole.usage.reasoning_tokens
    head = next(i for i in range(len(entries)) if _spoken(entries[:i]) == "<|channel>thought\n")
    assert entries[head + used].token == "<channel|>"
    for length in (1, head - 1, head, head + 1, head + 7, head + used - 1, head + used, head + used + 2):
        usage = _chat(client, **options, max_tokens=length).usage
        assert usage.completion_tokens == length
        assert usage.reasoning_tokens == min(used, max(0, length - head))


@pytest.mark.parametrize("stream", [False, True])
def test_answers_end_where_the_context_does(client: openai.OpenAI, stream: bool) -> None:
    """One token of room, some, and a prompt that has to be cut: a place for every token, and none beyond."""
    words = "one two three four five six seven eight nine ten " * 60
    ids = client.post("/tokenize", body={"prompt": words}, cast_to=object)["tokens"]  # type: ignore[index]
    assert len(ids) > CONTEXT
    for prompt_len, room in ((CONTEXT - 1, 1), (CONTEXT - 7, 7), (len(ids), 1)):
        options = {"logprobs": 1, "ignore_eos": True, "max_tokens": 50, "stream": stream}
        if stream:
            *chunks, last = _complete(client, ids[:prompt_len], stream_options={"include_usage": True}, **options)
            usage, end = last.usage, chunks[-1].choices[0]
            tokens = [
                token for chunk in chunks if chunk.choices[0].logprobs for token in chunk.choices[0].logprobs.tokens
            ]
        else:
            reply = _complete(client, ids[:prompt_len], **options)
            usage, end = reply.usage, reply.choices[0]
            tokens = end.logprobs.tokens
        assert len(tokens) == usage.completion_tokens == room and end.finish_reason == "length"
        assert usage.prompt_tokens == min(prompt_len, CONTEXT - 1)


def test_prompts_that_are_cut_keep_their_beginning(client: openai.OpenAI, server: ServerProcess) -> None:
    words = "one two three four five six seven eight nine ten " * 60
    cut = _complete(client, words, echo=True, logprobs=0, max_tokens=1)
    assert cut.usage.prompt_tokens == CONTEXT - 1 and cut.usage.completion_tokens == 1
    *kept, _ = cut.choices[0].logprobs.tokens
    assert len("".join(kept)) > CONTEXT and words.startswith("".join(kept))
    assert _chat(client, words).usage.prompt_tokens == CONTEXT - 1
    assert f"was cut to its first {CONTEXT - 1}" in server.output
    assert _complete(client, max_tokens=10_000).choices[0].text == COUNTED


def test_usage(client: openai.OpenAI) -> None:
    whole = _chat(client, speculative_usage=True).usage
    details = whole.completion_tokens_details
    assert details.spec_accept_length > 2 and details.accepted_prediction_tokens > 10
    assert len(details.spec_accept_by_position) == 4 and all(0 <= part <= 1 for part in details.spec_accept_by_position)
    assert details.spec_verify_ct * details.spec_accept_length == pytest.approx(
        details.spec_verify_ct + details.accepted_prediction_tokens
    )
    assert whole.prompt_tokens_details.cached_tokens == 0, "this server keeps no prefixes"
    assert not {"spec_accept_length", "spec_verify_ct"} & set(
        _chat(client).usage.completion_tokens_details.model_dump()
    )
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    *chunks, last = _chat(client, speculative_usage=True, **options)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[0] >= 1 and counts[-1] == whole.completion_tokens
    assert all(chunk.usage.prompt_tokens == whole.prompt_tokens for chunk in chunks)
    assert not last.choices and last.usage == whole
    only = list(_complete(client, stream=True, stream_options={"continuous_usage_stats": True}))
    assert all(chunk.choices for chunk in only) and only[-1].usage.completion_tokens == whole.completion_tokens


def test_hidden_states(client: openai.OpenAI) -> None:
    whole = _chat(client, return_hidden_states=True, max_tokens=5).choices[0]
    *_, last = _chat(client, return_hidden_states=True, max_tokens=5, stream=True)
    plain = _chat(client, return_hidden_states=True, max_tokens=5, speculative=False).choices[0]
    assert len(whole.hidden_states) > 32 and _close(whole.hidden_states, last.choices[0].hidden_states)
    assert _close(whole.hidden_states, plain.hidden_states)
    text = _complete(client, return_hidden_states=True, max_tokens=5).choices[0]
    assert _close(whole.hidden_states, text.hidden_states)
    assert not hasattr(_chat(client, max_tokens=5).choices[0], "hidden_states")


def test_logit_processors(client: openai.OpenAI) -> None:
    options = {"custom_logit_processor": NoRepeatAfter.to_str(), "custom_params": {"window": 4}, "max_tokens": 20}
    reply = _complete(client, logprobs=0, ignore_eos=True, **options)
    tokens = reply.choices[0].logprobs.tokens
    assert all(token not in tokens[max(0, i - 4) : i] for i, token in enumerate(tokens))
    assert reply.choices[0].text != COUNTED[: len(reply.choices[0].text)]
    off = _complete(client, logprobs=0, ignore_eos=True, speculative=False, **options)
    assert off.choices[0].logprobs.tokens == tokens
    assert _chat(client, ignore_eos=True, **options).choices[0].message.content == reply.choices[0].text


def test_fields_that_change_nothing(client: openai.OpenAI) -> None:
    options = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "priority": 0,
        "n": 1,
        "logit_bias": {},
        "frequency_penalty": 0,
        "presence_penalty": 0,
        "min_p": 0.0,
        "top_k": -1,
        "repetition_penalty": 1.0,
        "rid": "mine",
    }
    assert _chat(client, **options).choices[0].message.content == COUNTED
    assert _complete(client, best_of=2, n=2, user="u").choices[1].text == COUNTED


def test_fields_that_change_answers(client: openai.OpenAI) -> None:
    tokens = _complete(client, logprobs=0).choices[0].logprobs.tokens
    assert _chat(client, min_tokens=len(tokens) + 5, max_tokens=len(tokens) + 5).usage.completion_tokens == (
        len(tokens) + 5
    )
    assert _chat(client, regex="3(, [0-9]){4}").choices[0].message.content == "3, 4, 5, 6, 7"
    begun = [{"role": "user", "content": COUNT}, {"role": "assistant", "content": "3, 4, 5,"}]
    assert _chat(client, messages=begun, continue_final_message=True).choices[0].message.content == " 6" + COUNTED[10:]
    three = _chat(client, n=3, temperature=1.0, seed=5, logprobs=True)
    assert len({choice.index for choice in three.choices}) == 3
    assert sum(len(choice.logprobs.content) for choice in three.choices) == three.usage.completion_tokens


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("suffix", "x", "suffix is not supported yet"),
        ("best_of", 3, "best_of must be n, which is 1"),
        ("logprobs", 101, "logprobs must be an integer from 0 to 100"),
        ("echo", "yes", "echo must be true or false"),
    ],
)
def test_what_completions_refuse(client: openai.OpenAI, field: str, value: Any, message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        _complete(client, **{field: value})
    assert caught.value.param == field
