"""The earliest end event in a run of tokens wins, wherever it lies."""

from __future__ import annotations

from array import array
from itertools import product

import pytest

from sglang.srt.managers.io_struct import FinishReason
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.stop_checker import check_stop
from sglang.srt.sampling.sampling_params import SamplingParams

STOP_ID = 7


class Letters:
    """Token 100 + i is one letter; 200 and 201 are the two bytes of an umlaut; 300 is special; 400 is a whole word."""

    special_ids = frozenset({300})

    def piece(self, token_id: int) -> bytes:
        named = {200: b"\xc3", 201: b"\xa4", 300: b"<s>", 400: b"hello world"}
        return named.get(token_id) or (bytes([token_id - 100 + ord("a")]) if token_id >= 100 else b"")


def letters(text: str) -> list[int]:
    return [100 + ord(char) - ord("a") for char in text]


def make(output: list[int], max_new_tokens: int = 100, **params: object) -> Req:
    prompt = letters("abc")
    return Req(
        rid="r",
        token_ids=array("i", [*prompt, *output]),
        prompt_len=len(prompt),
        params=SamplingParams(**params),
        max_new_tokens=max_new_tokens,
        stop_ids=frozenset({STOP_ID}),
        seed=0,
        stream=False,
        arrival_s=0.0,
    )


def stopped(matched: int | str) -> FinishReason:
    return FinishReason("stop", matched=matched)


def length(num_tokens: int) -> FinishReason:
    return FinishReason("length", length=num_tokens)


@pytest.mark.parametrize(
    ("output", "run", "max_new_tokens", "params", "answer"),
    [
        ([], [1], 100, {}, (1, None)),
        ([1, 2], [3, 4, 5], 100, {}, (3, None)),
        ([], [1, STOP_ID, 3], 100, {}, (2, stopped(STOP_ID))),
        ([1, 2], [3, 4, 5], 4, {}, (2, length(4))),
        ([1, 2], [3, 4], 4, {}, (2, length(4))),
        ([1, 2], [3], 4, {}, (1, None)),
        ([], [1, 2], 1, {}, (1, length(1))),
        ([], [1], 0, {}, (0, length(0))),
        ([], [STOP_ID], 0, {}, (0, length(0))),
        # at the same token a stop comes before the length, and an id before a string
        ([1], [2, STOP_ID], 3, {}, (2, stopped(STOP_ID))),
        ([1], letters("xy"), 3, {"stop": ("xy",)}, (2, stopped("xy"))),
        # the earlier event wins, whatever its kind
        ([], [1, 2, STOP_ID], 2, {}, (2, length(2))),
        ([], [*letters("xy"), STOP_ID], 100, {"stop": ("xy",)}, (2, stopped("xy"))),
        ([], [STOP_ID, *letters("xy")], 100, {"stop": ("xy",)}, (1, stopped(STOP_ID))),
        # nothing but the length ends a request before its least length, and a string passed over does not come back
        ([], [STOP_ID, 1, STOP_ID], 100, {"min_new_tokens": 2}, (3, stopped(STOP_ID))),
        ([], letters("xyz"), 100, {"min_new_tokens": 3, "stop": ("xy",)}, (3, None)),
        ([], letters("xyz"), 100, {"min_new_tokens": 3, "stop": ("xy", "longer")}, (3, None)),
        ([], letters("xyxy"), 100, {"min_new_tokens": 3, "stop": ("xy",)}, (4, stopped("xy"))),
    ],
)
def test_end_events(output, run, max_new_tokens, params, answer) -> None:
    assert check_stop(make(output, max_new_tokens, **params), run, Letters()) == answer


@pytest.mark.parametrize(("before", "stop_len", "after"), list(product(range(4), range(1, 5), range(3))))
def test_stop_string_at_every_offset_of_every_cut(before: int, stop_len: int, after: int) -> None:
    stop = "stuv"[:stop_len]
    ids = letters("x" * before + stop + "y" * after)
    for cut in range(before + stop_len):
        req = make(ids[:cut], stop=(stop,))
        assert check_stop(req, ids[cut:], Letters()) == (before + stop_len - cut, stopped(stop)), cut


def test_prompt_is_not_searched() -> None:
    assert check_stop(make([], stop=("cd", "bc")), letters("d"), Letters()) == (1, None)


def test_of_two_strings_completed_by_one_token_the_first_in_the_text_is_matched() -> None:
    assert check_stop(make([], stop=("world", "lo w", "zz")), [400], Letters()) == (1, stopped("lo w"))


def test_the_string_completed_by_an_earlier_token_wins() -> None:
    assert check_stop(make([], stop=("abcd", "bc")), letters("abcd"), Letters()) == (3, stopped("bc"))


def test_a_character_cut_in_two_tokens() -> None:
    assert check_stop(make([200], stop=("ä",)), [201, 100], Letters()) == (1, stopped("ä"))
    assert check_stop(make([], stop=("ä",)), [200, 100, 201], Letters()) == (3, None)


def test_special_tokens_are_text_only_when_they_are_shown() -> None:
    run = [*letters("x"), 300, *letters("y")]
    assert check_stop(make([], stop=("xy",)), run, Letters()) == (3, stopped("xy"))
    shown = make([], stop=("xy", "<s>"), skip_special_tokens=False)
    assert check_stop(shown, run, Letters()) == (2, stopped("<s>"))


def test_ignored_eos_is_a_token_like_any_other() -> None:
    req = make([])
    req.stop_ids = frozenset()
    assert check_stop(req, [STOP_ID, STOP_ID], None) == (2, None)
