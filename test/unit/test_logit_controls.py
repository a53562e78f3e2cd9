"""Logit controls by hand."""

from __future__ import annotations

from array import array

import torch

from sglang.srt.layers.logit_controls import apply_logit_controls
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams


def make(prompt: list[int], output: list[int], stops: tuple[int, ...] = (), **params: object) -> Req:
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    return Req("r", array("i", prompt + output), len(prompt), sampling, 99, frozenset(stops), 0, False, 0.0)


def test_each_row_sees_the_drafts_before_it() -> None:
    req = make([1], [2, 2], frequency_penalty=0.5, presence_penalty=1.0)
    logits = torch.zeros(3, 5)
    apply_logit_controls(logits, [req], torch.tensor([[2, 3, 2]]))
    assert logits[0].tolist() == [0, 0, -2.0, 0, 0]
    assert logits[1].tolist() == [0, 0, -2.0, -1.5, 0]
    assert logits[2].tolist() == [0, 0, -2.5, -1.5, 0]


def test_repetition_penalty_counts_the_prompt_and_keeps_the_sign() -> None:
    req = make([0], [1], repetition_penalty=2.0)
    logits = torch.tensor([[3.0, -3.0, 3.0, -3.0]])
    apply_logit_controls(logits, [req], torch.tensor([[1]]))
    assert logits[0].tolist() == [1.5, -6.0, 3.0, -3.0]


def test_bias_and_minimum_length() -> None:
    req = make([0], [1], stops=(3,), min_new_tokens=2, logit_bias=((2, 1.5),))
    logits = torch.zeros(2, 4)
    apply_logit_controls(logits, [req], torch.tensor([[1, 2]]))
    assert logits[0].tolist() == [0, 0, 1.5, float("-inf")]
    assert logits[1].tolist() == [0, 0, 1.5, 0]


def test_requests_without_controls_are_untouched() -> None:
    logits = torch.randn(2, 4)
    before = logits.clone()
    apply_logit_controls(logits, [make([0], [1]), make([0], [1], presence_penalty=2.0)], torch.tensor([[1], [1]]))
    assert torch.equal(logits[0], before[0]) and not torch.equal(logits[1], before[1])
