"""Prompts and running requests in one pass: no token of an answer changes, and streams do not wait."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fixtures.make_tiny_gemma4 import KINDS
from fixtures.scheduler_driver import SchedulerDriver
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.embedded import EmbeddedModel

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (3, 40, 1, 25, 33, 9)
ARRIVALS = [0, 1, 3, 4, 4, 9]


def prompts() -> list[list[int]]:
    return [[4 + (37 * i + 11 * j) % 490 for j in range(num)] for i, num in enumerate(LENGTHS)]


def mixed_params() -> list[SamplingParams]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 40, "top_p": 0.9},
        {"temperature": 0.0, "frequency_penalty": 1.2, "min_new_tokens": 3},
        {"temperature": 0.7, "min_p": 0.02},
        {"temperature": 0.0, "speculative_num_steps": 0},
        {"temperature": 1.2, "logit_bias": ((9, 3.0),)},
    ]
    return [SamplingParams(max_new_tokens=20, ignore_eos=True, sampling_seed=i, **kind) for i, kind in enumerate(kinds)]


class Driver(SchedulerDriver):
    """Counts the passes that had both prompts and running requests."""

    def __init__(self, folder: Path, kind: str, num_steps: int, **kwargs: object) -> None:
        options = {"chunked_prefill_size": 16, "page_size": 1, "enable_mixed_chunk": True, **kwargs}
        super().__init__(folder / kind, folder / f"{kind}-assistant", num_steps, **options)
        self.num_mixed = 0
        forward_mixed = self.worker.forward_mixed

        def counted(extend: Any, decode: Any) -> Any:
            assert extend.mode is ForwardMode.EXTEND and decode.mode is ForwardMode.DECODE
            assert not set(extend.reqs) & set(decode.reqs)
            self.num_mixed += 1
            return forward_mixed(extend, decode)

        self.worker.forward_mixed = counted  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model(kind: str, tiny_checkpoints: Path) -> None:
    plain = SchedulerDriver(tiny_checkpoints / kind, None, 0)
    alone = [plain.tokens([p], [q])[0] for p, q in zip(prompts(), mixed_params(), strict=True)]
    for num_steps, extra in ((0, {}), (3, {}), (3, {"page_size": 16}), (2, {"cuda_graph_bs": (2, 4, 8)})):
        driver = Driver(tiny_checkpoints, kind, num_steps, **extra)
        assert driver.tokens(prompts(), mixed_params(), arrivals=ARRIVALS) == alone, f"{num_steps=} {extra=}"
        assert driver.num_mixed >= 4


@pytest.mark.parametrize(
    "extra",
    [
        {"speculative_adaptive": True},
        {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6},
        {"max_total_tokens": 110, "schedule_conservativeness": 0.01, "max_running_requests": 6},
        {"disable_radix_cache": True, "chunked_prefill_size": -1},
    ],
    ids=lambda extra: next(iter(extra)),
)
def test_with_other_features(extra: dict[str, object], tiny_checkpoints: Path) -> None:
    plain = SchedulerDriver(tiny_checkpoints / "eseries", None, 0)
    alone = [plain.tokens([p], [q])[0] for p, q in zip(prompts(), mixed_params(), strict=True)]
    driver = Driver(tiny_checkpoints, "eseries", 3, **extra)
    for arrivals in (ARRIVALS, [0] * 6, [0, 2, 4, 6, 8, 10]):
        assert driver.tokens(prompts(), mixed_params(), arrivals=arrivals) == alone
    assert driver.num_mixed >= 4
    if "max_total_tokens" in extra:
        assert driver.scheduler.metrics.totals.num_retractions > 0


def test_aborts_in_the_midst_of_mixed_steps(tiny_checkpoints: Path) -> None:
    plain = SchedulerDriver(tiny_checkpoints / "dense", None, 0)
    alone = [plain.tokens([p], [q])[0] for p, q in zip(prompts(), mixed_params(), strict=True)]
    driver = Driver(tiny_checkpoints, "dense", 3, chunked_prefill_size=4)
    for victim in range(6):
        for when in (3, 8):
            outs = driver.run(
                prompts(), mixed_params(), arrivals=ARRIVALS, aborts={victim: max(when, ARRIVALS[victim])}
            )
            for i, out in enumerate(outs):
                assert out.token_ids == alone[i][: len(out.token_ids)] and (i == victim or out.token_ids == alone[i])
            driver.flush()


def test_streams_go_on_during_a_long_prefill(trained_pair: EmbeddedModel) -> None:
    """With mixed steps a running request gains tokens in every step; without, chunks take turns with decode steps."""
    for mixed in (True, False):
        driver = SchedulerDriver(
            trained_pair.target, trained_pair.assistant, 3, enable_mixed_chunk=mixed, chunked_prefill_size=32
        )
        scheduler = driver.scheduler
        long = tuple(4 + i * 7 % 900 for i in range(400))
        params = SamplingParams(temperature=0.0, max_new_tokens=200, ignore_eos=True)
        scheduler.handle(TokenizedGenerateReqInput("stream", (5, 6, 7), params, stream=True))
        scheduler.step()
        scheduler.handle(TokenizedGenerateReqInput("long", long, params, stream=False))
        (running,) = scheduler.running.reqs
        gains = []
        while len(scheduler.running.reqs) < 2:
            before = running.output_len
            scheduler.step()
            gains.append(running.output_len - before)
        assert len(gains) == (13 if mixed else 25)
        assert (min(gains) >= 1) == mixed
