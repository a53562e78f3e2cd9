"""Token ids to text, piece by piece: the same text for every way of cutting the ids into deltas.

A token is a piece of bytes that does not depend on its neighbours, so decoding is one table look-up per token and one
incremental UTF-8 decoder per request. Bytes that cannot be UTF-8 become U+FFFD as Python replaces them; a character
that is merely incomplete waits for its other tokens.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.io_struct import FinishReason
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.sampling.stop_regex import RegexStops
from sglang.srt.sampling.thought_budget import ThoughtTokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# a thought: <|channel>thought\n ... <channel|>
_THOUGHT_OPEN, _THOUGHT_HEADER, _THOUGHT_CLOSE = "<|channel>", "thought\n", "<channel|>"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenPieces:
    """Bytes that each token id adds to a text, looked up once per id. Shared by all requests of a tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._added = {token.content: i for i, token in tokenizer.added_tokens_decoder.items()}
        self.special_ids = frozenset(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
        decoder = tokenizer.backend_tokenizer.decoder
        kinds = _decoder_kinds(json.loads(decoder.__getstate__())) if decoder is not None else frozenset()
        self._byte_fallback = "ByteFallback" in kinds
        self._byte_level = _byte_level_alphabet() if "ByteLevel" in kinds else {}
        # Decoders may treat the first token of a text in another way (drop its space); a piece is what follows a token.
        self._anchor_id = tokenizer.encode("a", add_special_tokens=False)[-1]
        self._anchor_text = self._decode([self._anchor_id])
        self._pieces: dict[int, bytes] = {}

    @property
    def thought_tokens(self) -> ThoughtTokens | None:
        """The marks around thoughts, None when the vocabulary has none."""
        ids: list[int | None] = [self._added.get(mark) for mark in (_THOUGHT_OPEN, _THOUGHT_CLOSE)]
        if ids[0] is None or ids[1] is None:
            return None
        header = self._tokenizer.encode(_THOUGHT_HEADER, add_special_tokens=False)
        return ThoughtTokens(ids[0], ids[1], len(header))

    def token_id(self, token: str) -> int | None:
        """Id of a token that was added to the vocabulary by its whole text, None if there is no such token."""
        return self._added.get(token)

    def piece(self, token_id: int) -> bytes:
        """UTF-8 bytes of one token; part of a character for byte tokens, empty for an id without a token."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._look_up(token_id)
        return piece

    def _look_up(self, token_id: int) -> bytes:
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:
            return b""
        byte_token = _BYTE_TOKEN.fullmatch(token) if self._byte_fallback else None
        if byte_token is not None:
            return bytes([int(byte_token[1], 16)])
        if self._byte_level and all(char in self._byte_level for char in token):
            return bytes(self._byte_level[char] for char in token)
        return self._decode([self._anchor_id, token_id])[len(self._anchor_text) :].encode()

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


class IncrementalDetokenizer:
    """Text of one request as it grows. ``feed`` returns what may be shown now; the results join to the final text.

    Text that could be the beginning of a stop string, or of a match of a stop regex, is kept back until it is certain
    that it is not.
    """

    def __init__(
        self, pieces: TokenPieces, params: SamplingParams, shown_tokens: tuple[str, ...] | None = None
    ) -> None:
        """``shown_tokens``: the special tokens to show, whatever ``params`` says; None does what that says."""
        self._pieces = pieces
        self._hidden_ids = pieces.special_ids if params.skip_special_tokens else frozenset()
        if shown_tokens is not None:
            self._hidden_ids = pieces.special_ids - {pieces.token_id(token) for token in shown_tokens}
        self._trim = not params.no_stop_trim
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stop_strings = params.stop
        self._stops = tuple(_StopPrefix(stop) for stop in params.stop) if self._trim else ()
        self._regexes = RegexStops(params.stop_regex) if self._trim and params.stop_regex else None
        self._held = ""

    def feed(self, token_ids: tuple[int, ...], finish: FinishReason | None = None) -> str:
        """Add the next ids, and with ``finish`` end the text: no ``feed`` may follow."""
        if finish is None:
            return self._release(self._decode(token_ids, final=False))
        matched = finish.matched if self._trim and finish.type == "stop" else None
        if isinstance(matched, str):
            return self._cut(token_ids, matched)
        if matched is not None and token_ids and token_ids[-1] == matched:
            token_ids = token_ids[:-1]
        return self._held + self._decode(token_ids, final=True)

    def _decode(self, token_ids: tuple[int, ...], *, final: bool) -> str:
        piece, hidden = self._pieces.piece, self._hidden_ids
        return self._utf8.decode(b"".join(piece(i) for i in token_ids if i not in hidden), final)

    def _release(self, text: str) -> str:
        held_len = max((stop.advance(text) for stop in self._stops), default=0)
        if self._regexes is not None:
            self._regexes.feed(text)
            held_len = max(held_len, self._regexes.open_len)
        text = self._held + text
        shown_len = len(text) - held_len
        self._held = text[shown_len:]
        return text[:shown_len]

    def _cut(self, token_ids: tuple[int, ...], stop: str) -> str:
        """Text before the stop string, or the match of the stop regex, that the last token completed (an earlier one
        did not end the request)."""
        fresh = self._decode(token_ids[:-1], final=False)
        before, piece = self._held + fresh, self._decode(token_ids[-1:], final=True)
        text = before + piece
        if stop not in self._stop_strings:
            assert self._regexes is not None, f"{stop!r} is no stop string of this request"
            self._regexes.feed(fresh)
            match = self._regexes.feed(piece)
            return text if match is None else text[: len(before) + match.end - match.length]
        at = text.find(stop, max(0, len(before) - len(stop) + 1))
        return text if at < 0 else text[:at]


class _StopPrefix:
    """How much of one stop string the end of a text matches (Knuth-Morris-Pratt), in constant time per character."""

    __slots__ = ("_stop", "_border", "_matched_len")

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._matched_len = 0
        # _border[i]: length of the longest proper prefix of stop[:i + 1] that is also its suffix
        self._border = [0] * len(stop)
        length = 0
        for i in range(1, len(stop)):
            length = self._extend(length, stop[i])
            self._border[i] = length

    def advance(self, text: str) -> int:
        """Take more text; return the length of its end that could still become the stop string."""
        length = self._matched_len
        for char in text:
            length = self._extend(length, char)
            if length == len(self._stop):
                length = self._border[-1]
        self._matched_len = length
        return length

    def _extend(self, length: int, char: str) -> int:
        while length and self._stop[length] != char:
            length = self._border[length - 1]
        return length + 1 if self._stop[length] == char else 0


def _decoder_kinds(decoder: dict[str, Any]) -> frozenset[str]:
    nested = frozenset().union(*(_decoder_kinds(part) for part in decoder.get("decoders", ())))
    return nested | {decoder["type"]}


def _byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable Latin-1 stands for itself, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return alphabet
