"""`/metrics`: counts and times of requests, and the state of the scheduler, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from prometheus_client import ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from sglang.srt.managers.generate_output import GenerateOutput
from sglang.srt.managers.histogram import Histogram

# upper bounds in seconds
_TTFT_BOUNDS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 20.0, 60.0)
_ITL_BOUNDS = (0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.2, 0.5, 1.0)
_E2E_BOUNDS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


class ServerMetrics:
    """A ``RequestObserver`` that counts, and the page that shows its counts beside the scheduler's. One event loop."""

    def __init__(self, model_name: str, dp_size: int = 1) -> None:
        """With several replicas what schedulers say has the label ``dp_rank``."""
        self._model_name = model_name
        self._dp_size = dp_size
        self._ttft_s = Histogram(_TTFT_BOUNDS)
        self._itl_s = Histogram(_ITL_BOUNDS)
        self._e2e_s = Histogram(_E2E_BOUNDS)
        self._queue_s = Histogram(_TTFT_BOUNDS)
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._generation_tokens = 0
        self._num_requests = 0
        self._num_aborted = 0
        self._process = ProcessCollector(registry=None)

    def received(self, output: GenerateOutput, since_s: float, *, stream: bool) -> None:
        num_new, finish = len(output.output_ids), output.finish_reason
        aborted = finish is not None and finish.type == "abort"
        self._generation_tokens += num_new
        is_first = num_new == output.completion_tokens
        if is_first and (num_new or not aborted):
            self._prompt_tokens += output.prompt_tokens
            self._cached_tokens += output.cached_tokens
            self._queue_s.observe(output.queue_time_s)
        if stream and num_new:
            # what came at once took equally long, token by token
            self._ttft_s.observe(since_s) if is_first else self._itl_s.observe(since_s / num_new, num_new)
        if finish is not None:
            self._num_requests += 1
            self._num_aborted += aborted
            if not aborted:
                self._e2e_s.observe(output.e2e_latency_s)

    def left(self) -> None:
        self._num_requests += 1
        self._num_aborted += 1

    def render(
        self, accept: str, schedulers: Mapping[int, Mapping[str, Any]], lost: Mapping[int, str]
    ) -> tuple[bytes, str]:
        """The page and its content type, in the format that the header ``accept`` asks for.

        ``schedulers``: answers of the replicas to ``server_info``; none, when they did not answer, leaves their part
        out. ``lost``: replicas that ended.
        """
        families = _Families({"model_name": self._model_name})
        text = "1 when the scheduler answered this scrape in time."
        metrics = [*self._of_requests(families), families.gauge("scheduler_responds", text, bool(schedulers))]
        metrics.append(families.gauge("num_lost_replicas", "Replicas that ended while others go on.", len(lost)))
        metrics += _joined(
            _of_scheduler(families.of_replica(replica) if self._dp_size > 1 else families, info)
            for replica, info in schedulers.items()
        )
        encode, content_type = choose_encoder(accept)
        return encode(_Page([*metrics, *self._process.collect()])), content_type

    def _of_requests(self, families: _Families) -> Iterator[Metric]:
        yield families.counter("prompt_tokens", "Prompt tokens of requests that were started.", self._prompt_tokens)
        yield families.counter("cached_tokens", "Prompt tokens whose KV was reused.", self._cached_tokens)
        yield families.counter("generation_tokens", "Tokens generated.", self._generation_tokens)
        yield families.counter("num_requests", "Requests that ended, however they did.", self._num_requests)
        text = "Requests that were aborted or refused, or whose client went away."
        yield families.counter("num_aborted_requests", text, self._num_aborted)
        yield families.histogram(
            "time_to_first_token_seconds", "From arrival to the first token, of streamed requests.", self._ttft_s
        )
        yield families.histogram(
            "inter_token_latency_seconds",
            "Between tokens of streamed requests; tokens that arrive together share the time equally.",
            self._itl_s,
        )
        yield families.histogram(
            "e2e_request_latency_seconds",
            "From arrival to the last token, of requests that were not aborted.",
            self._e2e_s,
        )
        yield families.histogram(
            "queue_time_seconds", "From arrival at the scheduler to the first step.", self._queue_s
        )


