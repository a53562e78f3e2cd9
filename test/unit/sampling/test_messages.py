"""What requests ask for, and what they get, arrives whole in another process."""

from __future__ import annotations

import msgspec
import pytest

from sglang.srt.managers.io_struct import BatchTokenOut, FinishReason, TokenizedGenerateReqInput, TokenOut
from sglang.srt.sampling.logprobs import LogprobOptions, TokenLogprobs
from sglang.srt.sampling.sampling_params import SamplingParams

PARAMS = SamplingParams(
    stop=("a",),
    stop_regex=("b+",),
    max_thinking_tokens=3,
    custom_params={"window": 2, "words": ["x"], "deep": {"y": None}},
    logit_bias=((4, -1.5),),
)
REQUEST = TokenizedGenerateReqInput(
    "r",
    (1, 2),
    PARAMS,
    stream=True,
    logprobs=LogprobOptions(0, 2, (7,)),
    return_hidden_states=True,
    custom_logit_processor="module:Class",
)
OUT = TokenOut(
    rid="r",
    token_ids=(5, 6),
    finish_reason=FinishReason("stop", matched="b+"),
    prompt_tokens=2,
    completion_tokens=2,
    cached_tokens=0,
    spec=None,
    queue_time_s=0.5,
    logprobs=(TokenLogprobs(5, -0.5, ((-0.5, 5),), ((-3.0, 7),)), TokenLogprobs(6, -1.0)),
    prompt_logprobs=(TokenLogprobs(1, None), TokenLogprobs(2, -2.0)),
    hidden_states=(((0.5, 1.0), (2.0, 3.0)), ((4.0, 5.0),)),
)


@pytest.mark.parametrize("message", [REQUEST, BatchTokenOut((OUT,))], ids=["request", "reply"])
def test_over_the_wire(message: TokenizedGenerateReqInput | BatchTokenOut) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message)) == message
