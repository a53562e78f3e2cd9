"""The page of pitfalls names tests that exist, and leaves no line without one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from fixtures.source_tree import ROOT, report

PAGE = "docs/pitfalls.md"
REFERENCE = re.compile(r"`(test/[\w/]+\.py)::(\w+)`")


def rows(text: str) -> Iterator[tuple[int, list[str]]]:
    """Line number and cells of every row of every table that is neither head nor rule."""
    for number, line in enumerate(text.splitlines(), 1):
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if line.startswith("| ") and cells[0] and cells[0] != "|":
            yield number, cells


def functions(path: str) -> set[str]:
    file = ROOT / path
    if not file.is_file():
        return set()
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}


def faults(text: str) -> Iterator[str]:
    for number, cells in rows(text):
        if cells[0].startswith("| seen by"):
            continue
        found = REFERENCE.findall(cells[-1])
        if len(cells) != 2 or not found or REFERENCE.sub("", cells[-1]).strip(", "):
            yield f"{PAGE}:{number}: one sentence, then tests and nothing else, got {cells}"
        for path, name in found:
            if name not in functions(path):
                yield f"{PAGE}:{number}: there is no {path}::{name}"


def test_every_line_names_tests_that_exist() -> None:
    text = (ROOT / PAGE).read_text()
    assert len(list(rows(text))) > 40 and len(re.findall("^## ", text, flags=re.MULTILINE)) == 11
    report(list(faults(text)))


def test_a_test_that_is_not_there_is_found() -> None:
    here = f"`test/unit/repo/{__name__.rpartition('.')[2]}.py"
    good = f"| A fault. | {here}::test_every_line_names_tests_that_exist` |"
    assert not list(faults(good))
    unknown, misplaced = good.replace("exist`", "exit`"), good.replace("repo/", "rope/")
    for bad in (unknown, misplaced, "| A fault. | nobody |", good + " x |"):
        assert len(list(faults(bad))) == 1, bad
