"""The benchmark of several ranks, on a CPU at the size of the shipped pair: what it reports, and against what."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--model", "tiny-gemma4", "--device", "cpu", "--dtype", "float32", "--commit", "0123456789", "--repeats", "2"]
SMALL += ["--batch-size", "1", "2", "--context-len", "70", "--num-steps", "2", "--accept-len", "1.5"]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmark"))
    return import_module("bench_tensor_parallel")


def test_two_ranks_beside_one(bench: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    assert bench.main([*SMALL, "--json-out", str(out)]) == 0
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    found: dict[tuple[int, int, str], dict[str, Any]] = {(v["batch"], v["steps"], v["metric"]): v for v in lines}
    for batch in (1, 2):
        for steps, what in ((0, "pass"), (2, "round")):
            for metric in ("time", "time on the device", "throughput"):
                one, two = (found[batch, steps, f"{what} {metric}, tp {size}"] for size in (1, 2))
                assert one["value"] > 0 and one["limit"] is None
                assert two["value"] > 0 and two["limit"] == one["value"]
            rate, time = (found[batch, steps, f"{what} {metric}, tp 2"]["value"] for metric in ("throughput", "time"))
            gained = found[batch, 2, "accept length, tp 2"]["value"] if steps else 1.0
            assert rate == pytest.approx(batch * gained / time * 1e3, rel=1e-2)
        # acceptance is a function of requests and lengths, not of the ranks
        assert found[batch, 2, "accept length, tp 1"]["value"] == found[batch, 2, "accept length, tp 2"]["value"]
    whole, half = (found[1, 0, f"pass weights per rank, tp {size}"]["value"] for size in (1, 2))
    assert whole / 2 <= half < 0.7 * whole


def test_collectives_are_told_from_other_kernels(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step in which the ranks meet is not counted, however long it takes."""
    kernel = import_module("gpu_report").Kernel
    names = ["ncclDevKernel_AllGather_RING_LL(...)", "gemm", "one_shot_all_reduce_kernel<float>", "norm"]

    def trace(run: Callable[[], None], device: str) -> list[Any]:
        run()
        spans = [(name, 900.0 if step == 0 else 5.0) for step in range(runs[0]) for name in names]
        return [kernel(name, 1000.0 * at, 1000.0 * at + us) for at, (name, us) in enumerate(spans)]

    runs = [0]

    def step() -> None:
        runs[0] += 1

    monkeypatch.setattr(bench, "trace_kernels", trace)
    assert bench.collectives_of("cuda", step) == bench.Collectives(2, 10.0, 20.0)


def test_the_error_of_a_rank_is_a_failed_model(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([*SMALL, "--tp-size", "3"]) == 1
    assert "failed: tiny-gemma4" in capsys.readouterr().out
