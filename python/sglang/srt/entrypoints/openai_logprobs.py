"""Log-probabilities as OpenAI's routes show them: one entry for each token, with the text it stands for."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from sglang.srt.managers.detokenizer_manager import TokenPieces
from sglang.srt.sampling.logprobs import TokenLogprob, TokenLogprobs


def chat_logprobs(entries: Sequence[TokenLogprobs], pieces: TokenPieces) -> dict[str, Any]:
    """``logprobs`` of a choice of a chat. A token that is part of a character is told by its ``bytes``."""

    def shown(pair: TokenLogprob) -> dict[str, Any]:
        logprob, token_id = pair
        piece = pieces.piece(token_id)
        return {"token": piece.decode(errors="replace"), "logprob": logprob, "bytes": list(piece)}

    content = []
    for entry in entries:
        assert entry.logprob is not None, "only the first token of a prompt has none"
        top = [shown(pair) for pair in entry.top]
        content.append({**shown((entry.logprob, entry.token_id)), "top_logprobs": top})
    return {"content": content, "refusal": None}


class TextLogprobs:
    """``logprobs`` of a choice of a text completion, from its first token to its last."""

    def __init__(self, pieces: TokenPieces, hidden_ids: frozenset[int]) -> None:
        """``hidden_ids``: tokens that the text does not show."""
        self._pieces = pieces
        self._hidden_ids = hidden_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def of_prompt(self, entries: Sequence[TokenLogprobs], text: str) -> dict[str, Any]:
        """Entries of all tokens of a prompt whose ``text`` is shown before the answer."""
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            piece = self._pieces.piece(entry.token_id)
            # some of the special tokens are written in the text, others are what the tokenizer put around it
            is_added = entry.token_id in self._pieces.special_ids
            if not is_added or text.startswith(piece.decode(errors="replace"), self._offset):
                self._offset += len(self._utf8.decode(piece))
        self._offset = len(text)
        self._utf8.reset()
        return self._shaped(entries, offsets)

    def of_answer(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Entries of the next tokens of the answer."""
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            if entry.token_id not in self._hidden_ids:
                self._offset += len(self._utf8.decode(self._pieces.piece(entry.token_id)))
        return self._shaped(entries, offsets)

    def _shaped(self, entries: Sequence[TokenLogprobs], offsets: list[int]) -> dict[str, Any]:
        return {
            "tokens": [self._text(entry.token_id) for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float] | None:
        """The most likely tokens, best first, and in any case the token itself."""
        if entry.logprob is None:
            return None
        best: dict[str, float] = {}
        for logprob, token_id in (*entry.top, (entry.logprob, entry.token_id)):
            best.setdefault(self._text(token_id), logprob)
        return best

    def _text(self, token_id: int) -> str:
        """A token's text; of a token that is part of a character its bytes, so that no two look alike."""
        piece = self._pieces.piece(token_id)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def joined_logprobs(parts: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """``logprobs`` of neighbouring pieces as one; None for none."""
    if not parts:
        return None
    return {name: [value for part in parts for value in part[name]] for name in parts[0]}
