"""Log-probabilities of the messages of a response: of their tokens, and not of those of thoughts, calls and marks."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Any

from sglang.srt.entrypoints.chat_output import AnswerFormat
from sglang.srt.entrypoints.openai_logprobs import chat_logprobs
from sglang.srt.managers.detokenizer_manager import TokenPieces
from sglang.srt.sampling.logprobs import TokenLogprobs


class _Place(Enum):
    MESSAGE = auto()
    THOUGHT = auto()
    CALL = auto()


class MessageLogprobs:
    """Tokens of one answer, message by message. A thought or a call begins a new one; one of white space is none."""

    def __init__(self, pieces: TokenPieces, answer_format: AnswerFormat) -> None:
        self._pieces = pieces
        self._place = _Place.THOUGHT if answer_format.thought_begun else _Place.MESSAGE
        self._opens: dict[int | None, _Place] = {}
        self._closes: dict[int | None, _Place] = {}
        if answer_format.thought_tokens is not None:
            self._opens[answer_format.thought_tokens.open_id] = _Place.THOUGHT
            self._closes[answer_format.thought_tokens.close_id] = _Place.THOUGHT
        if answer_format.tools and answer_format.format is not None:
            call_open, call_close, *_ = answer_format.format.call_markers
            self._opens[pieces.token_id(call_open)] = _Place.CALL
            self._closes[pieces.token_id(call_close)] = _Place.CALL
        self._messages: list[list[TokenLogprobs]] = [[]]
        self._has_text = False

    def read(self, entries: Sequence[TokenLogprobs]) -> None:
        """The next tokens of the answer."""
        for entry in entries:
            token_id = entry.token_id
            if token_id in self._opens:
                self._place = self._opens[token_id]
                self._begin_message()
            elif self._closes.get(token_id) is self._place:
                self._place = _Place.MESSAGE
            elif self._place is _Place.MESSAGE and token_id not in self._pieces.special_ids:
                self._messages[-1].append(entry)
                self._has_text = self._has_text or bool(self._pieces.piece(token_id).strip())

    def of_message(self, number: int, first: int) -> list[dict[str, Any]]:
        """Entries of a message (from 0), as far as it has come, from its token ``first`` (from 0) on."""
        if number >= len(self._messages):
            return []
        shown: list[dict[str, Any]] = chat_logprobs(self._messages[number][first:], self._pieces)["content"]
        return shown

    def _begin_message(self) -> None:
        if self._has_text:
            self._messages.append([])
        else:
            self._messages[-1].clear()
        self._has_text = False
