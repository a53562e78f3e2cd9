"""Stop regexes: against Python's ``re`` on every prefix, in linear time, and the same for every cut of a text."""

from __future__ import annotations

import re
import time
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.managers.detokenizer_manager import IncrementalDetokenizer
from sglang.srt.managers.io_struct import FinishReason
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.stop_checker import check_stop
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.sampling.stop_regex import RegexSearch, RegexStops, StopRegex

ATOMS = st.sampled_from(["a", "b", "c", ".", "[ab]", "[^a]", r"\w", r"\.", "(?:ab)", r"[\n-b]", "ä"])
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda p: f"({p[0]}|{p[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{0,3}", "{2,}", "*?", "+?", "??"])).map(
            lambda p: f"(?:{p[0]}){p[1]}"
        ),
    ),
    max_leaves=6,
)
TEXTS = st.text(alphabet="abcä.\n", max_size=14)


@settings(max_examples=300, deadline=None)
@given(PATTERNS, TEXTS, st.booleans())
def test_every_prefix_ends_in_a_match_where_re_finds_one(pattern: str, text: str, anchored: bool) -> None:
    search, reference = RegexSearch(StopRegex.compile(f"^(?:{pattern})" if anchored else pattern)), re.compile(pattern)
    for end, char in enumerate(text, start=1):
        begins = [b for b in range(1 if anchored else end) if reference.fullmatch(text, b, end)]
        assert search.feed(char) == (end - begins[0] if begins else None)


@settings(max_examples=200, deadline=None)
@given(PATTERNS, TEXTS, TEXTS)
def test_open_end_covers_every_match_to_come(pattern: str, before: str, after: str) -> None:
    """What a stream shows at once can never be part of a later match."""
    search = RegexSearch(StopRegex.compile(pattern))
    for char in before:
        search.feed(char)
    shown_len = len(before) - search.open_len
    for end, char in enumerate(before + after, start=1):
        if end > len(before):
            length = search.feed(char)
            assert length is None or end - length >= shown_len


def test_no_text_makes_a_pattern_slow() -> None:
    search = RegexSearch(StopRegex.compile("(a+)+(a|aa)*b"))
    start = time.perf_counter()
    for char in "a" * 5000:
        search.feed(char)
    assert time.perf_counter() - start < 5.0  # re needs 2 ** 5000 steps


@pytest.mark.parametrize(
    ("pattern", "text", "length"),
    [
        (r"\n\n", "a\n\n", 2),
        ("(?i)stop", "STOP", 4),
        (r"\d{3}", "x123", 3),
        ("a{,2}b", "aab", 3),
        ("a{b", "a{b", 3),
        ("[]a]+x", "]ax", 3),
        (r"\x41B", "AB", 2),
        ("(?P<n>a)b", "ab", 2),
        ("#.x", "#yx", 3),
    ],
)
def test_forms_of_patterns(pattern: str, text: str, length: int) -> None:
    search = RegexSearch(StopRegex.compile(pattern))
    assert [search.feed(char) for char in text] == [None] * (len(text) - 1) + [length]


@pytest.mark.parametrize(
    ("pattern", "what"),
    [
        ("(a", "is not a regular expression"),
        ("a$", r"has \$"),
        (r"\bx", r"has \\b"),
        (r"(a)\1", r"has \\1"),
        ("(?=a)b", "has"),
        ("(?<!a)b", "has"),
        ("a{5000}", "a repetition of more than"),
        ("((a{50}){50}){50}", "too large"),
        ("a" * 2000, "at most 1024 characters"),
        ("(?i:a)b", "has"),
        ("(" * 400 + "a" + ")" * 400, "is not a regular expression"),
        ("", "non-empty patterns"),
    ],
)
def test_what_is_refused(pattern: str, what: str) -> None:
    with pytest.raises(ValueError, match=f"stop_regex .*{what}"):
        SamplingParams.from_dict({"stop_regex": pattern})


def test_the_match_that_ends_first_wins() -> None:
    stops = RegexStops(("bcd+", "abc", "c"))
    match = stops.feed("abcd")
    assert match is not None and (match.pattern, match.end, match.length) == ("abc", 3, 3)


class Bytes:
    """Token ``i`` is the byte ``i``."""

    special_ids = frozenset({0})

    def piece(self, token_id: int) -> bytes:
        return bytes([token_id])


@settings(max_examples=150, deadline=None)
@given(PATTERNS, st.text(alphabet="abcä.\n", min_size=1, max_size=12), st.data())
def test_ids_and_text_are_cut_at_the_same_place_for_every_cut(pattern: str, text: str, data: st.DataObject) -> None:
    """Runs of any length in the scheduler, deltas of any length in the stream: the first end wins, the match is cut."""
    reference = re.compile(pattern)
    ends = [e for e in range(1, len(text) + 1) if any(reference.fullmatch(text, b, e) for b in range(e))]
    run = list(text.encode())
    minimum = data.draw(st.integers(0, 4))
    ends = [e for e in ends if len(text[:e].encode()) >= minimum]
    params = SamplingParams(stop_regex=(pattern,), min_new_tokens=minimum)
    req = Req("r", array("i"), 0, params, 99, frozenset(), 0, False, 0.0, regex_stops=RegexStops((pattern,)))
    shown, detokenizer = "", IncrementalDetokenizer(Bytes(), params)  # type: ignore[arg-type]
    finish: FinishReason | None = None
    while run and finish is None:
        size = data.draw(st.integers(1, len(run)))
        kept, finish = check_stop(req, run[:size], Bytes())  # type: ignore[arg-type]
        shown += detokenizer.feed(tuple(run[:kept]), finish)
        req.token_ids.extend(run[:kept])
        run = run[kept:]
    if not ends:
        assert finish is None and (shown + detokenizer.feed((), FinishReason("length", length=9))) == text
        return
    begin = next(b for b in range(ends[0]) if reference.fullmatch(text, b, ends[0]))
    assert finish == FinishReason("stop", matched=pattern)
    assert bytes(list(req.token_ids)).decode() == text[: ends[0]] and shown == text[:begin]
