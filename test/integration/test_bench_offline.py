"""`bench_offline_throughput` on the shipped pair: its figures, its files and what it refuses."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from sglang import bench_offline_throughput
from sglang.bench_offline_throughput import main, parse_args

SMALL = ("--model-path", "tiny-gemma4", "--device", "cpu", "--log-level", "warning", "--num-prompts", "3")
SIZES = ("--random-input-len", "20", "--random-output-len", "6", "--random-range-ratio", "1")
pytestmark = pytest.mark.usefixtures("one_thread")


def test_figures_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "runs.jsonl"
    monkeypatch.setenv("SGLANG_TORCH_PROFILER_DIR", str(tmp_path / "traces"))
    spec = ("--speculative-algorithm", "FROZEN_KV_MTP", "--tokenize-prompt", "--profile")
    assert main([*SMALL, *SIZES, *spec, "--result-filename", str(file)]) == 0
    out = capsys.readouterr().out
    record = json.loads(file.read_text())
    assert "Offline Throughput Benchmark Result" in out and "Accept length:" in out
    assert record["successful_requests"] == 3
    assert (record["total_input_tokens"], record["total_output_tokens"]) == (60, 18)
    assert record["output_throughput"] * record["total_latency"] == pytest.approx(18)
    assert record["total_throughput"] * record["total_latency"] == pytest.approx(78)
    assert 1 <= record["accept_length"] <= 8
    (trace,) = (tmp_path / "traces").iterdir()
    assert f"trace: {trace}" in out and json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]


def test_texts_without_speculation_or_warm_up(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Hello there", "output_len": 4}\n{"prompt": "Count.", "output_len": 2}\n')
    file = tmp_path / "runs.jsonl"
    data = ("--dataset-name", "custom", "--dataset-path", str(prompts))
    assert main([*SMALL, *data, "--skip-warmup", "--result-filename", str(file)]) == 0
    record = json.loads(file.read_text())
    assert record["total_output_tokens"] == 6 and record["accept_length"] is None


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--num-prompts", "2"], "--model-path is missing"),
        ([*SMALL, "--bogus"], "unknown flag '--bogus'"),
        ([*SMALL, "--page-size", "0"], "--page-size must be"),
        ([*SMALL, "--dataset-name", "custom"], "give one as --dataset-path"),
        ([*SMALL, *SIZES, "--extra-request-body", '{"bogus": 1}'], "unknown field 'bogus'"),
        ([*SMALL, *SIZES, "--profile"], "SGLANG_TORCH_PROFILER_DIR"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SGLANG_TORCH_PROFILER_DIR", raising=False)
    assert main(argv) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_options_of_both_kinds() -> None:
    args, server_args = parse_args([*SMALL, "--page-size", "4", "--seed", "7", "--gsp-num-groups", "2"])
    assert (args.num_prompts, args.seed, args.gsp_num_groups, server_args.page_size) == (3, 7, 2, 4)
    with pytest.raises(SystemExit):
        parse_args([*SMALL, "--num-prompts", "0"])
    assert bench_offline_throughput.__doc__
