"""OpenAI's requests: checks a body field by field, and says what it asks for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang.srt.constrained.base_grammar import GRAMMAR_KINDS
from sglang.srt.entrypoints.errors import ApiError, bad_field
from sglang.srt.entrypoints.native_protocol import check_fields, parse_ids, parse_texts
from sglang.srt.entrypoints.openai_messages import ToolUse, parse_messages, parse_tool_use
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.logprobs import LogprobOptions, OutputOptions
from sglang.srt.sampling.sampling_params import SamplingParams

# field of a request -> name in SamplingParams
SAMPLING_FIELDS: Mapping[str, str] = {
    "custom_params": "custom_params",
    "ebnf": "ebnf",
    "frequency_penalty": "frequency_penalty",
    "ignore_eos": "ignore_eos",
    "json_schema": "json_schema",
    "logit_bias": "logit_bias",
    "max_thinking_tokens": "max_thinking_tokens",
    "max_tokens": "max_new_tokens",
    "min_p": "min_p",
    "min_tokens": "min_new_tokens",
    "n": "n",
    "no_stop_trim": "no_stop_trim",
    "presence_penalty": "presence_penalty",
    "regex": "regex",
    "repetition_penalty": "repetition_penalty",
    "seed": "sampling_seed",
    "skip_special_tokens": "skip_special_tokens",
    "spaces_between_special_tokens": "spaces_between_special_tokens",
    "speculative": "speculative",
    "speculative_num_steps": "speculative_num_steps",
    "stop": "stop",
    "stop_regex": "stop_regex",
    "stop_token_ids": "stop_token_ids",
    "structural_tag": "structural_tag",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
}
# fields about the account of the caller or about caching; they cannot change an answer
_NO_EFFECT = (
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)
_COMMON = (
    *SAMPLING_FIELDS,
    *_NO_EFFECT,
    "custom_logit_processor",
    "logprobs",
    "model",
    "response_format",
    "return_accept_lens",
    "return_hidden_states",
    "rid",
    "speculative_usage",
    "stream",
    "stream_options",
)
CHAT_FIELDS = (
    *_COMMON,
    "add_generation_prompt",
    "chat_template_kwargs",
    "continue_final_message",
    "enable_thinking",
    "max_completion_tokens",
    "messages",
    "parallel_tool_calls",
    "reasoning_effort",
    "separate_reasoning",
    "stream_reasoning",
    "tool_choice",
    "tools",
    "top_logprobs",
)
COMPLETION_FIELDS = (*_COMMON, "best_of", "echo", "prompt")
_LATER: Mapping[str, tuple[Any, ...]] = {
    "lora_path": (),
    "priority": (0,),
    "session_params": (),
}
_CHAT_LATER: Mapping[str, tuple[Any, ...]] = {
    **_LATER,
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": (),
    "modalities": (["text"],),
    "prediction": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}
_COMPLETION_LATER: Mapping[str, tuple[Any, ...]] = {**_LATER, "suffix": ()}

_RESPONSE_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
_COMPLETION_MAX_TOKENS = 16
_MAX_TOP_LOGPROBS = 100
_REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What chat and text completions have in common. ``spec_usage``: usage tells what speculation did;
    ``continuous_usage``: every piece of a stream has it. ``outputs``: what choices hold beside text."""

    model: str | None
    rid: str | None
    sampling_params: SamplingParams
    stream: bool
    include_usage: bool
    continuous_usage: bool
    spec_usage: bool
    outputs: OutputOptions
    clamp_length: bool

    def generate_request(
        self, prompts: tuple[str | tuple[int, ...], ...], param: str, params: SamplingParams
    ) -> GenerateReqInput:
        """What the engine runs; ``param`` names the field with the prompts, ``params`` are what became of our own."""
        return GenerateReqInput(
            prompts=prompts,
            sampling_params=(params,) * len(prompts),
            stream=self.stream,
            rids=None if self.rid is None else (self.rid,),
            clamp_length=self.clamp_length,
            param=param,
            output_options=(self.outputs,) * len(prompts),
        )


