"""Text that arrives in pieces, read from stop to stop without ever reading a character twice."""

from __future__ import annotations

import re


class StopSet:
    """Where reading pauses: single characters and markers. Of two that begin together the longer one counts."""

    __slots__ = ("_pattern", "_markers", "max_len")

    def __init__(self, *stops: str) -> None:
        self._pattern = re.compile("|".join(re.escape(stop) for stop in sorted(stops, key=len, reverse=True)))
        self._markers = tuple(stop for stop in stops if len(stop) > 1)
        self.max_len = max((len(marker) for marker in self._markers), default=1)

    def search(self, text: str, pos: int) -> re.Match[str] | None:
        return self._pattern.search(text, pos)

    def held_len(self, text: str, pos: int) -> int:
        """Length of the end of ``text`` that may still become a marker."""
        for length in range(min(self.max_len - 1, len(text) - pos), 0, -1):
            end = text[-length:]
            if any(marker.startswith(end) for marker in self._markers):
                return length
        return 0


class TextCursor:
    """Text of which a part has been read. What stays unread between two pieces is never longer than a marker."""

    __slots__ = ("_text", "_pos", "is_last")

    def __init__(self) -> None:
        self._text = ""
        self._pos = 0
        self.is_last = False

    def add(self, text: str, *, is_last: bool) -> None:
        self._text = self._text[self._pos :] + text
        self._pos = 0
        self.is_last = is_last

    def take(self, stops: StopSet) -> tuple[str, str | None]:
        """Text before the next stop and the stop itself, both read; None for the stop when more text is needed."""
        match = stops.search(self._text, self._pos)
        end = len(self._text) if match is None else match.start()
        if not self.is_last and end > len(self._text) - stops.max_len:
            # a marker may be on its way, and can have a stop inside
            held_at = len(self._text) - stops.held_len(self._text, self._pos)
            if held_at < end or match is None:
                end, match = held_at, None
        piece = self._text[self._pos : end]
        self._pos = end if match is None else match.end()
        return piece, None if match is None else match[0]

    def peek(self, length: int) -> str:
        """The next characters, at most ``length``, which stay unread."""
        return self._text[self._pos : self._pos + length]

    def skip(self, length: int) -> None:
        self._pos += length
