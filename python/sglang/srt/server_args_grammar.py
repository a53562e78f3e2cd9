"""Constrained answers: which backend there is, and what white space constrained JSON may have."""

from __future__ import annotations

import importlib.util
import re

from sglang.srt.server_args_slices import GrammarConfig

# a class of white-space characters, and how many of them
_PATTERN = re.compile(r"(?P<chars>\\s|\[(?:\\[nrts]|[ \n\r\t])+\])(?:(?P<any>\*)|(?P<one>\?)|\{0,(?P<most>\d+)\})")


def resolve_grammar_backend(backend: str | None) -> str:
    """The backend that runs, "none" for none. ``ValueError`` when the one asked for is not installed."""
    is_installed = importlib.util.find_spec("xgrammar") is not None
    if backend is None:
        return "xgrammar" if is_installed else "none"
    if backend == "xgrammar" and not is_installed:
        raise ValueError(
            "--grammar-backend xgrammar needs the package xgrammar, which is not installed: pip install xgrammar, or "
            "give --grammar-backend none"
        )
    return backend


def make_grammar_config(backend: str | None, pattern: str | None, *, disable_any: bool) -> GrammarConfig:
    """The settings of a resolved backend. ``ValueError`` for white space that cannot be had."""
    name = None if backend == "none" else backend
    if pattern is None:
        return GrammarConfig(name, any_whitespace=False, max_whitespace=None)
    if disable_any:
        raise ValueError(
            f"--constrained-json-whitespace-pattern {pattern!r} and --constrained-json-disable-any-whitespace exclude "
            "each other: leave out one of the two"
        )
    match = _PATTERN.fullmatch(pattern)
    if match is None or not {" ", "\n", "\t"} <= _characters(match["chars"]):
        raise ValueError(
            f"--constrained-json-whitespace-pattern {pattern!r} is not supported: give space, line break and tab with "
            "*, ? or {0,N} behind, like '[ \\n\\t]*'"
        )
    if match["any"]:
        return GrammarConfig(name, any_whitespace=True, max_whitespace=None)
    most = 1 if match["one"] else int(match["most"])
    return GrammarConfig(name, any_whitespace=most > 0, max_whitespace=most or None)


def _characters(chars: str) -> set[str]:
    if chars == r"\s":
        return set(" \n\r\t")
    named = {r"\n": "\n", r"\r": "\r", r"\t": "\t"}
    found: set[str] = set()
    for part in re.findall(r"\\.|.", chars[1:-1], re.DOTALL):
        found |= set(" \n\r\t") if part == r"\s" else {named.get(part, part)}
    return found
