"""Randomised load on small engines for a long time: every answer is held to one given alone, memory must stay flat.

python scripts/soak.py --minutes 30 --out benchmark/results/soak.jsonl
python scripts/soak.py --minutes 1 --seed 8      # other requests in another order
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "test"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmark"))

from common import Record, append_records, run_facts

from fixtures.soak import VARIANTS, Report, engine_load, soak
from fixtures.soak_cases import MODEL
from fixtures.soak_server import server_load

MAX_GROWTH_BYTES = 48e6


def records(report: Report, minutes: float) -> list[Record]:
    """What happened to each engine, and the memory of all of them."""
    facts = run_facts("cpu")

    def record(task: str, metric: str, value: float, unit: str) -> Record:
        return Record(
            "soak", MODEL, task, 1, metric, value, unit, None, None,
            facts.machine, facts.versions, facts.commit, facts.command,
        )  # fmt: skip

    found = [
        record(name, metric, value, "tokens" if metric == "tokens" else "requests")
        for name, counts in report.counts.items()
        for metric, value in (
            ("finished", counts.finished),
            ("aborted", counts.aborted),
            ("retracted", counts.retractions),
            ("tokens", counts.tokens),
        )
    ]
    growth = max(report.growth_bytes, 0) / 1e6
    return [*found, record("all", "length", minutes, "minutes"), record("all", "memory growth", growth, "MB")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--out", type=Path, help="append the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    makers = [*(engine_load(name) for name in VARIANTS), server_load]
    report = soak(60 * args.minutes, args.seed, makers, say=lambda text: print(text, flush=True))
    print(report)
    if args.out is not None:
        append_records(args.out, records(report, args.minutes))
    if report.growth_bytes > MAX_GROWTH_BYTES:
        print(f"memory grew by {report.growth_bytes / 1e6:.0f} MB", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
