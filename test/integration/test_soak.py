"""Randomised load for a while: no wrong token, memory balanced and flat. `scripts/soak.py` runs it for longer."""

from __future__ import annotations

import os

import pytest

from fixtures.soak import soak

# the length in seconds; continuous integration may ask for more
SECONDS = float(os.environ.get("SOAK_SECONDS", "15"))


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 300)
@pytest.mark.usefixtures("one_thread")
def test_randomised_load() -> None:
    report = soak(SECONDS, seed=5)
    assert report.num_finished > SECONDS and report.num_aborted > 0, report
    assert report.num_retractions > 0, "memory was never short"
    assert report.growth_bytes < 48e6, report
