"""Regular expressions that end an answer: searched character by character, in time linear in the text.

A pattern becomes a non-deterministic automaton; all its threads move on together with each character, so no text can
make a pattern slow, and nothing that was read is read again. What is not regular, or needs to look ahead, is refused:
references to groups, look-around, ``$`` and word boundaries. ``^`` is the beginning of the answer.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

_MAX_PATTERN_LEN = 1024
_MAX_STATES = 500
_REPEAT = re.compile(r"\{(\d*)(,?)(\d*)\}")
_GROUP = re.compile(r"\((?:\?(?:P<\w+>|:))?")
_FLAGS = re.compile(r"\(\?([aimsux]+)\)")
# a character class: its first ] may be a member, and an escaped one always is
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|0[0-7]{0,2}|[1-3][0-7]{2}|.)", re.DOTALL)

# What a part of a pattern does: given the state that follows it, adds its states and returns the one it begins with.
_Build = Callable[[int], int]


@dataclass(frozen=True, slots=True)
class StopRegex:
    """The automaton of one pattern.

    State ``s`` reads a character that ``atoms[s]`` matches and goes on to ``following[s][0]``; without an atom it goes
    on to all of ``following[s]`` at once, if ``at_start[s]`` only before the first character. State 0 is the end.
    """

    pattern: str
    atoms: tuple[re.Pattern[str] | None, ...]
    following: tuple[tuple[int, ...], ...]
    at_start: tuple[bool, ...]
    first: int

    @classmethod
    def compile(cls, pattern: str) -> StopRegex:
        """``ValueError`` saying what is wrong with a pattern or not supported in it."""
        return _compile(pattern)


class RegexSearch:
    """Looks for the earliest end of a match in one growing text."""

    __slots__ = ("_regex", "_threads", "_length")

    def __init__(self, regex: StopRegex) -> None:
        self._regex = regex
        self._threads: dict[int, int] = {}  # state that reads a character -> where its match begins, the earliest
        self._length = 0

    @property
    def open_len(self) -> int:
        """Characters at the end of the text that may be the beginning of a match."""
        return self._length - min(self._threads.values(), default=self._length)

    def feed(self, char: str) -> int | None:
        """Take one character; the length of the longest match that ends with it, None without one."""
        regex, begin = self._regex, self._length
        reached: dict[int, int] = {}
        entered = dict(self._threads)
        self._enter(regex.first, begin, entered, at_start=begin == 0)
        entered.pop(0, None)  # a pattern that matches nothing at all ends an answer only where it matches something
        self._length += 1
        for state, start in sorted(entered.items(), key=lambda item: item[1]):
            atom = regex.atoms[state]
            if atom is not None and atom.match(char):
                self._enter(regex.following[state][0], start, reached, at_start=False)
        ended = reached.pop(0, None)
        self._threads = reached
        return None if ended is None else self._length - ended

    def _enter(self, state: int, start: int, threads: dict[int, int], *, at_start: bool) -> None:
        """Add the states that read characters, or the end, that can be reached without reading any."""
        pending, seen = [state], {state}
        while pending:
            state = pending.pop()
            if state == 0 or self._regex.atoms[state] is not None:
                threads[state] = min(start, threads.get(state, start))
            elif at_start or not self._regex.at_start[state]:
                pending += [other for other in self._regex.following[state] if other not in seen]
                seen.update(self._regex.following[state])


@dataclass(frozen=True, slots=True)
class RegexMatch:
    """``pattern`` matches the ``length`` characters before ``end``, counted from the text that was given last."""

    pattern: str
    end: int
    length: int


class RegexStops:
    """All patterns of a request over its growing answer, given as text or as UTF-8 bytes, but not both."""

    __slots__ = ("_searches", "_utf8")

    def __init__(self, patterns: Sequence[str]) -> None:
        self._searches = tuple((pattern, RegexSearch(StopRegex.compile(pattern))) for pattern in patterns)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    @property
    def open_len(self) -> int:
        """Characters at the end of the text that may be the beginning of a match."""
        return max(search.open_len for _, search in self._searches)

    def feed_bytes(self, piece: bytes) -> RegexMatch | None:
        return self.feed(self._utf8.decode(piece))

    def feed(self, text: str) -> RegexMatch | None:
        """The match that ends first in ``text``, of several the longest."""
        first: RegexMatch | None = None
        for end, char in enumerate(text, start=1):
            found = [(search.feed(char), pattern) for pattern, search in self._searches]
            ended = [RegexMatch(pattern, end, length) for length, pattern in found if length is not None]
            if ended and first is None:
                first = max(ended, key=lambda match: match.length)
        return first


@lru_cache(maxsize=256)
def _compile(pattern: str) -> StopRegex:
    if len(pattern) > _MAX_PATTERN_LEN:
        raise ValueError(f"stop_regex must have at most {_MAX_PATTERN_LEN} characters, got {len(pattern)}")
    try:
        re.compile(pattern)
        return _Parser(pattern).automaton()
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"stop_regex {pattern!r:.200} is not a regular expression: {error}") from None


class _Parser:
    """Recursive descent over a pattern that Python accepts. Characters and classes are left to ``re``."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._flags = ""
        self._atoms: list[re.Pattern[str] | None] = [None]
        self._following: list[tuple[int, ...]] = [()]
        self._at_start: list[bool] = [False]

    def automaton(self) -> StopRegex:
        flags = _FLAGS.match(self._pattern)
        if flags is not None:
            self._flags, self._at = flags[1], flags.end()
            if "x" in self._flags:
                self._refuse("the flag x")
        build = self._alternatives()
        assert self._at == len(self._pattern), f"{self._pattern!r}: stopped at {self._at}"
        first = build(0)
        return StopRegex(self._pattern, tuple(self._atoms), tuple(self._following), tuple(self._at_start), first)

    def _alternatives(self) -> _Build:
        branches = [self._sequence()]
        while self._peek() == "|":
            self._at += 1
            branches.append(self._sequence())
        return branches[0] if len(branches) == 1 else lambda end: self._state(tuple(b(end) for b in branches))

    def _sequence(self) -> _Build:
        parts: list[_Build] = []
        while self._peek() not in ("", "|", ")"):
            parts.append(self._repeated())

        def build(end: int) -> int:
            for part in reversed(parts):
                end = part(end)
            return end

        return build

    def _repeated(self) -> _Build:
        part = self._single()
        while (bounds := self._bounds()) is not None:
            part = self._repeat(part, *bounds)
        return part

    def _bounds(self) -> tuple[int, int | None] | None:
        """The repetition that stands here, without its mark for greed, which changes no match's existence."""
        char = self._peek()
        braces = _REPEAT.match(self._pattern, self._at) if char == "{" else None
        if braces is not None and (braces[1] or braces[2]):
            low = int(braces[1] or 0)
            high = low if not braces[2] else int(braces[3]) if braces[3] else None
            self._at = braces.end()
        elif char and char in "*+?":
            low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
            self._at += 1
        else:
            return None
        if self._peek() == "+":
            self._refuse("a possessive repetition")
        if self._peek() == "?":
            self._at += 1
        return low, high

    def _repeat(self, part: _Build, low: int, high: int | None) -> _Build:
        if low + (high or 0) > _MAX_STATES:
            self._refuse(f"a repetition of more than {_MAX_STATES}")

        def build(end: int) -> int:
            if high is None:
                loop = self._state(())
                self._following[loop] = (part(loop), end)
                end = loop
            else:
                out = end
                for _ in range(high - low):
                    end = self._state((part(end), out))
            for _ in range(low):
                end = part(end)
            return end

        return build

    def _single(self) -> _Build:
        char = self._peek()
        if char == "(":
            return self._group()
        if char == "^" or self._pattern.startswith(r"\A", self._at):
            if char == "^" and "m" in self._flags:
                self._refuse("^ with the flag m")
            self._at += 1 if char == "^" else 2
            return lambda end: self._state((end,), at_start=True)
        if char == "$":
            self._refuse("$")
        form = {"[": _CLASS, "\\": _ESCAPE}.get(char)
        found = None if form is None else form.match(self._pattern, self._at)
        text = char if found is None else found[0]
        if text[0] == "\\" and text[1] in "bBZ123456789" and len(text) == 2:
            self._refuse(text)
        self._at += len(text)
        source = re.escape(text) if found is None and char != "." else text
        atom = re.compile(f"(?{self._flags}){source}" if self._flags else source)
        return lambda end: self._state((end,), atom=atom)

    def _group(self) -> _Build:
        opening = _GROUP.match(self._pattern, self._at)
        assert opening is not None
        self._at = opening.end()
        if self._peek() == "?":
            self._refuse(self._pattern[opening.start() : self._at + 2])
        inner = self._alternatives()
        self._at += 1
        return inner

    def _state(self, following: tuple[int, ...], *, atom: re.Pattern[str] | None = None, at_start: bool = False) -> int:
        if len(self._atoms) >= _MAX_STATES:
            raise ValueError(f"stop_regex {self._pattern!r:.200} is too large: lower its repetitions")
        self._atoms.append(atom)
        self._following.append(following)
        self._at_start.append(at_start)
        return len(self._atoms) - 1

    def _peek(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _refuse(self, what: str) -> None:
        raise ValueError(f"stop_regex {self._pattern!r:.200} has {what}, which is not supported: leave it out")
