"""Arguments of a call in Gemma 4's notation -> JSON, piece by piece.

The notation: ``{key:value,...}`` with bare keys, strings between ``<|"|>`` without escapes, nested objects and lists,
bare numbers and words. Models also write keys and strings between plain quotes; that is read as in JSON. What breaks
the rules still becomes JSON, and no text is lost: a bare word is a string, a missing value null, text beside a string
belongs to it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from sglang.srt.entrypoints.parsers.cursor import StopSet, TextCursor

QUOTE = '<|"|>'
CALL_OPEN, CALL_CLOSE, THOUGHT_OPEN = "<|tool_call>", "<tool_call|>", "<|channel>"
# outside strings these end the arguments, complete or not
_BREAKS = (CALL_OPEN, CALL_CLOSE, THOUGHT_OPEN)

_KEY = StopSet(":", ",", "}", '"', QUOTE, *_BREAKS)
_VALUE = {
    "{": StopSet(",", "}", "{", "[", '"', QUOTE, *_BREAKS),
    "[": StopSet(",", "]", "{", "[", '"', QUOTE, *_BREAKS),
}
_TAIL = {"{": StopSet(",", "}", QUOTE, *_BREAKS), "[": StopSet(",", "]", QUOTE, *_BREAKS)}
_QUOTED = StopSet(QUOTE)
_PLAIN_KEY = StopSet('"', *_BREAKS)
_PLAIN_STRING = StopSet('"', "\\", *_BREAKS)
_CLOSERS = {"{": "}", "[": "]"}

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORDS = {
    "true": "true",
    "false": "false",
    "null": "null",
    "None": "null",
    "True": "true",
    "False": "false",
    "": "null",
}
_ESCAPE = re.compile(r'["\\/bfnrt]|u[0-9a-fA-F]{4}')
_ESCAPE_CHARS = 5


class Gemma4Arguments:
    """Reads the arguments of one call from behind their first brace; ``is_open`` until they end.

    They end with their last brace, or at a marker that cannot stand in arguments: then all that is open is closed, and
    ``broken_by`` is the marker.
    """

    __slots__ = (
        "is_open",
        "broken_by",
        "_json",
        "_stack",
        "_is_filled",
        "_is_behind_container",
        "_state",
        "_pending",
        "_key",
    )

    def __init__(self) -> None:
        self.is_open = True
        self.broken_by: str | None = None
        self._json = ["{"]
        # containers that are open, outermost first, and whether each has an entry
        self._stack: list[str] = ["{"]
        self._is_filled = [False]
        # in a list: the last thing read is an element that is complete, so that a comma ends nothing
        self._is_behind_container = False
        self._state: Callable[[TextCursor], bool] = self._read_key
        # text since the last stop that counted, without leading white space; parts of a key so far
        self._pending: list[str] = []
        self._key: list[str] = []

    def read(self, cursor: TextCursor) -> None:
        """Read on, to the end of the arguments or of the text."""
        while self.is_open and self._state(cursor):
            pass

    def take_json(self) -> str:
        """JSON since the last call."""
        text = "".join(self._json)
        self._json.clear()
        return text

    def close(self) -> None:
        """End the arguments here, whatever is open."""
        self._json.extend(_CLOSERS[kind] for kind in reversed(self._stack))
        self.is_open = False

    def finish(self) -> None:
        """The text ended inside the arguments: what was held back is let go, and nothing is closed."""
        text = self._pop_pending()
        if self._state in (self._read_key, self._read_quoted_key, self._read_plain_key):
            key = "".join(self._key) + (text if self._state != self._read_key else text.strip())
            if key:
                self._begin_entry()
                self._json.append('"' + _escape(key))
        elif self._state == self._read_value:
            if text.strip():
                self._begin_element()
                scalar = _scalar(text)
                self._json.append(scalar[:-1] if scalar.startswith('"') else scalar)
        elif self._state == self._read_tail:
            self._json.append(_escape(text.strip()))

    def _read_key(self, cursor: TextCursor) -> bool:
        piece, stop = cursor.take(_KEY)
        self._hold(piece)
        if stop is None:
            return False
        if stop == '"' and (self._key or self._pending):
            self._pending.append(stop)
            return True
        self._key.append(self._pop_pending().strip())
        if stop == QUOTE:
            self._state = self._read_quoted_key
        elif stop == '"':
            self._state = self._read_plain_key
        elif stop == ":":
            self._end_key()
        else:
            self._end_key_without_value()
            if stop == "}":
                self._close()
            elif stop != ",":
                self._break(stop)
        return True

    def _read_quoted_key(self, cursor: TextCursor) -> bool:
        return self._read_key_part(cursor, _QUOTED)

    def _read_plain_key(self, cursor: TextCursor) -> bool:
        return self._read_key_part(cursor, _PLAIN_KEY)

    def _read_key_part(self, cursor: TextCursor, stops: StopSet) -> bool:
        piece, stop = cursor.take(stops)
        self._pending.append(piece)
        if stop is None:
            return False
        self._key.append(self._pop_pending())
        if stop in _BREAKS:
            self._end_key_without_value()
            self._break(stop)
        else:
            self._state = self._read_key
        return True

    def _read_value(self, cursor: TextCursor) -> bool:
        kind = self._stack[-1]
        piece, stop = cursor.take(_VALUE[kind])
        self._hold(piece)
        if stop is None:
            return False
        if stop in ("{", "[", '"') and self._pending:
            self._pending.append(stop)
        elif stop in ("{", "["):
            self._begin_element()
            self._open(stop)
        elif stop in ('"', QUOTE):
            self._begin_element()
            self._json.append('"' + _escape(self._pop_pending().lstrip()))
            self._state = self._read_string if stop == QUOTE else self._read_plain_string
        else:
            self._end_scalar(is_entry=kind == "{" or (stop == "," and not self._is_behind_container))
            self._end_value(stop)
        return True

    def _read_string(self, cursor: TextCursor) -> bool:
        piece, stop = cursor.take(_QUOTED)
        self._json.append(_escape(piece))
        if stop is None:
            return False
        self._state = self._read_tail
        return True

    def _read_plain_string(self, cursor: TextCursor) -> bool:
        piece, stop = cursor.take(_PLAIN_STRING)
        self._json.append(_escape(piece))
        if stop is None:
            return False
        if stop == "\\":
            self._state = self._read_escape
        elif stop == '"':
            self._state = self._read_tail
        else:
            self._json.append('"')
            self._break(stop)
        return True

    def _read_escape(self, cursor: TextCursor) -> bool:
        ahead = cursor.peek(_ESCAPE_CHARS)
        match = _ESCAPE.match(ahead)
        if match is None and not cursor.is_last and (not ahead or (ahead[0] == "u" and len(ahead) < _ESCAPE_CHARS)):
            return False
        escape = "" if match is None else match[0]
        self._json.append("\\" + (escape or "\\"))
        cursor.skip(len(escape))
        self._state = self._read_plain_string
        return True

    def _read_tail(self, cursor: TextCursor) -> bool:
        """Behind a string, whose closing quote is not written yet: more of it may follow."""
        piece, stop = cursor.take(_TAIL[self._stack[-1]])
        self._hold(piece)
        if stop is None:
            return False
        self._json.append(_escape(self._pop_pending().strip()))
        if stop == QUOTE:
            self._state = self._read_string
        else:
            self._json.append('"')
            self._end_value(stop)
        return True

    def _hold(self, piece: str) -> None:
        if self._pending or piece.strip():
            self._pending.append(piece)

    def _pop_pending(self) -> str:
        text = "".join(self._pending)
        self._pending.clear()
        return text

    def _begin_entry(self) -> None:
        if self._is_filled[-1]:
            self._json.append(",")
        self._is_filled[-1] = True

    def _begin_element(self) -> None:
        """Before a value: in an object its key has begun the entry."""
        if self._stack[-1] == "[":
            self._begin_entry()

    def _end_key(self) -> None:
        self._begin_entry()
        self._json.append(_quoted("".join(self._key)) + ":")
        self._key.clear()
        self._state = self._read_value

    def _end_key_without_value(self) -> None:
        if any(self._key):
            self._end_key()
            self._json.append("null")
        self._key.clear()
        self._state = self._read_key

    def _end_scalar(self, *, is_entry: bool) -> None:
        """A bare value ends. ``is_entry``: nothing at all stands for null here, and not for no entry."""
        text = self._pop_pending().strip()
        if text or is_entry:
            self._begin_element()
            self._json.append(_scalar(text))

    def _end_value(self, stop: str) -> None:
        self._is_behind_container = False
        self._state = self._read_key if self._stack[-1] == "{" else self._read_value
        if stop == _CLOSERS[self._stack[-1]]:
            self._close()
        elif stop != ",":
            self._break(stop)

    def _open(self, kind: str) -> None:
        self._is_behind_container = False
        self._json.append(kind)
        self._stack.append(kind)
        self._is_filled.append(False)
        self._state = self._read_key if kind == "{" else self._read_value

    def _close(self) -> None:
        self._json.append(_CLOSERS[self._stack.pop()])
        self._is_filled.pop()
        if not self._stack:
            self.is_open = False
            return
        self._is_behind_container = self._stack[-1] == "["
        self._state = self._read_value if self._is_behind_container else self._read_key

    def _break(self, marker: str) -> None:
        self.close()
        self.broken_by = marker


def _escape(text: str) -> str:
    return _quoted(text)[1:-1]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _scalar(text: str) -> str:
    """A bare value as JSON."""
    text = text.strip()
    if text in _WORDS:
        return _WORDS[text]
    return text if _NUMBER.fullmatch(text) else _quoted(text)
