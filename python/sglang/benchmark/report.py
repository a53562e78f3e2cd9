"""Figures of `bench_serving`: from the outcomes of requests to one record and one block of text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sglang.benchmark.client import Outcome

_WIDTH = 50


@dataclass(frozen=True, slots=True)
class Run:
    """All outcomes of one run. ``accept_length``: tokens per verification, None where nothing was verified."""

    outcomes: Sequence[Outcome]
    duration_s: float
    accept_length: float | None

    @property
    def completed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if not outcome.error]


def figures(run: Run, retokenized: int) -> dict[str, Any]:
    """Name -> value, with sglang's names. ``retokenized``: tokens of all texts, encoded anew."""
    done = run.completed
    streamed = [o for o in done if o.arrivals]
    inputs, outputs = sum(o.prompt_len for o in done), sum(o.output_len for o in done)
    # the first token belongs to the prompt's latency
    tpots = [(o.latency_s - o.ttft_s) / (o.output_len - 1) for o in streamed if o.output_len > 1]
    latencies = [o.latency_s for o in done]
    return {
        "duration": run.duration_s,
        "completed": len(done),
        "failed": len(run.outcomes) - len(done),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "total_output_tokens_retokenized": retokenized,
        "request_throughput": len(done) / run.duration_s,
        "input_throughput": inputs / run.duration_s,
        "output_throughput": outputs / run.duration_s,
        "total_throughput": (inputs + outputs) / run.duration_s,
        "max_output_tokens_per_s": _peak_tokens(done),
        "max_concurrent_requests": _peak_requests(done),
        "concurrency": sum(latencies) / run.duration_s,
        "accept_length": run.accept_length,
        **_spread("e2e_latency", latencies),
        **_spread("ttft", [o.ttft_s for o in streamed]),
        **_spread("tpot", tpots),
        **_spread("itl", [gap for o in streamed for gap in o.itls_s]),
    }


def details(run: Run) -> dict[str, Any]:
    """One entry for each request, in the order of sending."""
    return {
        "input_lens": [o.prompt_len for o in run.outcomes],
        "output_lens": [o.output_len for o in run.outcomes],
        "ttfts": [o.ttft_s for o in run.outcomes],
        "itls": [o.itls_s for o in run.outcomes],
        "generated_texts": [o.text for o in run.outcomes],
        "errors": [o.error for o in run.outcomes],
    }


def render(record: dict[str, Any]) -> str:
    """The block of text that is printed."""
    limit = record["max_concurrency"]
    lines = [
        f"{' Serving Benchmark Result ':=^{_WIDTH}}",
        _line("Backend:", record["backend"]),
        _line("Traffic request rate:", record["request_rate"]),
        _line("Max request concurrency:", "not set" if limit is None else limit),
        _line("Successful requests:", record["completed"]),
    ]
    if record["failed"]:
        lines.append(_line("Failed requests:", record["failed"]))
    lines += [
        _line("Benchmark duration (s):", record["duration"]),
        _line("Total input tokens:", record["total_input_tokens"]),
        _line("Total generated tokens:", record["total_output_tokens"]),
        _line("Total generated tokens (retokenized):", record["total_output_tokens_retokenized"]),
        _line("Request throughput (req/s):", record["request_throughput"]),
        _line("Input token throughput (tok/s):", record["input_throughput"]),
        _line("Output token throughput (tok/s):", record["output_throughput"]),
        _line("Peak output token throughput (tok/s):", record["max_output_tokens_per_s"]),
        _line("Peak concurrent requests:", record["max_concurrent_requests"]),
        _line("Total token throughput (tok/s):", record["total_throughput"]),
        _line("Concurrency:", record["concurrency"]),
    ]
    if record["accept_length"] is not None:
        lines.append(_line("Accept length:", record["accept_length"]))
    for title, name, label, values in (
        ("End-to-End Latency", "e2e_latency", "E2E Latency", ("mean", "median", "p90", "p99")),
        ("Time to First Token", "ttft", "TTFT", ("mean", "median", "p99")),
        ("Time per Output Token (excl. 1st token)", "tpot", "TPOT", ("mean", "median", "p99")),
        ("Inter-Token Latency", "itl", "ITL", ("mean", "median", "p95", "p99", "max")),
    ):
        if not record[f"max_{name}_ms"]:
            continue  # whole replies have no times of tokens
        lines.append(f"{title:-^{_WIDTH}}")
        lines += [_line(f"{value.capitalize()} {label} (ms):", record[f"{value}_{name}_ms"]) for value in values]
    return "\n".join([*lines, "=" * _WIDTH])


def _line(label: str, value: Any) -> str:
    return f"{label:<40} {f'{value:.2f}' if isinstance(value, float) else value:<10}".rstrip()


def _spread(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Mean, median and so on in milliseconds; 0 where there is nothing."""
    ms = np.asarray(seconds or [0.0]) * 1e3
    values = {"mean": ms.mean(), "median": np.median(ms), "std": ms.std(), "max": ms.max()}
    values |= {f"p{percent}": np.percentile(ms, percent) for percent in (90, 95, 99)}
    return {f"{kind}_{name}_ms": float(value) for kind, value in values.items()}


def _peak_tokens(done: Sequence[Outcome]) -> float:
    """Most tokens that came within one second of the clock."""
    start = min((o.start_s for o in done), default=0.0)
    seconds: Counter[int] = Counter()
    for outcome in done:
        for when, count in outcome.arrivals:
            seconds[int(when - start)] += count
    return float(max(seconds.values(), default=0))


def _peak_requests(done: Sequence[Outcome]) -> int:
    """Most requests that were under way at once."""
    changes = sorted([(o.start_s, 1) for o in done] + [(o.end_s, -1) for o in done])
    running = peak = 0
    for _, change in changes:
        running += change
        peak = max(peak, running)
    return peak
