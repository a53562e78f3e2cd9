"""Requests that wait for grammars: order, sharing, time-outs, aborts and refusals, with a backend made of events."""

from __future__ import annotations

import threading
import time
from array import array
from collections import Counter

import pytest

from sglang.srt.constrained.reasoner_grammar import Phase, ReasonerGrammar, ThoughtMarkers
from sglang.srt.managers.grammar_manager import GrammarManager
from sglang.srt.managers.io_struct import FinishReason
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams


class Marked:
    """Stands for a compiled grammar; remembers what it is a copy of."""

    is_terminated = False

    def __init__(self, text: str, origin: Marked | None = None) -> None:
        self.text = text
        self.origin = origin

    def fork(self) -> Marked:
        return Marked(self.text, self)

    def accept(self, token_id: int) -> bool:
        return True

    def fill_mask(self, masks, row) -> None:
        pass

    def rollback(self, num_tokens: int) -> None:
        pass


class Gated:
    """Compiles a text when its gate is open; texts with "bad" in them are refused, with "broken" in them fail."""

    def __init__(self) -> None:
        self.gates: dict[str, threading.Event] = {}
        self.compiled: Counter[str] = Counter()

    def hold(self, text: str) -> threading.Event:
        return self.gates.setdefault(text, threading.Event())

    def compile(self, kind: str, text: str) -> Marked:
        self.compiled[text] += 1
        if text in self.gates:
            assert self.gates[text].wait(10)
        if "bad" in text:
            raise ValueError(f"{kind} cannot be used: {text}")
        if "broken" in text:
            raise KeyError(text)
        return Marked(text)


@pytest.fixture
def backend() -> Gated:
    return Gated()


def make(text: str | None, prompt: tuple[int, ...] = (1,), **params: object) -> Req:
    sampling = SamplingParams(regex=text, **params)  # type: ignore[arg-type]
    return Req("r", array("i", prompt), len(prompt), sampling, 9, frozenset(), 0, False, 0.0)


def settle(manager: GrammarManager, num: int) -> tuple[list[Req], list]:
    """Wait for ``num`` requests to leave."""
    ready, refused, end = [], [], time.monotonic() + 10
    while len(ready) + len(refused) < num:
        assert time.monotonic() < end
        manager.wait(0.5)
        some, others = manager.take_ready()
        ready += some
        refused += others
    return ready, refused


def test_only_requests_with_a_grammar_wait(backend: Gated) -> None:
    manager = GrammarManager(backend)
    assert not manager.add(make(None)) and len(manager) == 0
    req = make("a")
    assert manager.add(req) and len(manager) == 1
    ready, refused = settle(manager, 1)
    assert ready == [req] and not refused and len(manager) == 0
    assert isinstance(req.grammar, Marked) and req.grammar.text == "a"


def test_a_slow_grammar_holds_up_no_other(backend: Gated) -> None:
    gate = backend.hold("slow")
    manager = GrammarManager(backend)
    slow, quick = make("slow"), make("quick")
    manager.add(slow)
    manager.add(quick)
    ready, _ = settle(manager, 1)
    assert ready == [quick] and manager.reqs == [slow]
    gate.set()
    assert settle(manager, 1)[0] == [slow]


def test_the_same_grammar_is_compiled_once_and_shared_by_copies(backend: Gated) -> None:
    gate = backend.hold("a")
    manager = GrammarManager(backend)
    reqs = [make("a") for _ in range(3)]
    for req in reqs:
        manager.add(req)
    gate.set()
    assert settle(manager, 3)[0] == reqs
    late = make("a")
    manager.add(late)
    assert settle(manager, 1)[0] == [late]
    grammars = [req.grammar for req in (*reqs, late)]
    assert len({id(g) for g in grammars}) == 4 and len({id(g.origin) for g in grammars}) == 1  # type: ignore[union-attr]
    assert backend.compiled["a"] == 1


def test_a_bad_grammar_is_refused_with_the_reason_and_tried_again_next_time(backend: Gated) -> None:
    manager = GrammarManager(backend)
    for attempt in (1, 2):
        req = make("bad one")
        manager.add(req)
        ready, (refusal,) = settle(manager, 1)
        assert not ready and refusal.req is req and refusal.message == "regex cannot be used: bad one"
        assert backend.compiled["bad one"] == attempt


def test_a_fault_of_the_backend_ends_one_request(backend: Gated, caplog: pytest.LogCaptureFixture) -> None:
    manager = GrammarManager(backend)
    manager.add(make("broken"))
    manager.add(make("a"))
    ready, refused = settle(manager, 2)
    assert len(ready) == len(refused) == 1 and "compiling a grammar (regex) failed" in caplog.text


def test_requests_that_end_while_they_wait_are_forgotten(backend: Gated) -> None:
    gate = backend.hold("a")
    manager = GrammarManager(backend)
    left, stays = make("a"), make("a")
    manager.add(left)
    manager.add(stays)
    left.finish = FinishReason("abort")
    manager.forget_finished()
    assert manager.reqs == [stays]
    gate.set()
    assert settle(manager, 1)[0] == [stays]
    assert left.grammar is None


def test_time_out(backend: Gated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_GRAMMAR_TIMEOUT", "0.05")
    gate = backend.hold("a")
    manager = GrammarManager(backend)
    manager.add(make("a"))
    _, (refusal,) = settle(manager, 1)
    assert refusal.message == "the grammar took more than 0.05 s to compile: ask for a simpler one"
    gate.set()
    late = make("a")
    manager.add(late)
    assert settle(manager, 1)[0] == [late], "what was compiled too late serves the next request"
    assert backend.compiled["a"] == 1


def test_more_grammars_than_threads_and_than_the_cache_holds(backend: Gated) -> None:
    manager = GrammarManager(backend)
    before = threading.active_count()
    reqs = [make(f"g{i}") for i in range(300)]
    for req in reqs:
        manager.add(req)
    assert threading.active_count() <= before + 2
    ready, _ = settle(manager, 300)
    assert sorted(ready, key=reqs.index) == reqs and len(backend.compiled) == 300
    for text, times in (("g299", 1), ("g0", 2)):
        manager.add(make(text))
        settle(manager, 1)
        assert backend.compiled[text] == times


def test_without_a_backend() -> None:
    manager = GrammarManager()
    assert not manager.add(make(None))
    with pytest.raises(ValueError, match="^regex needs a grammar backend, and this server has none"):
        manager.add(make("a"))
    assert len(manager) == 0


@pytest.mark.parametrize("prompt, phase", [((5, 1), None), ((9, 5), Phase.MAY_THINK), ((5, 7), Phase.THINKING)])
def test_grammars_begin_behind_the_thought(backend: Gated, prompt: tuple[int, ...], phase: Phase | None) -> None:
    manager = GrammarManager(backend, ThoughtMarkers(9, 7, 8, 5), stop_ids=[6], vocab_size=64)
    req = make("a", prompt)
    manager.add(req)
    settle(manager, 1)
    if phase is None:
        assert isinstance(req.grammar, Marked)
    else:
        assert isinstance(req.grammar, ReasonerGrammar) and req.grammar.phase is phase
