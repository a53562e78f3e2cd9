"""What a request may say of speculation, and what its usage says back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sglang.srt.entrypoints.errors import ApiError
from sglang.srt.entrypoints.openai_protocol import parse_completion_request
from sglang.srt.entrypoints.openai_replies import usage
from sglang.srt.managers.generate_output import GenerateOutput
from sglang.srt.managers.io_struct import SpecStats
from sglang.srt.sampling.sampling_params import SamplingParams

OUTPUT = GenerateOutput(
    index=0,
    rid="r",
    text="",
    output_ids=(),
    finish_reason=None,
    prompt_tokens=5,
    completion_tokens=9,
    cached_tokens=0,
    spec=SpecStats(4, 6, 10, accepted_by_position=(3, 2, 1), drafted_by_position=(4, 4, 2)),
    e2e_latency_s=0.0,
    ttft_s=0.0,
    queue_time_s=0.0,
)


def test_usage_tells_of_speculation_when_asked() -> None:
    assert usage([OUTPUT], 1)["completion_tokens_details"] == {"reasoning_tokens": 0}
    other = replace(
        OUTPUT, index=1, spec=SpecStats(2, 0, 2, accepted_by_position=(0, 0, 0), drafted_by_position=(2, 0, 0))
    )
    assert usage([OUTPUT, other], 2, spec=True)["completion_tokens_details"] == {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 6,
        "rejected_prediction_tokens": 6,
        "spec_verify_ct": 6,
        "spec_accept_length": 2.0,
        "spec_accept_by_position": [0.5, 0.5, 0.5],
    }
    without = replace(OUTPUT, spec=None)
    assert usage([without], 1, spec=True)["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_rates_are_of_the_rounds_that_drafted_so_far() -> None:
    info = OUTPUT.meta_info()
    assert info["spec_accept_by_position"] == [0.75, 0.5, 0.5]
    assert info["spec_accept_histogram"] == [1, 1, 1, 1]
    assert (info["spec_draft_token_num"], info["spec_accept_rate"]) == (10, 0.6)


def test_the_switch_is_a_length() -> None:
    assert SamplingParams.from_dict({"speculative": False}).speculative_num_steps == 0
    assert SamplingParams.from_dict({"speculative": True}).speculative_num_steps is None
    assert SamplingParams.from_dict({"speculative_num_steps": 2}).speculative_num_steps == 2
    for bad in ("no", 1, 0):
        with pytest.raises(ValueError, match="speculative must be true or false"):
            SamplingParams.from_dict({"speculative": bad})
    with pytest.raises(ValueError, match="speculative_num_steps must be an integer of at least 0"):
        SamplingParams.from_dict({"speculative_num_steps": -1})


def test_openai_bodies_have_the_same_fields() -> None:
    body = {"prompt": "x", "speculative": False, "speculative_usage": True}
    options = parse_completion_request(body, {}).options
    assert options.sampling_params.speculative_num_steps == 0 and options.spec_usage
    options = parse_completion_request({"prompt": "x", "speculative_num_steps": 3}, {}).options
    assert options.sampling_params.speculative_num_steps == 3 and not options.spec_usage
    with pytest.raises(ApiError, match="speculative_usage"):
        parse_completion_request({"prompt": "x", "speculative_usage": 1}, {})