def _of_scheduler(families: _Families, info: Mapping[str, Any]) -> Iterator[Metric]:
    totals, kv = info["totals"], info["kv_cache"]
    running = info["num_running_reqs"]
    yield families.gauge("num_running_reqs", "Requests that run.", running)
    yield families.gauge("num_queue_reqs", "Requests that wait.", info["num_queue_reqs"])
    yield families.gauge("token_usage", "Part of the KV pool that requests hold.", info["token_usage"])
    yield families.gauge("num_used_tokens", "Slots of the KV pool that requests hold.", kv["owned"] + kv["protected"])
    yield families.gauge("max_total_num_tokens", "Slots of the KV pool.", kv["total"])
    kv_text = "Slots of the KV pool: free, cached for later requests, or held by requests."
    slots = {"free": kv["free"], "cached": kv["evictable"], "held": kv["owned"] + kv["protected"]}
    yield families.gauges("kv_cache_tokens", kv_text, "state", slots)
    throughput = info["last_gen_throughput"] if running else 0.0
    yield families.gauge("gen_throughput", "Tokens per second of the last interval of decode steps.", throughput)
    hit_rate = totals["cached_tokens"] / max(totals["prompt_tokens"], 1)
    yield families.gauge("cache_hit_rate", "Part of all prompt tokens whose KV was reused.", hit_rate)
    text = "Requests that had to give up their KV for others and start anew."
    yield families.counter("num_retracted_requests", text, totals["num_retractions"])
    yield families.histogram("prefill_step_seconds", "Prefill steps.", Histogram.from_dict(info["prefill_step_s"]))
    text = "Decode steps; with speculation these are rounds of drafting and verification."
    yield families.histogram("decode_step_seconds", text, Histogram.from_dict(info["decode_step_s"]))
    if "avg_spec_accept_length" in info:
        yield from _of_speculation(families, info, totals)


def _of_speculation(families: _Families, info: Mapping[str, Any], totals: Mapping[str, Any]) -> Iterator[Metric]:
    accepted = {str(position): count for position, count in enumerate(totals["accepted_by_position"])}
    rates = {str(position): rate for position, rate in enumerate(info["spec_accept_by_position"])}
    # the last interval's, and before its end the mean of all
    recent = info["last_spec_accept_length"] or info["avg_spec_accept_length"]
    yield families.gauge("spec_accept_length", "Tokens per verification, in the last interval of decode steps.", recent)
    yield families.gauges(
        "spec_accept_rate_by_position", "Part of this draft's verifications that accepted it.", "position", rates
    )
    yield families.counter("spec_verifications", "Verifications, one for each request and round.", totals["verify_ct"])
    yield families.counters("spec_accepted_tokens", "Drafts accepted, by their position.", "position", accepted)


@dataclass(frozen=True, slots=True)
class _Families:
    """Metrics of this server, all with the same labels."""

    labels: Mapping[str, str]

    def of_replica(self, replica: int) -> _Families:
        return _Families({**self.labels, "dp_rank": str(replica)})

    def gauge(self, name: str, text: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(f"sglang:{name}", text, labels=[*self.labels])
        gauge.add_metric([*self.labels.values()], value)
        return gauge

    def gauges(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        gauge = GaugeMetricFamily(f"sglang:{name}", text, labels=[*self.labels, label])
        for key, value in values.items():
            gauge.add_metric([*self.labels.values(), key], value)
        return gauge

    def counter(self, name: str, text: str, value: float) -> Metric:
        counter = CounterMetricFamily(f"sglang:{name}", text, labels=[*self.labels])
        counter.add_metric([*self.labels.values()], value)
        return counter

    def counters(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        counter = CounterMetricFamily(f"sglang:{name}", text, labels=[*self.labels, label])
        for key, value in values.items():
            counter.add_metric([*self.labels.values(), key], value)
        return counter

    def histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        bounds = [*map(str, histogram.bounds), "+Inf"]
        family = HistogramMetricFamily(f"sglang:{name}", text, labels=[*self.labels])
        buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
        family.add_metric([*self.labels.values()], buckets, histogram.total)
        return family


def _joined(parts: Iterable[Iterable[Metric]]) -> list[Metric]:
    """Each metric once, with the samples of all parts."""
    joined: dict[str, Metric] = {}
    for part in parts:
        for metric in part:
            if metric.name in joined:
                joined[metric.name].samples += metric.samples
            else:
                joined[metric.name] = metric
    return list(joined.values())


@dataclass(frozen=True, slots=True)
class _Page(Collector):
    """Metrics that are made already."""

    metrics: list[Metric]

    def collect(self) -> list[Metric]:
        return self.metrics
