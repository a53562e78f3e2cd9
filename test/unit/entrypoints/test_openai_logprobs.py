"""Log-probabilities of chats and completions: one entry for each token, in the right piece, with its text and place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.entrypoints.chat_output import AnswerFormat, ChatShape
from sglang.srt.entrypoints.completion_output import TextFormat, TextShape, echo_of
from sglang.srt.entrypoints.openai_logprobs import chat_logprobs
from sglang.srt.entrypoints.parsers.gemma4 import Gemma4Format
from sglang.srt.managers.detokenizer_manager import IncrementalDetokenizer, TokenPieces
from sglang.srt.managers.generate_output import GenerateOutput, Logprobs, join_outputs
from sglang.srt.managers.io_struct import FinishReason
from sglang.srt.sampling.logprobs import TokenLogprobs
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.embedded import EMBEDDED_MODELS
from sglang.srt.utils.hf_transformers.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer(Path(EMBEDDED_MODELS["tiny-gemma4"].target), trust_remote_code=False)
PIECES = TokenPieces(TOKENIZER)
BOS = TOKENIZER.bos_token_id
Q = '<|"|>'
CHAT_TEXTS = (
    "Plain text.",
    f"<|channel>thought\nHm, 😀.\n<channel|>Yes é.<|tool_call>call:f{{a:{Q}日本 x{Q},b:1}}<tool_call|>",
    "",
)


def encode(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


def entries(ids: tuple[int, ...], first: int = 0) -> tuple[TokenLogprobs, ...]:
    """Made-up entries that tell tokens apart by their place; every token but one in three is the most likely."""
    found = []
    for place, token_id in enumerate(ids, first):
        other = token_id - 1 if token_id else 1
        pairs = [(-0.5 - place, token_id), (-0.75 - place, other)]
        found.append(TokenLogprobs(token_id, -0.5 - place, tuple(pairs[1:] if place % 3 == 2 else pairs)))
    return tuple(found)


def outputs(ids: tuple[int, ...], cuts: list[int], prompt: tuple[int, ...] = (), **how: Any) -> list[GenerateOutput]:
    """What the engine says of an answer whose tokens come in groups that end at ``cuts``."""
    detokenizer = IncrementalDetokenizer(PIECES, SamplingParams(**how.pop("params", {})), how.pop("shown", None))
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    parts = list(zip(bounds, bounds[1:], strict=False))
    found = []
    for i, (low, high) in enumerate(parts):
        finish = how.get("finish", FinishReason("length", length=len(ids))) if i == len(parts) - 1 else None
        prompt_entries: tuple[TokenLogprobs, ...] = ()
        if prompt and i == 0:
            prompt_entries = (TokenLogprobs(prompt[0], None), *entries(prompt[1:], 1000))
        found.append(
            GenerateOutput(
                index=0,
                rid="r",
                text=detokenizer.feed(ids[low:high], finish),
                output_ids=ids[low:high],
                finish_reason=finish,
                prompt_tokens=1,
                completion_tokens=high,
                cached_tokens=0,
                spec=None,
                e2e_latency_s=0.0,
                ttft_s=0.0,
                queue_time_s=0.0,
                logprobs=Logprobs(prompt_entries, entries(ids)[low:high], True, False, None),
            )
        )
    return found


def test_entries_of_a_chat() -> None:
    ids = encode("a😀<turn|>")
    content = chat_logprobs(entries(ids), PIECES)["content"]
    assert [entry["logprob"] for entry in content] == [-0.5 - i for i in range(len(ids))]
    assert b"".join(bytes(entry["bytes"]) for entry in content) == "a😀<turn|>".encode()
    assert content[0]["token"] == "a" and content[-1]["token"] == "<turn|>"
    # the parts of one character have no text of their own
    assert len(ids) > 3 and {entry["token"] for entry in content[1:-1]} == {"\ufffd"}
    for place, entry in enumerate(content):
        assert [top["logprob"] for top in entry["top_logprobs"]][-1] == -0.75 - place
        assert len(entry["top_logprobs"]) == (1 if place % 3 == 2 else 2)
        assert set(entry["top_logprobs"][0]) == {"token", "logprob", "bytes"}


cuts_lists = st.lists(st.integers(0, 60), max_size=12)


@settings(max_examples=150, deadline=None)
@given(text=st.sampled_from(CHAT_TEXTS), cuts=cuts_lists, stream_reasoning=st.booleans())
def test_a_streamed_chat_has_the_entries_of_the_whole(text: str, cuts: list[int], stream_reasoning: bool) -> None:
    chosen = AnswerFormat(Gemma4Format(), reasoning=True, tools=True, stream_reasoning=stream_reasoning)
    ids, how = encode(text), {"shown": Gemma4Format.thought_markers + Gemma4Format.call_markers}
    parts = outputs(ids, cuts, **how)
    whole = ChatShape(chosen, PIECES).choice(join_outputs(parts))
    assert whole["logprobs"] == chat_logprobs(entries(ids), PIECES)
    shape = ChatShape(chosen, PIECES)
    streamed = [choice for i, out in enumerate(parts) for choice in shape.pieces(out, i == 0)]
    assert streamed[0]["logprobs"] is None, "the first piece has the role only"
    content = [entry for choice in streamed if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert content == whole["logprobs"]["content"]
    # neither is a character that several tokens make up cut
    for field in ("content", "reasoning_content"):
        shown = "".join(choice["delta"].get(field) or "" for choice in streamed)
        assert shown == (whole["message"][field] or "")


def text_shape(prompt: Any = None, *, skip_special_tokens: bool = True) -> TextShape:
    hidden = PIECES.special_ids if skip_special_tokens else frozenset()
    return TextShape(TextFormat(1, None if prompt is None else (echo_of(prompt, PIECES, hidden),), hidden), PIECES)


PROMPTS: tuple[tuple[Any, tuple[int, ...]], ...] = (
    ("Once é", (BOS, *encode("Once é"))),
    ("<bos><|turn>user\nHi<turn|>", encode("<bos><|turn>user\nHi<turn|>")),
    ((BOS, *encode("Hi <turn|> 😀")), (BOS, *encode("Hi <turn|> 😀"))),
    ("", (BOS,)),
)


@settings(max_examples=150, deadline=None)
@given(prompt=st.sampled_from(PROMPTS), cuts=cuts_lists, skip=st.booleans(), echo=st.booleans())
def test_a_streamed_text_is_the_whole_and_every_token_is_in_its_place(
    prompt: tuple[Any, tuple[int, ...]], cuts: list[int], skip: bool, echo: bool
) -> None:
    given_prompt, prompt_ids = prompt
    ids = encode(" upon a time, 😀<|turn>é")
    parts = outputs(ids, cuts, prompt_ids if echo else (), params={"skip_special_tokens": skip})
    shown = given_prompt if echo else None
    whole = text_shape(shown, skip_special_tokens=skip).choice(join_outputs(parts))
    shape = text_shape(shown, skip_special_tokens=skip)
    streamed = [choice for i, out in enumerate(parts) for choice in shape.pieces(out, i == 0)]
    assert "".join(choice["text"] for choice in streamed) == whole["text"]
    logprobs = whole["logprobs"]
    for name, values in logprobs.items():
        assert [value for choice in streamed if choice["logprobs"] for value in choice["logprobs"][name]] == values
        assert len(values) == len(ids) + (len(prompt_ids) if echo else 0)
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    ends = [*logprobs["text_offset"][1:], len(whole["text"])]
    for token, start, end in zip(logprobs["tokens"], logprobs["text_offset"], ends, strict=True):
        # tokens that are not shown have no room, and of the bytes of a character only the last has
        assert whole["text"][start:end] in (("", "😀", "é") if token.startswith("bytes:") else ("", token))


def test_texts_of_entries() -> None:
    ids = encode("a😀")
    logprobs = text_shape().choice(join_outputs(outputs(ids, [])))["logprobs"]
    assert logprobs["tokens"] == ["a", *(f"bytes:\\x{byte:02x}" for byte in "😀".encode())]
    assert logprobs["text_offset"] == [0, 1, 1, 1, 1]
    for place, (token, top) in enumerate(zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True)):
        assert top[token] == logprobs["token_logprobs"][place] == -0.5 - place, "the token itself is always there"
        assert len(top) == 2
    assert list(logprobs["top_logprobs"][0]) != list(logprobs["top_logprobs"][2]), "best first, the token last if worse"


def test_an_echoed_prompt() -> None:
    prompt = "<bos>Hi<turn|>é"
    ids = encode(prompt)
    choice = text_shape(prompt).choice(join_outputs(outputs(encode(" a"), [], ids)))
    assert choice["text"] == prompt + " a"
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"][:2] == [None, -1000.5] and logprobs["top_logprobs"][0] is None
    assert logprobs["text_offset"][:4] == [0, 5, 7, 14]
    # what the tokenizer puts before a text is no part of it
    added = text_shape("Hi").choice(join_outputs(outputs(encode(" a"), [], (BOS, *encode("Hi")))))
    assert (added["text"], added["logprobs"]["text_offset"]) == ("Hi a", [0, 0, 2])
    # without log-probabilities there is only the text
    (out,) = outputs(encode(" a"), [])
    assert text_shape((BOS, *encode("Hi"))).choice(out)["text"] == "Hi a"
    assert text_shape((BOS, *encode("Hi")), skip_special_tokens=False).choice(out)["text"] == "<bos>Hi a"


@pytest.mark.parametrize("index, echo", [(0, "x"), (1, "x"), (2, "y"), (3, "y")])
def test_every_sample_echoes_its_prompt(index: int, echo: str) -> None:
    shape = TextShape(TextFormat(2, ("x", "y"), frozenset()), PIECES)
    first, second = (replace(out, index=index, logprobs=None) for out in outputs(encode("ab"), [1]))
    assert [choice["text"] for choice in shape.pieces(first, True)] == [echo + first.text]
    assert [choice["text"] for choice in shape.pieces(second, False)] == [second.text]
