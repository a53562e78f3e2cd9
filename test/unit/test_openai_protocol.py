"""OpenAI requests: what is taken, what is refused and in which words; and the shape of replies."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from sglang.srt.entrypoints.errors import ApiError, to_api_error
from sglang.srt.entrypoints.openai_protocol import (
    in_openai_terms,
    parse_chat_request,
    parse_completion_request,
)
from sglang.srt.entrypoints.openai_replies import end_fields, hidden_fields, usage
from sglang.srt.managers.generate_output import GenerateOutput, RequestFailedError
from sglang.srt.managers.io_struct import FinishReason
from sglang.srt.managers.tokenizer_manager import SchedulerDiedError
from sglang.srt.sampling.logprobs import LogprobOptions, OutputOptions

HELLO = [{"role": "user", "content": "hello"}]


def _chat(**body: Any) -> Any:
    body.setdefault("messages", HELLO)
    try:
        return parse_chat_request(body, {"temperature": 0.5, "top_k": 64})
    except ValueError as error:
        raise in_openai_terms(error, body) from error


def _completion(**body: Any) -> Any:
    body.setdefault("prompt", "hello")
    try:
        return parse_completion_request(body, {})
    except ValueError as error:
        raise in_openai_terms(error, body) from error


def test_fields_reach_the_sampling_controls() -> None:
    request = _chat(
        max_tokens=7,
        min_tokens=2,
        seed=5,
        temperature=1,
        top_p=0.5,
        min_p=0.1,
        n=3,
        stop="x",
        stop_token_ids=[4],
        logit_bias={"9": -1},
        frequency_penalty=0.1,
        presence_penalty=0.2,
        repetition_penalty=1.1,
        ignore_eos=True,
        skip_special_tokens=False,
        user="someone",
        metadata={"a": "b"},
    )
    params = request.options.sampling_params
    assert (params.max_new_tokens, params.min_new_tokens, params.sampling_seed, params.n) == (7, 2, 5, 3)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1, 0.5, 64, 0.1)
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("x",), (4,), ((9, -1.0),))
    assert (params.frequency_penalty, params.presence_penalty, params.repetition_penalty) == (0.1, 0.2, 1.1)
    assert params.ignore_eos and not params.skip_special_tokens and not request.options.clamp_length


def test_what_is_left_out() -> None:
    chat, completion = _chat().options, _completion().options
    assert (chat.sampling_params.temperature, chat.sampling_params.top_k) == (0.5, 64)
    assert (chat.sampling_params.max_new_tokens, completion.sampling_params.max_new_tokens) == (None, 16)
    assert completion.sampling_params.temperature == 1.0
    assert not chat.stream and not chat.include_usage and chat.clamp_length
    both = _chat(max_tokens=3, max_completion_tokens=4).options.sampling_params
    assert both.max_new_tokens == 4
    assert _chat(max_tokens=None, temperature=None, stop=None, n=None).options == chat


@pytest.mark.parametrize(
    "prompt, expected",
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
        ("", ("",)),
    ],
)
def test_prompts_of_completions(prompt: Any, expected: tuple[Any, ...]) -> None:
    assert _completion(prompt=prompt).prompts == expected


def test_what_choices_hold_beside_text() -> None:
    assert _chat().options.outputs == OutputOptions() == _completion(echo=True).options.outputs
    assert _chat(logprobs=True).options.outputs == OutputOptions(LogprobOptions())
    assert _chat(logprobs=True, top_logprobs=5).options.outputs.logprobs == LogprobOptions(top_num=5)
    assert _completion(logprobs=0).options.outputs.logprobs == LogprobOptions()
    request = _completion(prompt=["a", "b"], logprobs=3, echo=True)
    assert request.echo and request.options.outputs.logprobs == LogprobOptions(start_len=0, top_num=3)
    options = _chat(return_hidden_states=True, custom_logit_processor="x", custom_params={"a": 1}).options
    assert options.outputs == OutputOptions(hidden_states=True, custom_logit_processor="x")
    assert options.sampling_params.custom_params == {"a": 1}
    assert options.generate_request(("a", "b"), "prompt", options.sampling_params).output_options == (
        options.outputs,
        options.outputs,
    )


@pytest.mark.parametrize("include, continuous", [(True, False), (False, True), (True, True)])
def test_usage_in_streams(include: bool, continuous: bool) -> None:
    options = _chat(
        stream=True, stream_options={"include_usage": include, "continuous_usage_stats": continuous}
    ).options
    assert (options.include_usage, options.continuous_usage) == (include, continuous)


def test_content_parts() -> None:
    part = {"type": "text", "text": "a"}
    request = _chat(messages=[{"role": "system", "content": [part]}, {"role": "user", "content": [part, part]}])
    assert request.messages == ({"role": "system", "content": "a"}, {"role": "user", "content": [part, part]})


def test_continuing_a_message() -> None:
    messages = [*HELLO, {"role": "assistant", "content": "hi"}]
    request = _chat(messages=messages, continue_final_message=True)
    assert request.continue_final_message and not request.add_generation_prompt


BAD_SAMPLING = [
    ("max_tokens", -1, r"max_tokens must be an integer of at least 0"),
    ("max_tokens", 1.5, r"max_tokens must be an integer"),
    ("max_tokens", "5", r"max_tokens must be an integer"),
    ("max_completion_tokens", True, r"max_completion_tokens must be an integer"),
    ("min_tokens", -1, r"min_tokens must be an integer"),
    ("n", 0, r"n must be an integer of at least 1"),
    ("n", 1000, r"n must be an integer"),
    ("seed", 1 << 70, r"seed must be an integer"),
    ("seed", "x", r"seed must be an integer"),
    ("temperature", -0.1, r"temperature must be a finite number"),
    ("temperature", math.nan, r"temperature must be a finite number"),
    ("temperature", math.inf, r"temperature must be a finite number"),
    ("temperature", "hot", r"temperature must be a finite number"),
    ("top_p", 0, r"top_p must be a finite number greater than 0"),
    ("top_p", 1.1, r"top_p must be a finite number"),
    ("top_k", -2, r"top_k must be an integer"),
    ("min_p", 2, r"min_p must be a finite number"),
    ("frequency_penalty", 3, r"frequency_penalty must be a finite number"),
    ("presence_penalty", math.nan, r"presence_penalty must be a finite number"),
    ("repetition_penalty", 0, r"repetition_penalty must be a finite number"),
    ("logit_bias", [1], r"logit_bias must be an object"),
    ("logit_bias", {"a": 1}, r"logit_bias must map token ids to numbers"),
    ("logit_bias", {"1": 101}, r"logit_bias must be a finite number"),
    ("stop", [""], r"stop must be at most 64 non-empty strings"),
    ("stop", 5, r"stop must be a list"),
    ("stop", ["a", 5], r"stop must be at most 64 non-empty strings"),
    ("stop_token_ids", ["a"], r"stop_token_ids must be an integer"),
    ("ignore_eos", "yes", r"ignore_eos must be true or false"),
    ("model", 5, r"model must be a string"),
    ("rid", "", r"rid must be a string"),
    ("stream", 1, r"stream must be true or false"),
    ("stream_options", {"include_usage": True}, r"stream_options is only allowed with stream true"),
    ("stream_options", "x", r"stream_options must be an object"),
    ("lora_path", "x", r"lora_path is not supported yet"),
    ("response_format", {"type": "json"}, r"response_format must be an object with a type of text, json_object"),
    ("response_format", {"type": "json_schema"}, r"response_format.json_schema must be like"),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": 5}}, r"response_format.json_schema must be"),
    ("regex", "", r"regex must be a text that is not empty"),
    ("ebnf", {"root": 1}, r"ebnf must be a text that is not empty"),
    ("temprature", 1, r"temprature is not a known field"),
]


@pytest.mark.parametrize("make", [_chat, _completion])
@pytest.mark.parametrize("field, value, message", BAD_SAMPLING, ids=[f"{f}={v!s:.20}" for f, v, _ in BAD_SAMPLING])
def test_bad_values_name_the_field_that_the_user_sent(make: Any, field: str, value: Any, message: str) -> None:
    if field == "max_completion_tokens" and make is _completion:
        message = "max_completion_tokens is not a known field"
    with pytest.raises(ApiError, match=message) as caught:
        make(**{field: value})
    assert caught.value.status == 400 and (caught.value.param or "").split(".")[0] == field
    assert "max_new_tokens" not in caught.value.message and "sampling_seed" not in caught.value.message


def _tool(name: str, **values: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **values}}


def _choice(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def _called(*, id: str = "c1", type: str = "function", name: str = "f", arguments: Any = '{"a": 1}') -> list[Any]:
    """A conversation whose last message calls a tool."""
    call = {"id": id, "type": type, "function": {"name": name, "arguments": arguments}}
    return [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]


def _result(call_id: str, content: Any = "done") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def test_calls_and_results_as_templates_take_them() -> None:
    results = [_result("c1", '{"b": [1, null]}'), _result("c1", "[1]"), _result("c1", [{"type": "text", "text": "x"}])]
    asked, *answers = _chat(messages=[*_called(), *results]).messages[1:]
    assert asked["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}} and asked["content"] == ""
    assert [answer["content"] for answer in answers] == [{"b": [1, None]}, "[1]", "x"]
    assert {answer["name"] for answer in answers} == {"f"}
    for nothing in (None, "", "{}", {}):
        asked = _chat(messages=_called(arguments=nothing)).messages[1]
        assert asked["tool_calls"][0]["function"]["arguments"] == {}
    thought = {"role": "assistant", "reasoning_content": "hm", "content": "a"}
    assert _chat(messages=[*HELLO, thought]).messages[1] == thought | {"reasoning": "hm"}


def test_choice_of_tools() -> None:
    tools = [_tool("f"), _tool("g", description="G.", parameters={"type": "object", "properties": {"x": {}}})]
    use = _chat(tools=tools).tool_use
    assert use.names == ("f", "g") and not use.required and use.parallel
    assert use.tools[0]["function"]["parameters"] == {"type": "object", "properties": {}, "required": []}
    assert use.tools[1]["function"]["parameters"]["properties"] == {"x": {}}
    assert _chat(tools=tools, tool_choice="none").tool_use.tools == ()
    assert _chat(tools=tools, tool_choice="required", parallel_tool_calls=False).tool_use == dataclasses.replace(
        use, required=True, parallel=False
    )
    assert _chat(tools=tools, tool_choice=_choice("g")).tool_use == dataclasses.replace(use, required=True, name="g")


@pytest.mark.parametrize(
    "body, expected",
    [
        ({}, {}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low", "enable_thinking": True}),
        ({"enable_thinking": True}, {"enable_thinking": True}),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
        ({"chat_template_kwargs": {"x": [1]}}, {"x": [1]}),
    ],
)
def test_variables_of_the_template(body: dict[str, Any], expected: dict[str, Any]) -> None:
    assert _chat(**body).template_kwargs == expected


BAD_CHAT = [
    ({"messages": None}, "messages", "must be a list of messages that is not empty"),
    ({"messages": []}, "messages", "must be a list of messages that is not empty"),
    ({"messages": "hello"}, "messages", "must be a list"),
    ({"messages": ["hello"]}, "messages[0]", "must be an object"),
    ({"messages": [{"content": "a"}]}, "messages[0].role", "must be one of"),
    ({"messages": [*HELLO, {"role": "robot", "content": "a"}]}, "messages[1].role", "must be one of"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role", "only allowed behind a message"),
    ({"messages": [{"role": "function", "content": "a"}]}, "messages[0].role", "give results as role tool"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "must be a string or a list of content parts"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "must be a string"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "must be a string"),
    ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]", "must be like"),
    ({"messages": [{"role": "user", "content": "a", "name": 5}]}, "messages[0].name", "must be a string"),
    (
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
        "messages[0].tool_calls[0]",
        "must be like",
    ),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]}, "messages[0].tool_calls", "only allowed in"),
    ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages[0].tool_calls", "must be a list"),
    ({"messages": _called(id="")}, "messages[1].tool_calls[0].id", "must be a string that is not empty"),
    ({"messages": _called(type="code")}, "messages[1].tool_calls[0].type", "must be function"),
    ({"messages": _called(arguments="[1]")}, "messages[1].tool_calls[0].function.arguments", "text of a JSON object"),
    ({"messages": _called(arguments="{")}, "messages[1].tool_calls[0].function.arguments", "text of a JSON object"),
    ({"messages": _called(name="a b")}, "messages[1].tool_calls[0].function.name", "letters, digits"),
    ({"messages": [*_called(), {"role": "tool", "content": "a"}]}, "messages[2].tool_call_id", "the id of a call"),
    ({"messages": [*_called(), _result("other")]}, "messages[2].tool_call_id", "the id of a call before it ('c1')"),
    ({"messages": [*_called(), *HELLO, _result("c1")]}, "messages[3].role", "only allowed behind a message"),
    ({"messages": [*_called(), _result("c1", content=None)]}, "messages[2].content", "must be a string"),
    ({"messages": _called(), "continue_final_message": True}, "continue_final_message", "without tool_calls"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs", "must be an object"),
    ({"continue_final_message": True}, "continue_final_message", "needs an assistant message"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "exclude each other"),
    ({"tools": {}, "tool_choice": "auto"}, "tools", "must be a list of at most"),
    ({"tools": [5]}, "tools[0]", "must be an object"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "must be function"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "must be an object"),
    ({"tools": [_tool("")]}, "tools[0].function.name", "must be 1 to 128 letters"),
    ({"tools": [_tool("f{")]}, "tools[0].function.name", "must be 1 to 128 letters"),
    ({"tools": [_tool("f", description=1)]}, "tools[0].function.description", "must be a string"),
    ({"tools": [_tool("f", parameters=[])]}, "tools[0].function.parameters", "must be a JSON schema"),
    ({"tools": [_tool("f"), _tool("f")]}, "tools[1].function.name", "the name of another tool"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools, and there are none"),
    ({"tool_choice": "any"}, "tool_choice", "must be auto, none, required or name a function"),
    ({"tool_choice": {"type": "function"}}, "tool_choice", "or like"),
    ({"tools": [_tool("f")], "tool_choice": _choice("g")}, "tool_choice", "which is not among the tools"),
    ({"tools": [_tool("f")], "tool_choice": "required", "regex": "a"}, "tool_choice", "and regex asks for another"),
    (
        {"tools": [_tool("f")], "tool_choice": "required", "response_format": {"type": "json_object"}},
        "tool_choice",
        "and response_format asks for another form",
    ),
    (
        {"tools": [_tool("f")], "tool_choice": "required", "add_generation_prompt": False},
        "tool_choice",
        "needs add_generation_prompt",
    ),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "must be true or false"),
    ({"separate_reasoning": 1}, "separate_reasoning", "must be true or false"),
    ({"stream_reasoning": "yes"}, "stream_reasoning", "must be true or false"),
    ({"enable_thinking": "yes"}, "enable_thinking", "must be true or false"),
    (
        {"chat_template_kwargs": {"enable_thinking": "false"}},
        "chat_template_kwargs.enable_thinking",
        "must be true or false",
    ),
    ({"max_thinking_tokens": -1}, "max_thinking_tokens", "must be an integer"),
    ({"logprobs": 3}, "logprobs", "must be true or false"),
    ({"top_logprobs": 3}, "top_logprobs", "is 3, which needs logprobs true"),
    ({"logprobs": True, "top_logprobs": 101}, "top_logprobs", "must be an integer from 0 to 100"),
    ({"logprobs": True, "top_logprobs": True}, "top_logprobs", "must be an integer"),
    ({"return_hidden_states": 1}, "return_hidden_states", "must be true or false"),
    ({"custom_logit_processor": {}}, "custom_logit_processor", "must be a string that is not empty"),
    ({"custom_params": [1]}, "custom_params", "must be an object"),
    ({"priority": 3}, "priority", "not supported yet"),
    ({"reasoning_effort": "much"}, "reasoning_effort", "must be one of none, minimal"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "not a known field"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "must be true or false"),
]


@pytest.mark.parametrize("body, param, message", BAD_CHAT)
def test_bad_chat_requests(body: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        _chat(**body)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.message.startswith(param) and message in caught.value.message


@pytest.mark.parametrize("kind", ["image_url", "input_image", "input_audio", "video_url", "file"])
def test_media_are_refused_by_name(kind: str) -> None:
    with pytest.raises(ApiError, match=f"{kind}' is not supported yet: this server takes text only") as caught:
        _chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": kind}]}])
    assert caught.value.param == "messages[0].content[1].type"


@pytest.mark.parametrize(
    "body, param",
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [[1], 2]}, "prompt"),
        ({"prompt": ["a", "b"], "rid": "x"}, "rid"),
        ({"echo": 1}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 101}, "logprobs"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": True}, "best_of"),
        ({"top_logprobs": 1}, "top_logprobs"),
    ],
)
def test_bad_completion_requests(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        _completion(**body)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.message.startswith(param)


def test_values_that_ask_for_nothing_are_taken() -> None:
    _chat(tools=[], tool_choice="auto", logprobs=False, top_logprobs=0, response_format={"type": "text"}, audio=None)
    _chat(priority=0, verbosity="medium", modalities=["text"], custom_logit_processor=None)
    _completion(echo=False, suffix="", logprobs=None, best_of=1)
    _completion(n=3, best_of=3)


def _output(index: int, **values: Any) -> GenerateOutput:
    defaults: dict[str, Any] = {
        "rid": "r",
        "text": "",
        "output_ids": (),
        "finish_reason": None,
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "cached_tokens": 1,
        "spec": None,
        "e2e_latency_s": 0.0,
        "ttft_s": 0.0,
        "queue_time_s": 0.0,
    }
    return GenerateOutput(index=index, **(defaults | values))


def test_usage_counts_a_prompt_once() -> None:
    outputs = [_output(index) for index in range(6)]
    assert usage(outputs, num_samples=3)["prompt_tokens_details"] is None
    assert usage(outputs, num_samples=3, reasoning_tokens=3, cached=True) == {
        "prompt_tokens": 10,
        "completion_tokens": 12,
        "total_tokens": 22,
        "reasoning_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 3},
    }


def test_hidden_state_of_a_choice() -> None:
    end, states = FinishReason("length", length=2), (((0.0, 1.0), (2.0, 3.0)), ((4.0, 5.0),))
    assert hidden_fields(_output(0, finish_reason=end)) == {}
    assert hidden_fields(_output(0, hidden_states=states)) == {}
    assert hidden_fields(_output(0, hidden_states=states, finish_reason=end)) == {"hidden_states": [4.0, 5.0]}
    assert hidden_fields(_output(0, hidden_states=states[:1], finish_reason=end)) == {"hidden_states": [2.0, 3.0]}
    assert hidden_fields(_output(0, hidden_states=(), finish_reason=end)) == {"hidden_states": []}


def test_end_of_a_choice() -> None:
    assert end_fields(None) == {"finish_reason": None, "matched_stop": None}
    assert end_fields(FinishReason("stop", matched="x")) == {"finish_reason": "stop", "matched_stop": "x"}
    assert end_fields(FinishReason("length", length=3)) == {"finish_reason": "length", "matched_stop": None}


@pytest.mark.parametrize(
    "error, status, param",
    [
        (ValueError("sampling_params.x is bad"), 400, "sampling_params.x"),
        (ValueError("No field"), 400, None),
        (RequestFailedError("full", 503), 503, None),
        (SchedulerDiedError("dead"), 500, None),
        (KeyError("x"), 500, None),
    ],
)
def test_errors_from_below(error: Exception, status: int, param: str | None) -> None:
    api_error = to_api_error(error)
    assert (api_error.status, api_error.param) == (status, param)
    assert set(api_error.to_dict()["error"]) == {"message", "type", "param", "code"}


def test_unforeseen_errors_tell_nothing_of_the_inside() -> None:
    assert "secret" not in to_api_error(KeyError("secret")).message
