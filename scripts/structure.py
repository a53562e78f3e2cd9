"""Write the module list of ``docs/structure.md`` from the first docstring line of each module: ``make docs``.

python scripts/structure.py            # rewrite the list
python scripts/structure.py --check    # exit 1, and say what differs, when the page is stale
"""

from __future__ import annotations

import argparse
import ast
import difflib
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "structure.md"
PACKAGES = (ROOT / "python" / "sglang", ROOT / "sgl-kernel" / "python" / "sgl_kernel")
MARKER = "<!-- The list below is made by `make docs` from the first line of each module's docstring. -->\n"


def summary(path: Path) -> str:
    """First docstring line of a module. ValueError when there is none, or when it is not a whole sentence."""
    line = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n")[0]
    if not line.endswith("."):
        raise ValueError(f"{path.relative_to(ROOT)}: the docstring's first line must be one sentence; it is {line!r}")
    return line.replace("``", "`")


def module_list() -> Iterator[str]:
    for package in PACKAGES:
        for folder in [package, *sorted(p for p in package.rglob("*") if p.is_dir())]:
            files = [path for path in sorted(folder.glob("*.py")) if path.stat().st_size]
            if files:
                yield f"\n### `{folder.relative_to(ROOT)}/`\n\n"
                yield from (f"- `{path.name}`: {summary(path)}\n" for path in files)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail when the page is stale")
    check = parser.parse_args().check
    page = PAGE.read_text(encoding="utf-8")
    introduction, marker, _ = page.partition(MARKER)
    if not marker:
        raise ValueError(f"{PAGE} has lost the line {MARKER!r}")
    fresh = introduction + MARKER + "".join(module_list())
    if not check:
        PAGE.write_text(fresh, encoding="utf-8")
        return 0
    changes = difflib.unified_diff(page.splitlines(), fresh.splitlines(), "docs/structure.md", "tree", lineterm="", n=0)
    difference = "\n".join(changes)
    if difference:
        print(f"docs/structure.md is stale; run `make docs`\n{difference}", file=sys.stderr)
    return 1 if difference else 0


if __name__ == "__main__":
    sys.exit(main())
