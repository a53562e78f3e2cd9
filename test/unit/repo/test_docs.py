"""The documents tell the truth about the tree: commands, links and module list."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from fixtures.source_tree import ROOT, module_names, report

SKIPPED_FOLDERS = {".git", ".venv", "__pycache__", "build", "dist", "models_data"}
SKIPPED_FOLDERS |= {".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis"}
TEXT_SUFFIXES = {"", ".cfg", ".json", ".jsonl", ".md", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml"}
# places on one developer's machine; written in halves so that this file passes its own test
MACHINE_PATHS = tuple("/" + name for name in ("work/", "root/", "opt/wheels", "opt/pypi"))


def text_files() -> Iterator[Path]:
    for path in sorted(ROOT.rglob("*")):
        inside = path.relative_to(ROOT)
        if SKIPPED_FOLDERS.isdisjoint(inside.parts) and path.suffix in TEXT_SUFFIXES and path.is_file():
            if not any(part.endswith(".egg-info") for part in inside.parts):
                yield path


def pages() -> list[Path]:
    return [path for path in text_files() if path.suffix == ".md"]


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def code(page: Path) -> str:
    """Everything in a page that is set as code: fenced blocks and spans."""
    return "\n".join(re.findall(r"```.*?```|`[^`\n]+`", page.read_text(encoding="utf-8"), flags=re.DOTALL))


def test_structure_page_is_fresh() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "structure.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr


def test_make_targets_in_documents_exist() -> None:
    used = {(page, name) for page in pages() for name in re.findall(r"\bmake ([a-z]+)\b", code(page))}
    assert {"serve", "test"} <= {name for page, name in used if page.name == "README.md"}
    targets = make_targets()
    report([f"{page.relative_to(ROOT)}: `make {name}` is no target" for page, name in used if name not in targets])


def test_modules_in_documents_exist() -> None:
    wrong = []
    for page in pages():
        for name in re.findall(r"python3? -m ((?:sglang|sgl_kernel)\b[\w.]*)", code(page)):
            if name not in module_names():
                wrong.append(f"{page.relative_to(ROOT)}: there is no module {name}")
    report(wrong)


def test_links_in_documents_resolve() -> None:
    wrong = []
    for page in pages():
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
            if "://" not in target and not (page.parent / target).exists():
                wrong.append(f"{page.relative_to(ROOT)}: the link to {target} leads nowhere")
    report(wrong)


def test_continuous_integration_runs_the_documented_command() -> None:
    assert re.search(r"^exec make test\b", (ROOT / ".ci" / "run").read_text(), flags=re.MULTILINE)


def test_no_path_of_one_machine() -> None:
    wrong = []
    for path in text_files():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            for word in MACHINE_PATHS:
                if re.search(rf"(?<![\w.~/-]){re.escape(word)}", line):
                    wrong.append(f"{path.relative_to(ROOT)}:{number}: names {word}, a place on one machine")
    report(wrong)
