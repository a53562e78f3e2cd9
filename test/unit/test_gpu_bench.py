"""The GPU benchmarks, on a CPU at the size of the shipped pair: that they run, and that their figures add up."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = sorted((ROOT / "benchmark" / "results").glob("h200*.jsonl"))
ON_CPU = ["--device", "cpu", "--dtype", "float32", "--commit", "0123456789", "--repeats", "2"]

Load = Callable[[str], ModuleType]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Import a module of ``benchmark/``."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmark"))
    return import_module


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def line(load: Load, **changes: object) -> dict[str, object]:
    cell = ("one_batch", "e4b", 1, 1024, 0, "pass time", 3.0, "ms", 2.1, 0.7)
    good = load("gpu_report").Line(*cell, gpu="a GPU", versions="python 3", commit="0123456789", command="python x")
    return {**asdict(good), **changes}


def report(load: Load, path: Path | None = None) -> Any:
    return load("gpu_report").Report("kernels", argparse.Namespace(json_out=path, device="cpu", commit="0123456789"))


@pytest.mark.parametrize("file", COMMITTED, ids=lambda file: file.name)
def test_committed_lines_are_well_formed(load: Load, file: Path) -> None:
    lines = read(file)
    assert lines
    for number, values in enumerate(lines, 1):
        try:
            load("gpu_report").validate_line(values)
        except ValueError as err:
            pytest.fail(f"{file.name}:{number}: {err}")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"extra": 1}, "exactly the fields"),
        ({"gpu": ""}, "gpu"),
        ({"batch": 0}, "batch"),
        ({"steps": True}, "steps"),
        ({"context": -1}, "context"),
        ({"value": float("nan")}, "value"),
        ({"value": None}, "value"),
        ({"limit": None}, "limit and ratio"),
        ({"ratio": float("inf")}, "ratio"),
        ({"command": "python x --json-out /data/lines"}, "absolute path"),
    ],
)
def test_malformed_lines_are_refused(load: Load, changes: dict[str, object], word: str) -> None:
    validate = load("gpu_report").validate_line
    validate(line(load))
    with pytest.raises(ValueError, match=word):
        validate(line(load, **changes))


def test_a_ratio_is_better_when_larger(load: Load, tmp_path: Path) -> None:
    lines = report(load, tmp_path / "folder" / "lines.jsonl")
    assert lines.add("e4b", "pass time", 4.0, "ms", limit=2.0).ratio == 0.5
    assert lines.add("e4b", "throughput", 400.0, "tokens/s", limit=200.0).ratio == 2.0
    assert lines.add("e4b", "launches", 12.0, "launches").ratio is None
    assert [values["value"] for values in read(tmp_path / "folder" / "lines.jsonl")] == [4.0, 400.0, 12.0]
    assert len(load("gpu_report").table(lines.lines).splitlines()) == 5


def test_a_copy_without_history_must_say_what_it_is(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_git(*args: object, **kwargs: object) -> None:
        raise subprocess.CalledProcessError(128, "git")

    monkeypatch.setattr(subprocess, "run", no_git)
    with pytest.raises(ValueError, match="--commit"):
        load("gpu_report").Report("kernels", argparse.Namespace(json_out=None, device="cpu", commit=None))


def test_limits_are_measured(load: Load) -> None:
    limits = load("gpu_report").measure_limits("cpu", torch.float32)
    assert 1e8 < limits.bytes_per_s < 1e13 and 1e8 < limits.flops_per_s < 1e15


def test_one_batch(load: Load, tmp_path: Path) -> None:
    shapes, out = load("model_shapes"), tmp_path / "lines.jsonl"
    arguments = ["--model", "tiny-gemma4", "--batch-size", "1", "2", "--context-len", "70", "--num-steps", "2"]
    arguments += ["--prefill-len", "100", "--json-out", str(out)]
    assert load("bench_one_batch").main([*arguments, *ON_CPU]) == 0
    found = {(v["batch"], v["context"], v["steps"], v["metric"]): v for v in read(out)}
    pair = shapes.make_pair("tiny-gemma4", tmp_path)
    for batch in (1, 2):
        one, whole = found[batch, 70, 0, "pass time"], found[batch, 70, 2, "round time"]
        assert one["limit"] > 0 and whole["limit"] > one["limit"]
        expected = shapes.round_traffic(pair, 2, batch, 70, 4).total / 1e9
        assert found[batch, 70, 2, "round bytes"]["value"] == pytest.approx(expected, rel=1e-3)
        # plain decode gains a token per pass; the throughput is the batch over the time
        rate = found[batch, 70, 0, "pass throughput"]["value"]
        assert rate == pytest.approx(batch / (one["value"] / 1e3), rel=1e-2)
        assert 1.0 <= found[batch, 70, 2, "accept length"]["value"] <= 3.0
        draft, verify = (found[batch, 70, 2, f"{part} time"] for part in ("draft loop", "target verify"))
        assert draft["limit"] + verify["limit"] == pytest.approx(whole["limit"], rel=1e-2)
        assert draft["value"] > 0 and verify["value"] > 0
    assert found[1, 100, 0, "prefill rate"]["ratio"] > 0
    assert found[1, 100, 0, "prefill throughput against all rows"]["ratio"] > 0


def test_figures_say_how_the_server_is_started(load: Load, tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    arguments = ["--model", "tiny-gemma4", "--batch-size", "--prefill-len", "40", "--json-out", str(out)]
    arguments += ["--enable-deterministic-inference", "--piecewise-cuda-graph-max-tokens", "64"]
    assert load("bench_one_batch").main([*arguments, *ON_CPU]) == 0
    metrics = {values["metric"] for values in read(out) if values["model"] != "any"}
    assert metrics and all(metric.endswith(", deterministic, graphs of 64") for metric in metrics)


def test_contexts_are_found_in_the_prefix_cache(load: Load, tmp_path: Path) -> None:
    """A request starts with its whole context committed, and nothing but its last token was computed."""
    pair = load("model_shapes").make_pair("tiny-gemma4", tmp_path)
    timed = load("timed").Timed(pair, 2, "cpu", "float32", [3], 6000, context_length=600)
    for context in (80, 33):
        timed.start(3, context)
        reqs = timed.scheduler.running.reqs
        assert [req.kv.committed_len for req in reqs] == [context] * 3
        assert [req.cached_len for req in reqs] == [context - 1] * 3
        before = timed.num_tokens()
        timed.step()
        assert 3 <= timed.num_tokens() - before <= 9
    timed.stop()
    timed.scheduler.kv_manager.check_integrity()


def test_kernels(load: Load, tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    arguments = ["--model", "tiny-gemma4", "--rows", "2", "--context-len", "96", "--json-out", str(out)]
    assert load("bench_kernels").main([*arguments, *ON_CPU]) == 0
    metrics = [values["metric"] for values in read(out)]
    for part in ("qkv sliding", "gate+up", "head ", "norm", "verify full", "draft sliding", "centroid head"):
        assert any(metric.startswith(part) or part in metric for metric in metrics), part
    assert all(values["value"] > 0 for values in read(out))


def test_a_kernel_that_fails_leaves_the_others(load: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cases, bench = load("kernel_cases"), load("bench_kernels")

    def broken(where: Any) -> Any:
        yield cases.Case("broken", where.rows, 0, tuple, lambda: torch.empty(2) @ torch.empty(3), 1.0)

    monkeypatch.setattr(bench, "FAMILIES", {"broken": broken, "norm": cases.norm_cases})
    out = tmp_path / "lines.jsonl"
    arguments = ["--model", "tiny-gemma4", "--rows", "1", "--json-out", str(out)]
    assert bench.main([*arguments, *ON_CPU]) == 1
    assert any("norm" in values["metric"] for values in read(out))


def test_engine(load: Load, tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    arguments = ["--model", "tiny-gemma4", "--batch-size", "1", "2", "--input-len", "20", "--output-len", "8"]
    arguments += ["--num-steps", "2", "--accept-len", "2", "--skip-transformers", "--json-out", str(out)]
    assert load("bench_engine").main([*arguments, *ON_CPU]) == 0
    found = {(values["batch"], values["steps"], values["metric"]): values for values in read(out)}
    for batch in (1, 2):
        plain, against = found[batch, 0, "throughput"], found[batch, 2, "throughput against no speculation"]
        assert against["limit"] == plain["value"] and against["value"] == found[batch, 2, "throughput"]["value"]


def test_random_prompts_are_distinct(load: Load) -> None:
    prompts = load("bench_engine").random_prompts(8, 10, 4096)
    assert len({tuple(prompt) for prompt in prompts}) == 8 and {len(prompt) for prompt in prompts} == {10}


def test_gpu_check_runs_stages_and_sums_up(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "gpu_check.py"), "--out", str(tmp_path), "--commit", "abc"]
    extra = ["--device", "cpu", "--dtype", "float32", "--model", "tiny-gemma4", "--rows", "1", "--repeats", "1"]
    command += ["--stages", "kernels", "--", *extra, "--family", "norm"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "kernels: ok" in result.stdout and "tiny-gemma4 b1" in result.stdout
    assert {values["commit"] for values in read(tmp_path / "h200.jsonl")} == {"abc"}


def test_module_runs_the_script() -> None:
    command = [sys.executable, "-m", "sglang.bench_one_batch", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
    assert result.returncode == 0 and "--context-len" in result.stdout, result.stderr
