"""Counts of durations by size, as Prometheus wants them, without a library."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

# upper bounds in seconds, for what takes a part of a millisecond on a GPU and a part of a second on a CPU
STEP_BOUNDS_S = (
    0.0005,
    0.001,
    0.002,
    0.003,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.03,
    0.05,
    0.1,
    0.2,
    0.5,
    1.0,
    2.0,
    5.0,
)


class Histogram:
    """``counts[i]`` values are at most ``bounds[i]`` and above the bound before; the last entry has the larger ones."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count ``value`` as often as ``times`` says."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for another process."""
        return {"bounds": list(self.bounds), "counts": list(self.counts), "sum": self.total}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Histogram:
        """The inverse of ``to_dict``."""
        histogram = cls(tuple(data["bounds"]))
        histogram.counts = list(data["counts"])
        histogram.total = data["sum"]
        return histogram
