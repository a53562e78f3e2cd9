"""What `/metrics` says, computed by hand from the outputs that a tokenizer manager would report."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fixtures.source_tree import ROOT
from sglang.srt.entrypoints.prometheus import ServerMetrics
from sglang.srt.managers.generate_output import GenerateOutput
from sglang.srt.managers.histogram import Histogram
from sglang.srt.managers.io_struct import FinishReason

DOCS = ROOT / "docs"
END = FinishReason("length", length=9)
ABORT = FinishReason("abort", message="aborted")


def _output(num_new: int, total: int, finish: FinishReason | None = None, **values: Any) -> GenerateOutput:
    fields = {"index": 0, "rid": "r", "text": "", "output_ids": (7,) * num_new, "finish_reason": finish}
    fields |= {"prompt_tokens": 10, "completion_tokens": total, "cached_tokens": 4, "spec": None}
    return GenerateOutput(**(fields | {"e2e_latency_s": 1.5, "ttft_s": 0.3, "queue_time_s": 0.1} | values))


def _samples(metrics: ServerMetrics, scheduler: dict[str, Any] | None = None) -> dict[tuple[str, ...], float]:
    """(name without prefix, further label values...) -> value."""
    page, content_type = metrics.render("", {} if scheduler is None else {0: scheduler}, {})
    assert content_type.startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            if sample.name.startswith("sglang:"):
                labels = dict(sample.labels)
                assert labels.pop("model_name") == 'a "model"'
                found[(sample.name.removeprefix("sglang:"), *labels.values())] = sample.value
    return found


def _scheduler_info() -> dict[str, Any]:
    """What a scheduler with two drafts replies to ``server_info``."""
    steps = Histogram((0.01, 0.1))
    for seconds in (0.01, 0.02, 5.0):
        steps.observe(seconds)
    totals = {"prompt_tokens": 40, "cached_tokens": 10, "num_retractions": 2, "verify_ct": 20}
    return {
        "totals": totals | {"accepted_by_position": [15, 5]},
        "kv_cache": {"total": 100, "free": 50, "evictable": 20, "protected": 5, "owned": 25, "open_requests": 1},
        "num_running_reqs": 3,
        "num_queue_reqs": 1,
        "token_usage": 0.5,
        "last_gen_throughput": 70.0,
        "prefill_step_s": Histogram((1.0,)).to_dict(),
        "decode_step_s": steps.to_dict(),
        "last_spec_accept_length": 0.0,
        "avg_spec_accept_length": 2.0,
        "spec_accept_by_position": [0.75, 0.25],
    }


@pytest.fixture
def metrics() -> ServerMetrics:
    return ServerMetrics('a "model"')


def test_a_stream(metrics: ServerMetrics) -> None:
    metrics.received(_output(1, 1), 0.3, stream=True)
    metrics.received(_output(4, 5), 0.1, stream=True)
    metrics.received(_output(2, 7, END), 0.04, stream=True)
    found = _samples(metrics)
    assert found["prompt_tokens_total",] == 10 and found["cached_tokens_total",] == 4
    assert found["generation_tokens_total",] == 7
    assert found["num_requests_total",] == 1 and found["num_aborted_requests_total",] == 0
    assert found["time_to_first_token_seconds_sum",] == pytest.approx(0.3)
    assert found["time_to_first_token_seconds_count",] == 1
    # the first token has no token before it; four shared 0.1 s and two 0.04 s
    assert found["inter_token_latency_seconds_count",] == 6
    assert found["inter_token_latency_seconds_sum",] == pytest.approx(0.14)
    assert found["inter_token_latency_seconds_bucket", "0.02"] == 2
    assert found["inter_token_latency_seconds_bucket", "0.03"] == 6
    assert found["e2e_request_latency_seconds_sum",] == 1.5
    assert found["queue_time_seconds_count",] == 1


def test_a_whole_reply_has_no_time_of_its_first_token(metrics: ServerMetrics) -> None:
    metrics.received(_output(9, 9, END), 1.5, stream=False)
    found = _samples(metrics)
    assert found["generation_tokens_total",] == 9 and found["e2e_request_latency_seconds_count",] == 1
    assert found["time_to_first_token_seconds_count",] == found["inter_token_latency_seconds_count",] == 0


def test_aborts(metrics: ServerMetrics) -> None:
    metrics.received(_output(0, 0, ABORT), 0.1, stream=True)  # before its first step
    metrics.received(_output(3, 3), 0.1, stream=True)
    metrics.received(_output(0, 3, ABORT), 0.1, stream=True)
    metrics.received(_output(2, 2), 0.1, stream=True)
    metrics.left()
    found = _samples(metrics)
    assert found["num_requests_total",] == found["num_aborted_requests_total",] == 3
    assert found["prompt_tokens_total",] == 20 and found["generation_tokens_total",] == 5
    assert found["e2e_request_latency_seconds_count",] == 0


def test_no_new_token_is_not_a_prompt_twice(metrics: ServerMetrics) -> None:
    metrics.received(_output(0, 0, END), 0.1, stream=True)
    assert _samples(metrics)["prompt_tokens_total",] == 10
    metrics.received(_output(1, 1), 0.1, stream=True)
    metrics.received(_output(0, 1, END), 0.1, stream=True)
    found = _samples(metrics)
    assert found["prompt_tokens_total",] == 20 and found["inter_token_latency_seconds_count",] == 0


def test_the_scheduler(metrics: ServerMetrics) -> None:
    assert _samples(metrics)["scheduler_responds",] == 0
    info = _scheduler_info()
    found = _samples(metrics, info)
    assert found["scheduler_responds",] == 1
    assert (found["num_running_reqs",], found["num_queue_reqs",], found["token_usage",]) == (3, 1, 0.5)
    assert found["num_used_tokens",] == 30 and found["max_total_num_tokens",] == 100
    assert [found["kv_cache_tokens", state] for state in ("free", "cached", "held")] == [50, 20, 30]
    assert found["gen_throughput",] == 70 and found["cache_hit_rate",] == 0.25
    assert found["num_retracted_requests_total",] == 2
    assert [found["decode_step_seconds_bucket", bound] for bound in ("0.01", "0.1", "+Inf")] == [1, 2, 3]
    assert found["spec_accept_length",] == 2.0 and found["spec_verifications_total",] == 20
    assert [found["spec_accepted_tokens_total", position] for position in "01"] == [15, 5]
    assert [found["spec_accept_rate_by_position", position] for position in "01"] == [0.75, 0.25]
    idle = _samples(metrics, info | {"num_running_reqs": 0, "last_spec_accept_length": 2.5})
    assert idle["gen_throughput",] == 0 and idle["spec_accept_length",] == 2.5


def test_replicas_are_told_apart() -> None:
    metrics = ServerMetrics("model", dp_size=3)
    info = _scheduler_info()
    page = metrics.render("", {0: info, 2: info | {"num_running_reqs": 7}}, {1: "it was ended"})[0].decode()
    families = {family.name: family for family in text_string_to_metric_families(page)}
    running = {s.labels["dp_rank"]: s.value for s in families["sglang:num_running_reqs"].samples}
    assert running == {"0": 3, "2": 7}
    assert families["sglang:num_lost_replicas"].samples[0].value == 1
    accepted = families["sglang:spec_accepted_tokens"].samples
    assert {(s.labels["dp_rank"], s.labels["position"]) for s in accepted} == {(r, p) for r in "02" for p in "01"}
    assert len(re.findall("^# TYPE sglang:decode_step_seconds ", page, flags=re.MULTILINE)) == 1


def test_a_histogram_travels() -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.observe(1.5, 3)
    other = Histogram.from_dict(histogram.to_dict())
    assert (other.bounds, other.counts, other.total) == ((1.0, 2.0), [0, 3, 0], 4.5)


def test_openmetrics(metrics: ServerMetrics) -> None:
    page, content_type = metrics.render("application/openmetrics-text; version=1.0.0", {}, {})
    assert content_type.startswith("application/openmetrics-text") and page.endswith(b"# EOF\n")


def test_documents_and_dashboard_name_the_metrics_there_are(metrics: ServerMetrics) -> None:
    page = metrics.render("", {0: _scheduler_info()}, {})[0].decode()
    # counters have their suffix in the text format, also where it names the family
    there = set(re.findall(r"^# TYPE (sglang:\w+)", page, flags=re.MULTILINE))
    assert len(there) > 20
    assert set(re.findall(r"`(sglang:\w+)`", (DOCS / "observability.md").read_text())) == there
    dashboard = json.loads((DOCS / "observability" / "grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    queries += [item["query"] for item in dashboard["templating"]["list"]]
    names = re.findall(r"sglang:\w+", " ".join(queries))
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}
    assert len(queries) > 30 and shown <= there, shown - there
    # what is derived from others, nearly the same as another, or for alerts, needs no graph of its own
    assert {name.removeprefix("sglang:") for name in there - shown} == {
        "cache_hit_rate",
        "gen_throughput",
        "max_total_num_tokens",
        "num_lost_replicas",
        "num_used_tokens",
        "spec_accept_length",
        "spec_accept_rate_by_position",
        "token_usage",
    }
