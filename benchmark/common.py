"""What every benchmark shares: the record it writes, the facts of the machine, medians and a table.

One record is one line of a file in ``benchmark/results``; ``results/README.md`` says what the fields mean.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"
# the transformers reference and the corpus' questions are shared with the tests
sys.path.insert(0, str(ROOT / "test"))


@dataclass(frozen=True, slots=True)
class Record:
    """One measured value. ``versus`` names the metric of the same run that ``ratio`` divides by."""

    bench: str
    model: str
    task: str
    batch: int
    metric: str
    value: float
    unit: str
    versus: str | None
    ratio: float | None
    machine: str
    versions: str
    commit: str
    command: str


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The part of a record that is the same for every line of a run."""

    machine: str
    versions: str
    commit: str
    command: str


def run_facts(device: str) -> RunFacts:
    return RunFacts(machine_description(device), versions(), commit(), command_line(sys.argv))


def machine_description(device: str) -> str:
    """CPU model and cores, and the GPU's name when it is used. Never a host name."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    text = f"{model}, {len(os.sched_getaffinity(0))} cores"
    return f"{text}, {torch.cuda.get_device_name()}" if device.startswith("cuda") else text


def versions() -> str:
    found = [f"python {platform.python_version()}"]
    for package in ("torch", "transformers", "sglang"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue  # run from a source tree that is not installed: the commit says which one
    return ", ".join(found)


def commit() -> str:
    """Short id of the checked-out commit; ``+`` when tracked files differ from it."""
    head = _git("rev-parse", "--short=10", "HEAD")
    return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")


def command_line(argv: Sequence[str]) -> str:
    """The command as one would type it in the root of the repository; of other paths only the last part is kept."""
    return shlex.join(["python", *(_relative(word) for word in argv)])


def _relative(word: str) -> str:
    flag, equals, value = word.rpartition("=")
    path = Path(value).resolve()
    if path.is_relative_to(ROOT) and path.exists():
        return f"{flag}{equals}{path.relative_to(ROOT)}"
    return f"{flag}{equals}{path.name}" if Path(value).is_absolute() else word


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def validate_record(values: Mapping[str, Any]) -> None:
    """``ValueError`` naming the field when ``values`` is not one well-formed record."""
    names = [f.name for f in fields(Record)]
    if list(values) != names:
        raise ValueError(f"a record has exactly the fields {', '.join(names)}, in this order, got {', '.join(values)}")
    for name in ("bench", "model", "task", "metric", "unit", "machine", "versions", "commit", "command"):
        if not isinstance(values[name], str) or not values[name]:
            raise ValueError(f"{name} must be a non-empty string, got {values[name]!r}")
    if type(values["batch"]) is not int or values["batch"] < 1:
        raise ValueError(f"batch must be a positive integer, got {values['batch']!r}")
    _check_number("value", values["value"])
    if (values["versus"] is None) != (values["ratio"] is None):
        raise ValueError(f"versus and ratio come together, got {values['versus']!r} and {values['ratio']!r}")
    if values["versus"] is not None:
        _check_number("ratio", values["ratio"])
        if not isinstance(values["versus"], str) or not values["versus"]:
            raise ValueError(f"versus must name a metric, got {values['versus']!r}")
    for name in ("machine", "command", "model"):
        if "/home/" in values[name] or values[name].startswith("/") or " /" in values[name]:
            raise ValueError(f"{name} must not hold an absolute path, got {values[name]!r}")


def _check_number(name: str, value: Any) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} must be a finite number of at least 0, got {value!r}")


def append_records(path: Path, records: Iterable[Record]) -> None:
    """Append one line per record; nothing is written if one of them is malformed."""
    lines = []
    for record in records:
        values = asdict(record)
        validate_record(values)
        lines.append(json.dumps(values, ensure_ascii=False) + "\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as f:
        f.writelines(lines)


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their longest cell; the first is aligned left, the others right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = (
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join([first, *rest]).rstrip()

    return "\n".join([line(header), "  ".join("-" * w for w in widths), *map(line, rows)])
