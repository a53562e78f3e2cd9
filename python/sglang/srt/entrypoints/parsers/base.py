"""What a parser of answers is: text of one answer in, typed pieces out, alike for streams and for whole answers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class ReasoningText:
    text: str


@dataclass(frozen=True, slots=True)
class ContentText:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegin:
    """Call number ``index`` (from 0) of an answer begins; its arguments follow as pieces of JSON."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """The arguments of a call are complete. A call that its answer breaks off has no end."""

    index: int


Event = ReasoningText | ContentText | ToolCallBegin | ToolCallArguments | ToolCallEnd


class OutputParser(Protocol):
    """One answer. The events of all ``feed`` and of ``finish`` say the same however the text is cut into pieces."""

    def feed(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]:
        """What was held back because it could have become a marker. Nothing may be fed afterwards."""
        ...


class OutputFormat(Protocol):
    """How one family of models marks thoughts and tool calls. Markers are special tokens of its tokenizer."""

    @property
    def thought_markers(self) -> tuple[str, str]:
        """What opens and what closes a thought."""
        ...

    @property
    def call_markers(self) -> tuple[str, ...]:
        """Every special token that calls are written with; the second one closes a call."""
        ...

    def make_parser(self, *, reasoning: bool, tools: bool) -> OutputParser: ...

    def open_thought(self, prompt: str) -> str:
        """The beginning of an answer that a prompt ends with, if that is a thought it leaves open; else nothing."""
        ...

    def call_grammar(self, tools: Sequence[Mapping[str, Any]], *, parallel: bool) -> str:
        """EBNF of an answer that is one call of one of the tools, or with ``parallel`` at least one."""
        ...


@dataclass(frozen=True, slots=True)
class ParsedCall:
    name: str
    arguments: str
    is_complete: bool


@dataclass(frozen=True, slots=True)
class ParsedText:
    """A whole answer, taken apart."""

    reasoning: str
    content: str
    calls: tuple[ParsedCall, ...]


def merge_events(events: Iterable[Event]) -> list[Event]:
    """The same events, neighbours that continue one another as one."""
    merged: list[Event] = []
    for _, run in itertools.groupby(events, key=_stream_of):
        group = list(run)
        text = "".join(event.text for event in group if not isinstance(event, (ToolCallBegin, ToolCallEnd)))
        first = group[0]
        if isinstance(first, ReasoningText):
            merged.append(ReasoningText(text))
        elif isinstance(first, ContentText):
            merged.append(ContentText(text))
        elif isinstance(first, ToolCallArguments):
            merged.append(ToolCallArguments(first.index, text))
        else:
            merged.extend(group)
    return merged


def _stream_of(event: Event) -> tuple[type, int]:
    return type(event), -1 if isinstance(event, (ReasoningText, ContentText)) else event.index


def join_events(events: Iterable[Event]) -> ParsedText:
    """All events of an answer as one value."""
    reasoning: list[str] = []
    content: list[str] = []
    names: list[str] = []
    arguments: list[list[str]] = []
    complete: list[bool] = []
    for event in events:
        if isinstance(event, ReasoningText):
            reasoning.append(event.text)
        elif isinstance(event, ContentText):
            content.append(event.text)
        elif isinstance(event, ToolCallBegin):
            assert event.index == len(names), event
            names.append(event.name)
            arguments.append([])
            complete.append(False)
        elif isinstance(event, ToolCallArguments):
            arguments[event.index].append(event.text)
        else:
            complete[event.index] = True
    calls = zip(names, arguments, complete, strict=True)
    return ParsedText(
        reasoning="".join(reasoning),
        content="".join(content),
        calls=tuple(ParsedCall(name, "".join(pieces), done) for name, pieces, done in calls),
    )
