"""Randomised load for a while: no wrong token, memory balanced and flat. `scripts/soak.py` runs it for longer."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from fixtures.soak import VARIANTS, Report, SoakEngine, engine_load, soak
from fixtures.soak_cases import Case, make_cases
from fixtures.soak_server import server_load
from sglang.srt.managers.io_struct import TokenOut

# the length in seconds of all of it together, of which the server has a third; it lasts until something has happened
SECONDS = float(os.environ.get("SOAK_SECONDS", "180"))
MAX_GROWTH_BYTES = 48e6
PARTS = {
    "chains": ("plain", "adaptive", "overlapped", "in turn", "pages"),
    "trees and drawn drafts": ("trees", "trees, pages", "sampled drafts"),
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 300), pytest.mark.usefixtures("one_thread")]


def test_every_engine_is_in_a_part() -> None:
    assert sorted(name for names in PARTS.values() for name in names) == sorted(VARIANTS)


def with_another(what: str, out: TokenOut) -> TokenOut:
    assert out.finish_reason is not None
    if what == "token":
        return replace(out, token_ids=(*out.token_ids[:-1], out.token_ids[-1] ^ 1))
    if what == "logprob":
        return replace(out, logprobs=(replace(out.logprobs[0], logprob=-9.0), *out.logprobs[1:]))
    if what == "hidden state":
        zeros = tuple(tuple(0.0 for _ in row) for row in out.hidden_states[-1])
        return replace(out, hidden_states=(*out.hidden_states[:-1], zeros))
    return replace(out, finish_reason=replace(out.finish_reason, type="stop", matched=-1))


@pytest.fixture(scope="module")
def few_cases() -> list[Case]:
    return [case for group in make_cases(12, 5, max_new_tokens=8) for case in group]


@pytest.mark.parametrize("what", ["token", "logprob", "hidden state", "reason"])
def test_what_is_wrong_is_noticed(what: str, few_cases: list[Case]) -> None:
    has = {"logprob": lambda out: out.logprobs, "hidden state": lambda out: out.hidden_states}
    cases = [case for case in few_cases if what not in has or has[what](case.answer)]
    assert cases
    for case in cases:
        case.check([case.answer], is_cut=False)
        with pytest.raises(AssertionError):
            replace(case, answer=with_another(what, case.answer)).check([case.answer], is_cut=False)


def test_an_engine_that_answers_otherwise_is_noticed(few_cases: list[Case]) -> None:
    wrong = [[replace(case, answer=with_another("token", case.answer))] for case in few_cases]
    with pytest.raises(AssertionError, match="^Case"):
        SoakEngine("pages", VARIANTS["pages"], wrong, seed=1).turn(30.0)


@pytest.mark.parametrize("part", PARTS)
def test_randomised_load(part: str) -> None:
    def enough(report: Report) -> bool:
        finished = [counts.finished for counts in report.counts.values()]
        return min(finished, default=0) > 0 and report.total("aborted") > 0 and report.total("retractions") > 0

    report = soak(SECONDS / 3, 5, [engine_load(name) for name in PARTS[part]], enough=enough)
    assert report.growth_bytes < MAX_GROWTH_BYTES, report


def test_clients_that_come_and_go() -> None:
    report = soak(
        SECONDS / 3, 5, [server_load], enough=lambda report: min(report.total("finished"), report.total("aborted")) > 0
    )
    assert report.growth_bytes < MAX_GROWTH_BYTES, report
