"""A grammar that begins where the reasoning of an answer ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from sglang.srt.constrained.base_grammar import Grammar, allocate_masks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Phase(Enum):
    """What the next token of an answer may be."""

    MAY_THINK = auto()  # the marker that opens a thought, or the grammar's first token
    THINKING = auto()  # any text; the marker that closes the thought
    ANSWERING = auto()  # what the grammar says


@dataclass(frozen=True, slots=True)
class ThoughtMarkers:
    """Token ids by which thoughts are known: ``enable`` in a prompt asks for them, ``start`` and ``end`` enclose one,
    ``turn`` begins a message."""

    enable: int
    start: int
    end: int
    turn: int

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerFast) -> ThoughtMarkers | None:
        """Those of Gemma 4, None if the tokenizer lacks one of them."""
        ids = {str(token): token_id for token_id, token in tokenizer.added_tokens_decoder.items()}
        names = ("<|think|>", "<|channel>", "<channel|>", "<|turn>")
        return cls(*(ids[name] for name in names)) if all(name in ids for name in names) else None

    def phase(self, prompt: Sequence[int]) -> Phase:
        """Where an answer to ``prompt`` begins. A template may leave a thought open, or close an empty one."""
        for token in reversed(prompt):
            if token == self.start:
                return Phase.THINKING
            if token == self.end:
                return Phase.ANSWERING
            if token == self.turn:
                break
        return Phase.MAY_THINK if self.enable in prompt else Phase.ANSWERING


class ReasonerGrammar:
    """``grammar`` behind the thought. Within the thought every token is allowed but ``stop_ids``, which would end the
    answer before it begins."""

    def __init__(
        self, grammar: Grammar, phase: Phase, markers: ThoughtMarkers, stop_ids: Sequence[int], vocab_size: int
    ) -> None:
        self._grammar = grammar
        self._markers = markers
        self._phases = [phase]  # before the first token, and after each; the last one is where the answer stands
        self._thought_mask = allocate_masks(1, vocab_size)[0]
        for token in stop_ids:
            self._thought_mask[token // 32] &= ~_bit(token)

    @property
    def phase(self) -> Phase:
        return self._phases[-1]

    def accept(self, token_id: int) -> bool:
        phase = self.phase
        if phase is Phase.THINKING:
            phase = Phase.ANSWERING if token_id == self._markers.end else Phase.THINKING
        elif phase is Phase.MAY_THINK and token_id == self._markers.start:
            phase = Phase.THINKING
        elif self._grammar.accept(token_id):
            phase = Phase.ANSWERING
        else:
            return False
        self._phases.append(phase)
        return True

    def fill_mask(self, masks: torch.Tensor, row: int) -> None:
        if self.phase is Phase.THINKING:
            masks[row] = self._thought_mask
            return
        self._grammar.fill_mask(masks, row)
        if self.phase is Phase.MAY_THINK:
            masks[row, self._markers.start // 32] |= _bit(self._markers.start)

    def rollback(self, num_tokens: int) -> None:
        before = self._phases[-1 - num_tokens :]
        # a token is the grammar's if it led to an answer and was not the end of a thought
        inner = sum(new is Phase.ANSWERING and old is not Phase.THINKING for old, new in pairwise(before))
        del self._phases[len(self._phases) - num_tokens :]
        if inner:
            self._grammar.rollback(inner)

    @property
    def is_terminated(self) -> bool:
        return self._grammar.is_terminated

    def fork(self) -> ReasonerGrammar:
        other = ReasonerGrammar(self._grammar.fork(), self.phase, self._markers, (), 1)
        other._phases = list(self._phases)
        other._thought_mask = self._thought_mask
        return other


def _bit(token: int) -> int:
    """The token's bit in its word, as int32 has it."""
    bit = 1 << (token % 32)
    return bit - (1 << 32) if bit == 1 << 31 else bit
