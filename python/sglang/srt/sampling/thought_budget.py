"""How much of its answer a request may think: the thought channel as a state machine over tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ThoughtTokens:
    """Tokens that open and close a thought, and how many tokens its header line has."""

    open_id: int
    close_id: int
    header_len: int


@dataclass(frozen=True, slots=True)
class ThoughtState:
    """Where a sequence of tokens stands. ``used``: tokens inside thoughts, header lines not counted; ``inside``: tokens
    since the thought that is open was opened, None outside."""

    used: int = 0
    inside: int | None = None

    def after(self, token_id: int, tokens: ThoughtTokens) -> ThoughtState:
        if token_id == tokens.open_id:
            return ThoughtState(self.used, 0)
        if self.inside is None:
            return self
        if token_id == tokens.close_id:
            return ThoughtState(self.used)
        return ThoughtState(self.used + (self.inside >= tokens.header_len), self.inside + 1)


class ThoughtBudget:
    """One request's budget: says at which prefixes nothing but the end of the thought may follow.

    Thoughts count from the answer's first token; one that the prompt left open goes on.
    """

    __slots__ = ("tokens", "_max_tokens", "_state", "_seen_len")

    def __init__(self, tokens: ThoughtTokens, max_tokens: int, prompt_ids: Iterable[int]) -> None:
        self.tokens = tokens
        self._max_tokens = max_tokens
        inside: int | None = None
        for token_id in prompt_ids:
            inside = ThoughtState(0, inside).after(token_id, tokens).inside
        self._state = ThoughtState(0, inside)
        self._seen_len = 0

    def state(self, token_ids: Sequence[int], prompt_len: int) -> ThoughtState:
        """Where a sequence stands; it may only have grown since the last call."""
        for index in range(prompt_len + self._seen_len, len(token_ids)):
            self._state = self._state.after(token_ids[index], self.tokens)
        self._seen_len = len(token_ids) - prompt_len
        return self._state

    def must_close(self, state: ThoughtState) -> bool:
        is_in_body = state.inside is not None and state.inside >= self.tokens.header_len
        return is_in_body and state.used >= self._max_tokens
