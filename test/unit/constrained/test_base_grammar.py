"""Masks of a block of drafts: every legal node has the mask of its own prefix, and the grammar ends where it began."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.constrained.base_grammar import allocate_masks, fill_block

VOCAB, OPEN, CLOSE, END = 40, 0, 1, 39


class Brackets:
    """Balanced brackets, then END. Token 32 + d may stand at depth d, so that masks differ and use a second word."""

    def __init__(self, tokens: tuple[int, ...] = ()) -> None:
        self.tokens = list(tokens)

    @property
    def depth(self) -> int:
        return self.tokens.count(OPEN) - self.tokens.count(CLOSE)

    @property
    def is_terminated(self) -> bool:
        return END in self.tokens

    def allowed(self) -> set[int]:
        if self.is_terminated:
            return set()
        closing = {CLOSE} if self.depth else {END} if self.tokens else set()
        return {OPEN, 32 + min(self.depth, 6)} | closing

    def accept(self, token_id: int) -> bool:
        if token_id not in self.allowed():
            return False
        self.tokens.append(token_id)
        return True

    def fill_mask(self, masks: torch.Tensor, row: int) -> None:
        assert not self.is_terminated
        words = [sum(1 << (t % 32) for t in self.allowed() if t // 32 == word) for word in range(2)]
        masks[row] = torch.tensor([word - (1 << 32) if word >> 31 else word for word in words], dtype=torch.int32)

    def rollback(self, num_tokens: int) -> None:
        assert 0 < num_tokens <= len(self.tokens)
        del self.tokens[-num_tokens:]

    def fork(self) -> Brackets:
        return Brackets(tuple(self.tokens))


def bits(row: torch.Tensor) -> set[int]:
    return {t for t in range(VOCAB) if int(row[t // 32]) >> (t % 32) & 1}


def check(grammar: Brackets, tokens: list[int], parents: list[int]) -> int:
    """Number of legal nodes."""
    before = list(grammar.tokens)
    masks = allocate_masks(len(tokens), VOCAB)
    fill_block(grammar, tokens, parents, masks)
    assert grammar.tokens == before
    legal = 0
    states: dict[int, Brackets | None] = {0: grammar}
    for node in range(len(tokens)):
        if node:
            above = states[parents[node]]
            fork = None if above is None else above.fork()
            states[node] = fork if fork is not None and fork.accept(tokens[node]) else None
        state = states[node]
        if state is None or state.is_terminated:
            assert bits(masks[node]) == set(range(VOCAB)), "rows that are never used stay as they were"
        else:
            legal += 1
            assert bits(masks[node]) == state.allowed()
    return legal


def test_a_chain_that_leaves_the_grammar() -> None:
    assert check(Brackets((OPEN,)), [OPEN, OPEN, CLOSE, 33, 5, CLOSE], [0, 0, 1, 2, 3, 4]) == 4


def test_a_chain_that_goes_on_behind_the_end() -> None:
    assert check(Brackets((OPEN,)), [OPEN, CLOSE, END, END, OPEN], [0, 0, 1, 2, 3]) == 2


def test_a_chain_from_the_beginning_of_an_answer() -> None:
    assert check(Brackets(), [7], [0]) == 1


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_tree(data: st.DataObject) -> None:
    num = data.draw(st.integers(1, 12))
    parents = [0, *(data.draw(st.integers(0, node - 1)) for node in range(1, num))]
    tokens = [data.draw(st.sampled_from([OPEN, CLOSE, END, 32, 33, 34, 5])) for _ in range(num)]
    check(Brackets((OPEN,)), tokens, parents)


@pytest.mark.parametrize("length", [2, 3000])
def test_long_chains(length: int) -> None:
    assert check(Brackets((OPEN,)), [OPEN] * length, [0, *range(length - 1)]) == length
