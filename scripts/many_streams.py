"""Hundreds of streams from one server for minutes: every text is held to one given alone, memory must stay flat.

python scripts/many_streams.py --minutes 5
python scripts/many_streams.py --minutes 5 --output benchmark/results/many_streams.jsonl
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "test"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmark"))

from common import Record, append_records, run_facts

from fixtures.many_streams import (
    MAX_GROWTH_BYTES,
    SERVER_ARGS,
    Clients,
    Report,
    make_cases,
    make_slow_case,
    many_streams,
)
from fixtures.server_process import ready_server


def until(end: float) -> Callable[[], bool]:
    return lambda: time.monotonic() < end


def run(minutes: float, streams: int, seed: int) -> Report:
    """A third of the time to come to full size, the rest to grow or not."""
    with TemporaryDirectory() as folder, ready_server(Path(folder), *SERVER_ARGS) as server:
        clients = Clients(server, make_cases(server, 96, seed), seed)
        slow_case, start = make_slow_case(server, 384), time.monotonic()
        rounds = [until(start + 20 * minutes), until(start + 60 * minutes)]
        return asyncio.run(many_streams(clients, streams, slow_case, 8, rounds))


def records(report: Report, minutes: float, streams: int) -> list[Record]:
    """One line for each figure of a run."""
    facts = run_facts("cpu")
    values = {
        "minutes": (minutes, "min"),
        "streams_whole": (report.counts.whole, "streams"),
        "streams_left": (report.counts.left, "streams"),
        "streams_wrong": (0, "streams"),  # the first one ends the run
        "events": (report.counts.events, "events"),
        "memory": (report.memory_bytes, "B"),
        "memory_growth": (max(report.growth_bytes, 0), "B"),
        "bytes_to_a_slow_reader": (report.slow_bytes, "B"),
        "bytes_to_a_prompt_reader": (report.prompt_bytes, "B"),
    }
    return [
        Record(
            bench="many_streams",
            model="tiny-gemma4",
            task="all",
            batch=streams,
            metric=metric,
            value=value,
            unit=unit,
            versus=None,
            ratio=None,
            machine=facts.machine,
            versions=facts.versions,
            commit=facts.commit,
            command=facts.command,
        )
        for metric, (value, unit) in values.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--streams", type=int, default=256, help="clients at once")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--output", type=Path, help="file that a line for each figure is appended to")
    args = parser.parse_args()
    report = run(args.minutes, args.streams, args.seed)
    print(report)
    if report.growth_bytes > MAX_GROWTH_BYTES:
        print(f"memory grew by {report.growth_bytes / 1e6:.0f} MB", file=sys.stderr)
        return 1
    if args.output is not None:
        append_records(args.output, records(report, args.minutes, args.streams))
    return 0


if __name__ == "__main__":
    sys.exit(main())
