"""The benchmark's arithmetic and its committed results; no engine runs here."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULT_FILES = sorted((ROOT / "benchmark" / "results").glob("speculative*.jsonl"))


@pytest.fixture
def common(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmark"))
    import common

    return common


@pytest.fixture
def bench(common: ModuleType) -> ModuleType:
    import bench_speculative

    return bench_speculative


def record(common: ModuleType, **changes: object) -> dict[str, object]:
    good = common.Record(
        bench="speculative",
        model="tiny-gemma4",
        task="count",
        batch=1,
        metric="spec_throughput",
        value=10.0,
        unit="tokens/s",
        versus="plain_throughput",
        ratio=2.0,
        machine="a processor, 2 cores",
        versions="python 3.11",
        commit="0123456789",
        command="python benchmark/bench_speculative.py",
    )
    return {**asdict(good), **changes}


@pytest.mark.parametrize("file", RESULT_FILES, ids=lambda file: file.name)
def test_committed_lines_are_records(common: ModuleType, file: Path) -> None:
    lines = file.read_text(encoding="utf-8").splitlines()
    assert lines
    for number, line in enumerate(lines, 1):
        try:
            common.validate_record(json.loads(line))
        except ValueError as err:
            pytest.fail(f"{file.name}:{number}: {err}")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"extra": 1}, "exactly the fields"),
        ({"task": ""}, "task"),
        ({"batch": 0}, "batch"),
        ({"batch": True}, "batch"),
        ({"value": float("nan")}, "value"),
        ({"value": -1.0}, "value"),
        ({"value": "10"}, "value"),
        ({"ratio": None}, "versus and ratio"),
        ({"versus": None}, "versus and ratio"),
        ({"command": "python x --draft /home/someone/model"}, "absolute path"),
        ({"command": "python x --output /data/lines"}, "absolute path"),
        ({"model": "/models/gemma"}, "absolute path"),
    ],
)
def test_malformed_record_is_refused(common: ModuleType, changes: dict[str, object], word: str) -> None:
    common.validate_record(record(common))
    with pytest.raises(ValueError, match=word):
        common.validate_record(record(common, **changes))


def test_nothing_is_written_when_one_record_is_malformed(common: ModuleType, tmp_path: Path) -> None:
    good = common.Record(**record(common))
    bad = common.Record(**record(common, value=float("inf")))
    with pytest.raises(ValueError, match="value"):
        common.append_records(tmp_path / "lines.jsonl", [good, bad])
    assert not (tmp_path / "lines.jsonl").exists()
    common.append_records(tmp_path / "lines.jsonl", [good, good])
    assert len((tmp_path / "lines.jsonl").read_text().splitlines()) == 2


def test_command_keeps_no_foreign_path(common: ModuleType, tmp_path: Path) -> None:
    script = ROOT / "benchmark" / "common.py"
    line = common.command_line(
        [str(script), "--draft", str(tmp_path), "--output=/nowhere/lines.jsonl", "--tokens", "8"]
    )
    assert line == f"python benchmark/common.py --draft {tmp_path.name} --output=lines.jsonl --tokens 8"


def cell(bench: ModuleType, task: str = "count", spec_tokens: tuple[int, ...] = (1, 2, 3, 4, 5)) -> object:
    def run(seconds: float, verify_ct: int = 0, tokens: tuple[int, ...] = (1, 2, 3, 4, 5)) -> object:
        return bench.Run([list(tokens), [7]], seconds, verify_ct)

    runs = {
        bench.PLAIN: [run(3.0), run(2.0), run(1.0)],
        bench.SPEC: [run(1.0, 2, spec_tokens), run(0.5, 2, spec_tokens), run(4.0, 2, spec_tokens)],
        bench.HF_PLAIN: [run(6.0), run(12.0), run(6.0)],
        bench.HF_ASSISTED: [run(4.0), run(4.0), run(4.0)],
    }
    return bench.Cell(task, 1, runs)


def test_records_hold_medians_and_ratios(bench: ModuleType) -> None:
    facts = {"machine": "m", "versions": "v", "commit": "c", "command": "python x"}
    records = bench.cell_records(cell(bench), "tiny-gemma4", facts)
    found = {(r.metric, r.versus): (r.value, r.ratio) for r in records}
    assert found[("plain_throughput", "transformers_plain_throughput")] == (3.0, 3.0)
    assert found[("plain_throughput", "transformers_assisted_throughput")] == (3.0, 2.0)
    assert found[("spec_throughput", "plain_throughput")] == (6.0, 2.0)
    assert found[("spec_throughput", "transformers_assisted_throughput")] == (6.0, 4.0)
    assert found[("transformers_plain_throughput", None)] == (1.0, None)
    assert found[("spec_accept_length", None)] == (2.0, None)
    assert found[("tokens_equal", None)] == (1.0, None)
    assert found[("tokens_equal_transformers", None)] == (1.0, None)


def test_a_differing_prompt_shows(bench: ModuleType) -> None:
    different = cell(bench, spec_tokens=(1, 2, 3, 4, 6))
    assert different.equal_share(bench.SPEC, bench.PLAIN) == 0.5
    assert "50%" in bench.report([different])


def test_tasks_merge_by_repetition(bench: ModuleType) -> None:
    merged = bench.merge_tasks([cell(bench, "count"), cell(bench, "code")], batch=1)
    assert merged.task == "all"
    assert [run.seconds for run in merged.runs[bench.PLAIN]] == [6.0, 4.0, 2.0]
    assert merged.throughput(bench.PLAIN) == 3.0
    assert merged.runs[bench.SPEC][0].accept_length == 2.0
