"""Answers of Gemma 4: thoughts between channel markers, tool calls, and the text around them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sglang.srt.entrypoints.parsers.base import (
    ContentText,
    Event,
    ReasoningText,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
    merge_events,
)
from sglang.srt.entrypoints.parsers.cursor import StopSet, TextCursor
from sglang.srt.entrypoints.parsers.gemma4_arguments import (
    CALL_CLOSE,
    CALL_OPEN,
    QUOTE,
    THOUGHT_OPEN,
    Gemma4Arguments,
)
from sglang.srt.entrypoints.parsers.gemma4_grammar import make_call_grammar

THOUGHT_CLOSE = "<channel|>"
_LABEL = "thought\n"
# an empty thought may come without the line break
_LABELS = (_LABEL, _LABEL.strip() + THOUGHT_CLOSE)
# the model ends a thought on a line of its own; the line break is no part of the thought
_THOUGHT_END = "\n" + THOUGHT_CLOSE
_TURN_STARTS = ("<|turn>", "<tool_response|>")
_HEAD = re.compile(r"\s*call:\s*([^\s{}<>,:\"']+)\s*")
# text behind a call marker that is longer and has no brace is not the head of a call
_MAX_HEAD_LEN = 256


class Gemma4Format:
    """See ``OutputFormat``."""

    thought_markers: tuple[str, str] = (THOUGHT_OPEN, THOUGHT_CLOSE)
    call_markers: tuple[str, ...] = (CALL_OPEN, CALL_CLOSE, QUOTE)

    def make_parser(self, *, reasoning: bool, tools: bool) -> Gemma4Parser:
        return Gemma4Parser(reasoning=reasoning, tools=tools)

    def open_thought(self, prompt: str) -> str:
        turn = prompt[max(prompt.rfind(start) for start in _TURN_STARTS) + 1 :]
        opened = turn.rfind(THOUGHT_OPEN)
        return turn[opened:] if opened > turn.rfind(THOUGHT_CLOSE) else ""

    def call_grammar(self, tools: Sequence[Mapping[str, Any]], *, parallel: bool) -> str:
        return make_call_grammar(tools, parallel=parallel)


class Gemma4Parser:
    """State machine over the text of one answer; see ``OutputParser``.

    Every state reads up to its next stop. Markers of what is switched off are ordinary text. A marker out of place is
    dropped; a call that is opened inside a thought ends the thought; what stands behind a call marker and is no call is
    content, so that nothing but markers, and white space beside them, is lost.
    """

    def __init__(self, *, reasoning: bool, tools: bool) -> None:
        assert reasoning or tools, "without either there is nothing to parse"
        thought_markers = (THOUGHT_OPEN, THOUGHT_CLOSE) if reasoning else ()
        markers = (*thought_markers, *((CALL_OPEN, CALL_CLOSE, QUOTE) if tools else ()))
        self._text_stops = StopSet(*markers)
        self._head_stops = StopSet("{", *markers)
        self._thought_stops = StopSet(_THOUGHT_END, *markers)
        self._cursor = TextCursor()
        self._state: Callable[[], bool] = self._read_text
        self._events: list[Event] = []
        # white space behind a marker, which counts once other text follows; the head of a call so far, and its length
        self._blanks: list[str] = []
        self._is_behind_marker = False
        self._head: list[str] = []
        self._head_len = 0
        self._arguments = Gemma4Arguments()
        self._num_calls = 0

    def feed(self, text: str) -> list[Event]:
        self._run(text, is_last=False)
        return self._take_events()

    def finish(self) -> list[Event]:
        self._run("", is_last=True)
        if self._state == self._read_head:
            self._add_content("".join(self._head))
        elif self._state == self._read_arguments:
            self._arguments.finish()
            self._add_arguments()
        return self._take_events()

    def _run(self, text: str, *, is_last: bool) -> None:
        self._cursor.add(text, is_last=is_last)
        while self._state():
            pass

    def _read_text(self) -> bool:
        piece, stop = self._cursor.take(self._text_stops)
        self._add_content(piece)
        if stop is None:
            return False
        self._on_marker(stop)
        return True

    def _read_label(self) -> bool:
        """Behind the marker that opens a thought: what else belongs to it is skipped."""
        ahead = self._cursor.peek(max(map(len, _LABELS)))
        if ahead.startswith(_LABELS):
            self._cursor.skip(len(_LABEL) - (ahead[len(_LABEL) - 1] != "\n"))
        elif any(label.startswith(ahead) for label in _LABELS):
            if not self._cursor.is_last:
                return False
            self._cursor.skip(len(ahead))
        self._state = self._read_thought
        return True

    def _read_thought(self) -> bool:
        piece, stop = self._cursor.take(self._thought_stops)
        if piece:
            self._events.append(ReasoningText(piece))
        if stop is None:
            return False
        if stop not in (CALL_CLOSE, QUOTE):
            self._on_marker(stop)
        return True

    def _read_head(self) -> bool:
        piece, stop = self._cursor.take(self._head_stops)
        self._head.append(piece)
        self._head_len += len(piece)
        is_too_long = self._head_len > _MAX_HEAD_LEN
        if stop is None and not is_too_long:
            return False
        text = "".join(self._head)
        match = None if is_too_long else _HEAD.fullmatch(text)
        if match is None:
            self._state = self._read_text
            self._add_content(text + (stop if stop == "{" else ""))
        else:
            self._begin_call(match[1])
        if stop is not None and stop != "{":
            if match is not None:
                # a call that ends without a brace has no arguments
                self._arguments.close()
                self._end_call()
            self._on_marker(stop)
        return True

    def _read_arguments(self) -> bool:
        self._arguments.read(self._cursor)
        if self._arguments.is_open:
            self._add_arguments()
            return False
        self._end_call()
        if self._arguments.broken_by is not None:
            self._on_marker(self._arguments.broken_by)
        return True

    def _on_marker(self, marker: str) -> None:
        self._blanks.clear()
        self._is_behind_marker = True
        if marker == THOUGHT_OPEN:
            self._state = self._read_label
        elif marker == CALL_OPEN:
            self._head.clear()
            self._head_len = 0
            self._state = self._read_head
        else:
            self._state = self._read_text

    def _begin_call(self, name: str) -> None:
        self._events.append(ToolCallBegin(self._num_calls, name))
        self._arguments = Gemma4Arguments()
        self._state = self._read_arguments

    def _add_arguments(self) -> None:
        text = self._arguments.take_json()
        if text:
            self._events.append(ToolCallArguments(self._num_calls, text))

    def _end_call(self) -> None:
        self._add_arguments()
        self._events.append(ToolCallEnd(self._num_calls))
        self._num_calls += 1
        self._is_behind_marker = True
        self._state = self._read_text

    def _add_content(self, text: str) -> None:
        if self._is_behind_marker and not text.strip():
            self._blanks.append(text)
            return
        if not text:
            return
        self._events.append(ContentText("".join(self._blanks) + text))
        self._blanks.clear()
        self._is_behind_marker = False

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return merge_events(events)
