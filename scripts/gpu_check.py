"""Everything there is to check and measure on a GPU, in order, each stage with a time limit of its own.

    python scripts/gpu_check.py --out OUT                               # all stages
    python scripts/gpu_check.py --out OUT --stages kernels one_batch    # some
    python scripts/gpu_check.py --out OUT --stages one_batch -- --model e2b --batch-size 1

Arguments behind ``--`` go to every stage that runs. Writes OUT/STAGE.log and OUT/h200.jsonl, prints the figures
that have something to be measured against. The status is 1 when a stage failed or ran out of time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parents[1]
SIZES = ("e2b", "e4b", "12b", "26b-a4b", "31b")
LOG_TAIL = 25


@dataclass(frozen=True, slots=True)
class Stage:
    """``command`` is run by this Python in the root of the repository; ``writes``: it takes --json-out and --commit."""

    command: tuple[str, ...]
    limit_s: int
    writes: bool = True


STAGES: Mapping[str, Stage] = MappingProxyType(
    {
        "tests": Stage(("-m", "pytest", "-q", "-m", "cuda", "test/gpu", "test/unit/mem_cache"), 180, writes=False),
        "one_batch": Stage(
            (
                *("benchmark/bench_one_batch.py", "--model", *SIZES),
                *("--batch-size", "1", "8", "32", "128", "--context-len", "1024", "16384", "--accept-len", "2.5"),
            ),
            240,
        ),
        "prefill": Stage(
            (
                *("benchmark/bench_one_batch.py", "--model", *SIZES),
                *("--batch-size", "--prefill-len", "2048", "8192", "32768"),
            ),
            150,
        ),
        "engine": Stage(("benchmark/bench_engine.py",), 240),
        "kernels": Stage(("benchmark/bench_kernels.py", "--model", "e4b", "26b-a4b", "31b", "--rows", "1", "4"), 180),
        "long_attention": Stage(
            (
                *("benchmark/bench_kernels.py", "--model", *SIZES, "--family", "attention"),
                *("--rows", "8", "--context-len", "32768"),
            ),
            90,
        ),
    }
)


def run_stage(name: str, args: argparse.Namespace) -> str:
    """ "ok", or what went wrong; the stage's output goes to its log."""
    stage = STAGES[name]
    command = [sys.executable, *stage.command, *args.extra]
    if stage.writes:
        command += ["--json-out", str(args.out / "h200.jsonl")]
        command += [] if args.commit is None else ["--commit", args.commit]
    sources = os.pathsep.join(str(ROOT / folder) for folder in ("python", "sgl-kernel/python"))
    log = args.out / f"{name}.log"
    start = time.perf_counter()
    with log.open("w", encoding="utf-8") as file:
        try:
            environment = {**os.environ, "PYTHONPATH": sources, "PYTHONUNBUFFERED": "1"}
            code = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=args.limit or stage.limit_s,
                check=False,
            ).returncode
            outcome = "ok" if code == 0 else f"status {code}"
        except subprocess.TimeoutExpired:
            outcome = "out of time"
    print(f"{name}: {outcome} after {time.perf_counter() - start:.0f} s", flush=True)
    if outcome != "ok" or not stage.writes:
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL:]
        print("\n".join(f"    {line[:200]}" for line in tail), flush=True)
    return outcome


def summary(path: Path) -> str:
    """One short row per figure that has a limit."""
    rows = []
    for text in path.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        if line["ratio"] is not None:
            where = f"{line['model']} b{line['batch']} c{line['context']} s{line['steps']}"
            rows.append(f"{where:28} {line['metric']:44} {line['value']:>9g} {line['unit']:9} {line['ratio']:>7.2f}")
    return "\n".join(rows)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", nargs="+", default=list(STAGES), choices=STAGES, metavar="STAGE")
    parser.add_argument("--out", type=Path, required=True, help="folder for logs and figures")
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    parser.add_argument("--limit", type=int, help="seconds for each stage, instead of its own limit")
    parser.add_argument("extra", nargs="*", help="arguments of the stages, behind --")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    outcomes = [run_stage(name, args) for name in args.stages]
    figures = args.out / "h200.jsonl"
    if figures.exists():
        print(summary(figures))
    return 0 if all(outcome == "ok" for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
