"""The page for those who come from other servers: what it says about flags is what the command line does."""

from __future__ import annotations

import re
import shlex

import pytest

from fixtures.source_tree import ROOT, report
from sglang.srt.server_args import ARG_SPECS, prepare_server_args

PAGE = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
MODEL = ("--model-path", "tiny-gemma4")


def _rows(heading: str) -> list[tuple[str, str]]:
    """The first two cells of the rows about flags below a heading."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| (`--.*?) \| (.*?) ?\|", section, flags=re.MULTILINE)


def _flags(cell: str) -> list[str]:
    return re.findall(r"`(--[^`]*)`", cell)


def _refusal(text: str) -> str | None:
    try:
        prepare_server_args([*MODEL, *shlex.split(text)])
    except ValueError as error:
        return str(error)
    return None


def test_every_flag_that_is_offered_is_taken() -> None:
    rows = _rows("From sglang") + _rows("From vLLM")
    offered = [flags for _, here in rows for flags in _flags(here)]
    assert len(offered) > 30
    report([f"{flags}: {_refusal(flags)}" for flags in offered if _refusal(flags) is not None])


def test_every_flag_that_is_said_to_be_refused_is_refused() -> None:
    refused = [flag for theirs, here in _rows("From sglang") if here == "refused" for flag in _flags(theirs)]
    assert len(refused) > 5
    report([f"{flag} is taken" for flag in refused if _refusal(flag) is None])


def test_what_is_only_in_the_other_server_is_no_flag_here() -> None:
    ours = {name for spec in ARG_SPECS.values() for name in spec.names}
    gone = [flag.split()[0] for theirs, here in _rows("From vLLM") if not here for flag in _flags(theirs)]
    assert len(gone) > 5
    report([f"{flag} is a flag here too" for flag in gone if flag in ours])


@pytest.mark.parametrize("text", ["--no-such-flag", "--quantization fp8", "--page-size 0"])
def test_what_these_tests_would_find(text: str) -> None:
    assert _refusal(text) is not None
