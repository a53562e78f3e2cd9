"""Randomised load for a while: no wrong token, memory balanced and flat. `scripts/soak.py` runs it for longer."""

from __future__ import annotations

import os

import pytest

from fixtures.soak import VARIANTS, engine_load, soak
from fixtures.soak_server import server_load

# the length in seconds of all of it together, of which the server has a third; continuous integration may ask for more
SECONDS = float(os.environ.get("SOAK_SECONDS", "180"))
MAX_GROWTH_BYTES = 48e6
PARTS = {
    "chains": ("plain", "adaptive", "overlapped", "in turn", "pages"),
    "trees and drawn drafts": ("trees", "trees, pages", "sampled drafts"),
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 300), pytest.mark.usefixtures("one_thread")]


def test_every_engine_is_in_a_part() -> None:
    assert sorted(name for names in PARTS.values() for name in names) == sorted(VARIANTS)


@pytest.mark.parametrize("part", PARTS)
def test_randomised_load(part: str) -> None:
    report = soak(SECONDS / 3, 5, [engine_load(name) for name in PARTS[part]])
    assert all(counts.finished > 0 for counts in report.counts.values()), report
    assert report.total("aborted") > 0, report
    assert report.total("retractions") > 0, f"memory was never short: {report}"
    assert report.growth_bytes < MAX_GROWTH_BYTES, report


def test_clients_that_come_and_go() -> None:
    report = soak(SECONDS / 3, 5, [server_load])
    (counts,) = report.counts.values()
    assert counts.finished > 0 and counts.aborted > 0, report
    assert report.growth_bytes < MAX_GROWTH_BYTES, report