@dataclass(frozen=True, slots=True)
class ChatRequest:
    options: RequestOptions
    messages: tuple[dict[str, Any], ...]
    template_kwargs: dict[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool
    tool_use: ToolUse
    separate_reasoning: bool
    stream_reasoning: bool


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """``echo``: texts begin with their prompts."""

    options: RequestOptions
    prompts: tuple[str | tuple[int, ...], ...]
    echo: bool


def parse_chat_request(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> ChatRequest:
    """Check a chat request; ``defaults`` are sampling values for fields that it leaves out. Errors name the field."""
    check_fields(body, CHAT_FIELDS, _CHAT_LATER)
    length_field = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    logprobs = _parse_chat_logprobs(body)
    options = _parse_options(body, {"max_new_tokens": None, **defaults}, length_field, logprobs)
    continue_final = _flag(body, "continue_final_message", False)
    add_prompt = _flag(body, "add_generation_prompt", not continue_final)
    if continue_final and add_prompt:
        raise bad_field("continue_final_message", "and add_generation_prompt exclude each other: give one of them")
    messages = parse_messages(body.get("messages"))
    if continue_final and (messages[-1]["role"] != "assistant" or "tool_calls" in messages[-1]):
        raise bad_field("continue_final_message", "needs an assistant message without tool_calls as the last one")
    tool_use = parse_tool_use(body)
    if tool_use.required:
        _check_required(body, options, add_prompt)
    return ChatRequest(
        options=options,
        messages=messages,
        template_kwargs=_parse_template_kwargs(body),
        add_generation_prompt=add_prompt,
        continue_final_message=continue_final,
        tool_use=tool_use,
        separate_reasoning=_flag(body, "separate_reasoning", True),
        stream_reasoning=_flag(body, "stream_reasoning", True),
    )


def _check_required(body: Mapping[str, Any], options: RequestOptions, add_prompt: bool) -> None:
    choice = f"{body['tool_choice']!r:.100} makes the answer begin with a call"
    if not add_prompt:
        raise bad_field("tool_choice", f"{choice}: it needs add_generation_prompt")
    for name in GRAMMAR_KINDS:
        if getattr(options.sampling_params, name) is not None:
            field = name if body.get(name) is not None else "response_format"
            raise bad_field("tool_choice", f"{choice}, and {field} asks for another form: leave out one of the two")


def _parse_template_kwargs(body: Mapping[str, Any]) -> dict[str, Any]:
    """Variables of the template. What ``chat_template_kwargs`` says comes before the fields that stand for one."""
    values: dict[str, Any] = {}
    effort = body.get("reasoning_effort")
    if effort is not None:
        if effort not in _REASONING_EFFORTS:
            allowed = ", ".join(_REASONING_EFFORTS)
            raise bad_field("reasoning_effort", f"must be one of {allowed}, got {effort!r:.200}")
        values |= {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    if body.get("enable_thinking") is not None:
        values["enable_thinking"] = _flag(body, "enable_thinking", False)
    given = body.get("chat_template_kwargs") or {}
    if not isinstance(given, dict):
        raise bad_field("chat_template_kwargs", f"must be an object, got {given!r:.200}")
    if not isinstance(given.get("enable_thinking", False), bool):
        # any text is true in a template, also "false"
        path = "chat_template_kwargs.enable_thinking"
        raise bad_field(path, f"must be true or false, got {given['enable_thinking']!r:.200}")
    return values | given


def parse_completion_request(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> CompletionRequest:
    """Check a text completion request; see ``parse_chat_request``."""
    check_fields(body, COMPLETION_FIELDS, _COMPLETION_LATER)
    echo = _flag(body, "echo", False)
    num_top = _num_top(body, "logprobs")
    logprobs = None if num_top is None else LogprobOptions(0 if echo else -1, num_top)
    options = _parse_options(body, {"max_new_tokens": _COMPLETION_MAX_TOKENS, **defaults}, "max_tokens", logprobs)
    best_of, n = body.get("best_of"), options.sampling_params.n
    if best_of is not None and (type(best_of) is not int or best_of != n):
        raise bad_field("best_of", f"must be n, which is {n}, got {best_of!r:.200}: all answers are returned")
    prompt = body.get("prompt")
    if prompt is None:
        raise bad_field("prompt", "is missing: give a string, token ids, or a list of either")
    has_ids = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], str)
    prompts, _ = parse_ids("prompt", prompt) if has_ids else parse_texts("prompt", prompt)
    if options.rid is not None and len(prompts) > 1:
        raise bad_field("rid", f"can name one prompt only, got {len(prompts)} prompts")
    return CompletionRequest(options, tuple(prompts), echo)


def in_openai_terms(error: ValueError, body: Mapping[str, Any]) -> ApiError:
    """An error about sampling in the names that an OpenAI request has for them."""
    names = {internal: field for field, internal in SAMPLING_FIELDS.items()}
    if body.get("max_completion_tokens") is not None:
        names["max_new_tokens"] = "max_completion_tokens"
    if body.get("response_format") is not None:
        names |= dict.fromkeys(("json_schema", "structural_tag"), "response_format")
    text = str(error).removeprefix("sampling_params.")
    message = re.sub(r"^\w+(?= )|(?<= )(?:max|min)_new_tokens(?= )", lambda m: names.get(m[0], m[0]), text)
    field = message.split(" ", 1)[0]
    code = "context_length_exceeded" if "context length" in message else None
    return ApiError(400, message, param=field if field in body else None, code=code)


def _parse_chat_logprobs(body: Mapping[str, Any]) -> LogprobOptions | None:
    num_top = _num_top(body, "top_logprobs")
    if _flag(body, "logprobs", False):
        return LogprobOptions(top_num=num_top or 0)
    if num_top:
        raise bad_field("top_logprobs", f"is {num_top}, which needs logprobs true")
    return None


def _num_top(body: Mapping[str, Any], name: str) -> int | None:
    value = body.get(name)
    if value is not None and (type(value) is not int or not 0 <= value <= _MAX_TOP_LOGPROBS):
        raise bad_field(name, f"must be an integer from 0 to {_MAX_TOP_LOGPROBS}, got {value!r:.200}")
    return value


def _parse_options(
    body: Mapping[str, Any], defaults: Mapping[str, Any], length_field: str, logprobs: LogprobOptions | None
) -> RequestOptions:
    given = {internal: body[field] for field, internal in SAMPLING_FIELDS.items() if body.get(field) is not None}
    if body.get(length_field) is not None:
        given["max_new_tokens"] = body[length_field]
    given |= _parse_response_format(body.get("response_format"), given)
    stream = _flag(body, "stream", False)
    include_usage, continuous_usage = _parse_stream_options(body.get("stream_options"), stream)
    return RequestOptions(
        model=_text(body, "model"),
        rid=_text(body, "rid"),
        sampling_params=SamplingParams.from_dict({**defaults, **given}),
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        spec_usage=_flag(body, "speculative_usage", False),
        outputs=OutputOptions(
            logprobs=logprobs,
            hidden_states=_flag(body, "return_hidden_states", False),
            custom_logit_processor=_text(body, "custom_logit_processor"),
            accept_lens=_flag(body, "return_accept_lens", False),
        ),
        clamp_length="max_new_tokens" not in given,
    )


def _parse_response_format(value: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """The grammar that ``response_format`` stands for, by its name in SamplingParams; ``given``: other controls."""
    if value is None:
        return {}
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in _RESPONSE_FORMATS:
        allowed = ", ".join(_RESPONSE_FORMATS)
        raise bad_field("response_format", f"must be an object with a type of {allowed}, got {value!r:.200}")
    if kind == "text":
        return {}
    other = next((name for name in GRAMMAR_KINDS if name in given), None)
    if other is not None:
        raise bad_field("response_format", f"and {other} exclude each other: give one of them")
    if kind == "structural_tag":
        return {"structural_tag": value}
    if kind == "json_object":
        return {"json_schema": {"type": "object"}}
    path = "response_format.json_schema"
    form = value.get("json_schema")
    if not isinstance(form, dict) or not isinstance(form.get("schema"), (dict, bool)):
        raise bad_field(path, f'must be like {{"name": "...", "schema": {{...}}}}, got {form!r:.200}')
    if not isinstance(form.get("name", ""), str):
        raise bad_field(f"{path}.name", f"must be a string, got {form['name']!r:.200}")
    # a schema is always kept to, so what ``strict`` says makes no difference
    if not isinstance(form.get("strict"), (bool, type(None))):
        raise bad_field(f"{path}.strict", f"must be true or false, got {form['strict']!r:.200}")
    return {"json_schema": form["schema"]}


def _parse_stream_options(value: Any, stream: bool) -> tuple[bool, bool]:
    """Whether the end of a stream, and whether each of its pieces, has the usage."""
    if value is None:
        return False, False
    if not isinstance(value, dict):
        raise bad_field("stream_options", f"must be an object, got {value!r:.200}")
    if not stream:
        raise bad_field("stream_options", "is only allowed with stream true")
    for name, setting in value.items():
        path = f"stream_options.{name!s:.100}"
        if name not in ("include_usage", "continuous_usage_stats", "include_obfuscation"):
            raise bad_field(path, "is not a known field: known fields are include_usage and continuous_usage_stats")
        if setting is not None and not isinstance(setting, bool):
            raise bad_field(path, f"must be true or false, got {setting!r:.200}")
    return bool(value.get("include_usage")), bool(value.get("continuous_usage_stats"))


def _flag(body: Mapping[str, Any], name: str, default: bool) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise bad_field(name, f"must be true or false, got {value!r:.200}")
    return default if value is None else value


def _text(body: Mapping[str, Any], name: str) -> str | None:
    value = body.get(name)
    if value is not None and (not isinstance(value, str) or not value):
        raise bad_field(name, f"must be a string that is not empty, got {value!r:.200}")
    return value
