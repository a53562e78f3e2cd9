"""How answers are parsed: the parsers of reasoning and of tool calls that belong to a model."""

from __future__ import annotations

from typing import Any


def resolve_parsers(reasoning: str | None, tool_call: str | None, architecture: str) -> dict[str, Any]:
    """The parsers that run, by the names of their arguments; "none" for none. ``ValueError`` when they do not fit.

    Both read the same text with one machine, so two different families exclude each other.
    """
    default = "gemma4" if architecture.startswith("Gemma4") else "none"
    parsers = {"reasoning_parser": reasoning or default, "tool_call_parser": tool_call or default}
    if len(set(parsers.values()) - {"none"}) > 1:
        raise ValueError(
            f"--reasoning-parser {parsers['reasoning_parser']} and --tool-call-parser {parsers['tool_call_parser']} "
            "read answers of different models: give the same for both, or none for one"
        )
    return parsers
