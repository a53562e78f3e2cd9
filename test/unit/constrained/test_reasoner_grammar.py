"""Where reasoning ends and a grammar begins, token by token and back again."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from sglang.srt.constrained.base_grammar import allocate_masks
from sglang.srt.constrained.reasoner_grammar import Phase, ReasonerGrammar, ThoughtMarkers
from sglang.srt.utils.embedded import EmbeddedModel
from sglang.srt.utils.hf_transformers.tokenizer import load_tokenizer

VOCAB, ENABLE, START, END, TURN, STOP, A, B = 64, 9, 31, 8, 5, 63, 40, 41
MARKERS = ThoughtMarkers(ENABLE, START, END, TURN)


class Word:
    """A, then B, then STOP."""

    word = (A, B, STOP)

    def __init__(self, place: int = 0) -> None:
        self.place = place

    def accept(self, token_id: int) -> bool:
        if self.is_terminated or token_id != self.word[self.place]:
            return False
        self.place += 1
        return True

    def fill_mask(self, masks, row) -> None:
        masks[row] = 0
        token = self.word[self.place]
        masks[row, token // 32] = (1 << (token % 32)) - (1 << 32 if token % 32 == 31 else 0)

    def rollback(self, num_tokens: int) -> None:
        assert 0 < num_tokens <= self.place
        self.place -= num_tokens

    @property
    def is_terminated(self) -> bool:
        return self.place == len(self.word)

    def fork(self) -> Word:
        return Word(self.place)


def make(phase: Phase) -> ReasonerGrammar:
    return ReasonerGrammar(Word(), phase, MARKERS, [STOP], VOCAB)


def allowed(grammar: ReasonerGrammar) -> set[int]:
    masks = allocate_masks(2, VOCAB)
    grammar.fill_mask(masks, 1)
    assert masks[0].tolist() == [-1, -1]
    return {t for t in range(VOCAB) if int(masks[1, t // 32]) >> (t % 32) & 1}


def test_a_thought_is_free_but_cannot_end_the_answer() -> None:
    grammar = make(Phase.THINKING)
    assert allowed(grammar) == set(range(VOCAB)) - {STOP}
    for token in (A, 3, START, B):
        assert grammar.accept(token)
    assert allowed(grammar) == set(range(VOCAB)) - {STOP}
    assert grammar.accept(END) and allowed(grammar) == {A}
    assert not grammar.accept(B) and not grammar.accept(END) and not grammar.accept(START)
    assert grammar.accept(A) and grammar.accept(B) and not grammar.is_terminated
    assert grammar.accept(STOP) and grammar.is_terminated


def test_an_answer_that_may_think_thinks_or_answers_at_once() -> None:
    grammar = make(Phase.MAY_THINK)
    assert allowed(grammar) == {START, A}
    assert not grammar.accept(B) and not grammar.accept(END)
    assert grammar.accept(A) and allowed(grammar) == {B}
    grammar.rollback(1)
    assert allowed(grammar) == {START, A}
    assert grammar.accept(START) and allowed(grammar) == set(range(VOCAB)) - {STOP}
    assert grammar.accept(END) and allowed(grammar) == {A}
    grammar.rollback(2)
    assert allowed(grammar) == {START, A}


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(list(Phase)), st.lists(st.sampled_from([START, END, A, B, STOP, 3]), max_size=12), st.data())
def test_rolling_back_is_as_if_it_had_not_been(phase: Phase, tokens: list[int], data: st.DataObject) -> None:
    grammar = make(phase)
    taken = [token for token in tokens if grammar.accept(token)]
    copy = grammar.fork()
    kept = data.draw(st.integers(0, len(taken)))
    if kept < len(taken):
        grammar.rollback(len(taken) - kept)
    fresh = make(phase)
    assert all(fresh.accept(token) for token in taken[:kept])
    assert (grammar.phase, grammar.is_terminated) == (fresh.phase, fresh.is_terminated)
    if not fresh.is_terminated:
        assert allowed(grammar) == allowed(fresh)
    for token in taken[kept:]:
        assert grammar.accept(token)
    assert (copy.phase, copy.is_terminated) == (grammar.phase, grammar.is_terminated), "a fork is not rolled back"


@pytest.mark.parametrize(
    "prompt, phase",
    [
        ([2, TURN, 3], Phase.ANSWERING),
        ([2, TURN, ENABLE, 3, TURN], Phase.MAY_THINK),
        ([2, TURN, ENABLE, TURN, START, 3], Phase.THINKING),
        ([2, TURN, START, 3], Phase.THINKING),
        ([2, TURN, ENABLE, TURN, START, 3, END], Phase.ANSWERING),
        ([2, ENABLE, TURN, START, 3, END, TURN], Phase.MAY_THINK),
        ([], Phase.ANSWERING),
    ],
)
def test_what_a_prompt_leaves_open(prompt: list[int], phase: Phase) -> None:
    assert MARKERS.phase(prompt) is phase


def test_markers_of_tokenizers(trained_pair: EmbeddedModel, byte_fallback_free: PreTrainedTokenizerFast) -> None:
    tokenizer = load_tokenizer(trained_pair.target, trust_remote_code=False)
    markers = ThoughtMarkers.of(tokenizer)
    assert markers is not None
    names = [tokenizer.convert_ids_to_tokens(i) for i in (markers.enable, markers.start, markers.end, markers.turn)]
    assert names == ["<|think|>", "<|channel>", "<channel|>", "<|turn>"]
    assert ThoughtMarkers.of(byte_fallback_free) is None


@pytest.fixture
def byte_fallback_free() -> PreTrainedTokenizerFast:
    """A tokenizer without any marker."""
    from tokenizers import Tokenizer, models

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab={"a": 0, "<u>": 1}, merges=[])))
