"""Incremental text equals one-shot text at any cut of the ids; a stream shows neither half characters nor stops."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sglang.srt.managers.detokenizer_manager import IncrementalDetokenizer, TokenPieces
from sglang.srt.managers.io_struct import FinishReason
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.embedded import EMBEDDED_MODELS
from sglang.srt.utils.hf_transformers.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer(Path(EMBEDDED_MODELS["tiny-gemma4"].target), trust_remote_code=False)
PIECES = TokenPieces(TOKENIZER)
LENGTH = FinishReason("length", length=1)
TURN_END = TOKENIZER.convert_tokens_to_ids("<turn|>")
TEXTS = st.text(alphabet=st.characters(exclude_categories=("Cs",)), max_size=40)


def _ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


def _byte_ids(data: bytes) -> tuple[int, ...]:
    return tuple(TOKENIZER.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in data)


def _run(ids: tuple[int, ...], cuts: list[int], finish: FinishReason, **params: object) -> list[str]:
    """Shown text per delta, for ids cut at the given places. The last delta has the token that ended the request."""
    detokenizer = IncrementalDetokenizer(PIECES, SamplingParams(**params))
    edges = [0, *sorted(cut % max(len(ids), 1) for cut in cuts), len(ids)]
    deltas = [ids[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    shown = [detokenizer.feed(delta) for delta in deltas[:-1]]
    return [*shown, detokenizer.feed(deltas[-1], finish)]


CUTS = st.lists(st.integers(0, 200), max_size=30)


@settings(deadline=None, max_examples=150)
@given(text=TEXTS, cuts=CUTS)
def test_text_survives_any_cut(text: str, cuts: list[int]) -> None:
    ids = _ids(text)
    shown = _run(ids, cuts, LENGTH)
    assert "".join(shown) == TOKENIZER.decode(ids, clean_up_tokenization_spaces=False)
    if "\ufffd" not in text:
        assert not any("\ufffd" in part for part in shown)


@settings(deadline=None, max_examples=150)
@given(ids=st.lists(st.integers(0, 4300), max_size=40).map(tuple), cuts=CUTS, skip=st.booleans())
def test_any_ids_give_the_same_text_at_any_cut(ids: tuple[int, ...], cuts: list[int], skip: bool) -> None:
    assert "".join(_run(ids, cuts, LENGTH, skip_special_tokens=skip)) == "".join(
        _run(ids, [], LENGTH, skip_special_tokens=skip)
    )


@settings(deadline=None, max_examples=150)
@given(data=st.binary(max_size=12), cuts=CUTS)
def test_byte_tokens_decode_as_python_does(data: bytes, cuts: list[int]) -> None:
    assert "".join(_run(_byte_ids(data), cuts, LENGTH)) == data.decode("utf-8", "replace")


def test_half_a_character_waits_and_shows_at_the_end() -> None:
    detokenizer = IncrementalDetokenizer(PIECES, SamplingParams())
    smile = "😀".encode()
    assert [detokenizer.feed(_byte_ids(smile[i : i + 1])) for i in range(4)] == ["", "", "", "😀"]
    assert detokenizer.feed(_byte_ids(smile[:2])) == ""
    assert detokenizer.feed((), LENGTH) == "\ufffd"


def test_first_token_keeps_its_space() -> None:
    ids = _ids("a two")[1:]
    assert "".join(_run(ids, [1], LENGTH)) == " two"


@pytest.mark.parametrize("skip, expected", [(True, "ab"), (False, "a<turn|>b")])
def test_special_tokens(skip: bool, expected: str) -> None:
    ids = (*_ids("a"), TURN_END, *_ids("b"))
    assert "".join(_run(ids, [1, 2], LENGTH, skip_special_tokens=skip)) == expected


@pytest.mark.parametrize(
    "params, expected",
    [
        ({}, "ab"),
        ({"skip_special_tokens": False}, "ab"),
        ({"no_stop_trim": True}, "ab"),
        ({"no_stop_trim": True, "skip_special_tokens": False}, "ab<turn|>"),
    ],
)
def test_text_of_a_matched_stop_token(params: dict[str, bool], expected: str) -> None:
    ids = (*_ids("ab"), TURN_END)
    assert "".join(_run(ids, [1], FinishReason("stop", matched=TURN_END), **params)) == expected


def _stopped(ids: tuple[int, ...], stops: tuple[str, ...]) -> tuple[tuple[int, ...], str] | None:
    """Ids up to the one that completes the first stop string, and that string, as a scheduler finds them."""
    for end in range(1, len(ids) + 1):
        text = "".join(_run(ids[:end], [], LENGTH)).rstrip("\ufffd")
        found = [(text.find(stop), stop) for stop in stops if stop in text]
        if found:
            return ids[:end], min(found)[1]
    return None


@settings(deadline=None, max_examples=200)
@given(
    text=st.text(alphabet="abc é", min_size=1, max_size=30),
    stops=st.lists(st.text(alphabet="abc é", min_size=1, max_size=4), min_size=1, max_size=3, unique=True).map(tuple),
    cuts=CUTS,
)
def test_stream_never_shows_a_stop_string(text: str, stops: tuple[str, ...], cuts: list[int]) -> None:
    hit = _stopped(_ids(text), stops)
    if hit is None:
        assert "".join(_run(_ids(text), cuts, LENGTH, stop=stops)) == text
        return
    ids, stop = hit
    shown = _run(ids, cuts, FinishReason("stop", matched=stop), stop=stops)
    assert "".join(shown) == text[: text.find(stop)]
    whole = "".join(_run(ids, cuts, FinishReason("stop", matched=stop), stop=stops, no_stop_trim=True))
    assert text.startswith(whole) and stop in whole


def test_beginning_of_a_stop_string_is_kept_back_until_it_is_none() -> None:
    detokenizer = IncrementalDetokenizer(PIECES, SamplingParams(stop=("aab",)))
    assert [detokenizer.feed(_ids(char)) for char in "aaac"] == ["", "", "a", "aac"]
    assert detokenizer.feed(_ids("a")) == ""
    assert detokenizer.feed((), LENGTH) == "a"


def test_a_stop_string_that_did_not_end_the_request_is_text() -> None:
    # below min_new_tokens a stop string does not count; the cut is at the one that the last token completed
    ids = _ids("x y x y")
    shown = _run(ids, [1, 2, 3], FinishReason("stop", matched="y"), stop=("y",))
    assert "".join(shown) == "x y x "


def _byte_level() -> PreTrainedTokenizerFast:
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def _metaspace() -> PreTrainedTokenizerFast:
    vocab = {"<unk>": 0, "▁": 1, "a": 2, "▁a": 3, "b": 4, "▁b": 5}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a"), ("▁", "b")], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def test_byte_level_tokenizers() -> None:
    tokenizer = _byte_level()
    detokenizer = IncrementalDetokenizer(TokenPieces(tokenizer), SamplingParams())
    ids = tokenizer.encode("héé 😀")
    parts = [detokenizer.feed((token,)) for token in ids]
    assert "".join(parts) == "héé 😀" and "\ufffd" not in "".join(parts)


def test_spaces_that_a_decoder_drops_at_the_beginning_of_a_text_stay() -> None:
    tokenizer = _metaspace()
    detokenizer = IncrementalDetokenizer(TokenPieces(tokenizer), SamplingParams())
    assert [detokenizer.feed((token,)) for token in tokenizer.encode("b a")] == [" b", " a"]


def test_cost_per_token_does_not_grow_with_the_text() -> None:
    calls: list[int] = []

    class Counting(TokenPieces):
        def piece(self, token_id: int) -> bytes:
            calls.append(token_id)
            return super().piece(token_id)

    detokenizer = IncrementalDetokenizer(Counting(TOKENIZER), SamplingParams())
    for token in _byte_ids(b"\xf0\x9f" * 500):  # never a whole character
        detokenizer.feed((token,))
    assert len(calls) == 1000


def test_decoder_is_read_from_the_tokenizer() -> None:
    state = json.loads(TOKENIZER.backend_tokenizer.decoder.__getstate__())
    assert state["type"] == "Sequence"
    assert PIECES.piece(_byte_ids(b"\xc3")[0]) == b"\xc3"


def test_only_the_special_tokens_that_are_shown() -> None:
    ids = _ids("<bos>a<|channel>b<channel|>c<pad>")
    for skip in (True, False):
        detokenizer = IncrementalDetokenizer(
            PIECES, SamplingParams(skip_special_tokens=skip), ("<|channel>", "<channel|>", "<no such token>")
        )
        assert detokenizer.feed(ids, LENGTH) == "a<|channel>b<channel|>c"
    assert IncrementalDetokenizer(PIECES, SamplingParams(skip_special_tokens=False), ()).feed(ids, LENGTH) == "abc"
