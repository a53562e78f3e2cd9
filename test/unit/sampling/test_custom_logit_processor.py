"""Logit processors that users bring: how they are named, what they see, and what they may not do."""

from __future__ import annotations

import json
from array import array

import pytest
import torch

from fixtures.logit_processors import FailsAt, ForbidsAll, NoRepeatAfter, Shapeless
from sglang.srt.layers.logit_controls import RequestFault, apply_logit_controls
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor, load_processor
from sglang.srt.sampling.sampling_params import SamplingParams


def make(processor: CustomLogitProcessor | None, output: list[int], **custom: object) -> Req:
    params = SamplingParams(custom_params=custom)
    req = Req("r", array("i", [1, *output]), 1, params, 99, frozenset(), 0, False, 0.0)
    req.logit_processor = processor
    return req


def test_both_names_of_a_class() -> None:
    assert isinstance(load_processor("fixtures.logit_processors:NoRepeatAfter"), NoRepeatAfter)
    assert json.loads(FailsAt.to_str()).keys() == {"callable"}
    assert isinstance(load_processor(FailsAt.to_str()), FailsAt)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("fixtures.logit_processors", "module:Class"),
        ("no.such.module:X", "ModuleNotFoundError"),
        ("fixtures.logit_processors:Missing", "AttributeError"),
        ("array:array", "no subclass"),
        ('{"callable": "00"}', "UnpicklingError"),
        ('{"callable": "zz"}', "ValueError"),
        ("{}", "KeyError"),
        ('{"callable"', "JSONDecodeError"),
    ],
)
def test_what_cannot_be_loaded(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"custom_logit_processor .*{why}"):
        load_processor(text)


def test_every_row_has_its_own_prefix() -> None:
    reqs = [make(None, [5]), make(NoRepeatAfter(), [4, 5], window=2)]
    logits = torch.zeros(6, 10)
    apply_logit_controls(logits, reqs, torch.tensor([[5, 6, 7], [5, 6, 7]]))
    gone = [row.isinf().nonzero().flatten().tolist() for row in logits]
    assert gone == [[], [], [], [4, 5], [5, 6], [6, 7]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_is_as_good_as_an_edit(dtype: torch.dtype) -> None:
    class Doubles(CustomLogitProcessor):
        def __call__(self, logits: torch.Tensor, custom_param_list: list) -> torch.Tensor:
            assert logits.dtype == torch.float32
            return logits * 2

    logits = torch.ones(1, 4, dtype=dtype)
    apply_logit_controls(logits, [make(Doubles(), [2])], torch.tensor([[2]]))
    assert logits.tolist() == [[2.0] * 4]


@pytest.mark.parametrize(
    ("processor", "why"),
    [(FailsAt(), "ZeroDivisionError"), (Shapeless(), "must return logits of shape"), (ForbidsAll(), "finite")],
)
def test_a_mistake_is_the_users(processor: CustomLogitProcessor, why: str) -> None:
    req = make(processor, [2], length=1)
    with pytest.raises(RequestFault, match=f"custom_logit_processor failed: .*{why}") as caught:
        apply_logit_controls(torch.zeros(1, 4), [req], torch.tensor([[2]]))
    assert caught.value.req is req
