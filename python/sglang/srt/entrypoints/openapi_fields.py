"""What values the fields of requests take, as JSON schemas, by the names that the checks of requests know them by."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Any, Union, get_args, get_origin, get_type_hints

from sglang.srt.entrypoints.openai_protocol import SAMPLING_FIELDS
from sglang.srt.sampling.sampling_params import SamplingParams

Schema = Mapping[str, Any]

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
INTEGER: Schema = {"type": "integer"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
OBJECT: Schema = {"type": "object"}
ANY: Schema = {}


def list_of(item: Schema) -> Schema:
    return {"type": "array", "items": item}


def one_or_list(item: Schema) -> Schema:
    return {"anyOf": [item, list_of(item)]}


def either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def choice_of(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def object_of(properties: Mapping[str, Schema], required: Iterable[str] = (), *, more: bool = True) -> Schema:
    """``more``: whether there may be other properties."""
    return {
        "type": "object",
        "properties": dict(properties),
        "required": sorted(required),
        "additionalProperties": more,
    }


_IDS = list_of(COUNT)
_PART = object_of({"type": choice_of("text"), "text": TEXT}, ("type", "text"))
_CONTENT = either(TEXT, list_of(_PART), {"type": "null"})
_MESSAGE = object_of(
    {
        "role": choice_of("system", "developer", "user", "assistant", "tool"),
        "content": _CONTENT,
        "tool_call_id": TEXT,
    },
    ("role",),
)
_FUNCTION = object_of({"name": TEXT, "description": TEXT, "parameters": OBJECT}, ("name",))
_TOOL = object_of({"type": choice_of("function"), "function": _FUNCTION}, ("type", "function"))
_NAMED_TOOL = object_of({"type": choice_of("function"), "function": object_of({"name": TEXT}, ("name",))}, ("type",))

# sampling controls that requests may write in other forms than the engine keeps them in
_WRITTEN: Mapping[str, Schema] = {
    "custom_params": OBJECT,
    "json_schema": either(OBJECT, TEXT),
    "logit_bias": {"type": "object", "additionalProperties": NUMBER},
    "speculative": FLAG,
    "stop": one_or_list(TEXT),
    "stop_regex": one_or_list(TEXT),
    "stop_token_ids": one_or_list(COUNT),
    "structural_tag": either(OBJECT, TEXT),
}
# fields that mean the same on every route that has them
_FIELDS: Mapping[str, Schema] = {
    "abort_all": FLAG,
    "abort_all_requests": FLAG,
    "activities": list_of(choice_of("CPU", "GPU")),
    "add_generation_prompt": FLAG,
    "add_special_tokens": FLAG,
    "best_of": INTEGER,
    "cache_control": ANY,
    "chat_template_kwargs": OBJECT,
    "continue_final_message": FLAG,
    "custom_logit_processor": TEXT,
    "diagnostics": ANY,
    "draft_model_path": TEXT,
    "echo": FLAG,
    "enable_thinking": FLAG,
    "include": list_of(TEXT),
    "inference_geo": ANY,
    "instructions": TEXT,
    "load_format": choice_of("auto", "safetensors"),
    "max_completion_tokens": COUNT,
    "max_output_tokens": COUNT,
    "max_tool_calls": ANY,
    "messages": list_of(_MESSAGE),
    "metadata": ANY,
    "mode": choice_of("abort"),
    "model": TEXT,
    "model_path": TEXT,
    "num_steps": INTEGER,
    "output_config": OBJECT,
    "parallel_tool_calls": FLAG,
    "prompt_cache_key": ANY,
    "prompt_cache_retention": ANY,
    "reasoning": OBJECT,
    "reasoning_effort": choice_of("none", "minimal", "low", "medium", "high", "xhigh", "max"),
    "reasoning_parser": TEXT,
    "record_shapes": FLAG,
    "response_format": object_of({"type": choice_of("text", "json_object", "json_schema", "structural_tag")}),
    "return_accept_lens": FLAG,
    "return_hidden_states": FLAG,
    "rid": TEXT,
    "safety_identifier": ANY,
    "separate_reasoning": FLAG,
    "server_args": OBJECT,
    "service_tier": ANY,
    "skip_special_tokens": FLAG,
    "speculative_usage": FLAG,
    "speed": ANY,
    "start_step": COUNT,
    "stop_sequences": list_of(TEXT),
    "store": ANY,
    "stream": FLAG,
    "stream_options": OBJECT,
    "stream_reasoning": FLAG,
    "system": either(TEXT, list_of(_PART)),
    "text": TEXT,
    "thinking": object_of({"type": choice_of("enabled", "adaptive", "disabled"), "budget_tokens": COUNT}),
    "tokens": one_or_list(_IDS),
    "tool_call_parser": TEXT,
    "tool_choice": either(choice_of("auto", "none", "required"), _NAMED_TOOL),
    "tools": list_of(_TOOL),
    "top_logprobs": COUNT,
    "truncation": choice_of("disabled"),
    "user": ANY,
    "with_stack": FLAG,
}


def sampling_schema() -> Schema:
    """``sampling_params`` of `/generate`."""
    names = (*(f.name for f in fields(SamplingParams)), "speculative")
    return object_of({name: _or_null(_sampling_control(name)) for name in names}, more=False)


def body_of(names: Iterable[str], required: Iterable[str] = (), differing: Mapping[str, Schema] = {}) -> Schema:
    """The body of a request with these fields. ``differing``: values of those that mean something else there.

    A field that nobody has described may have any value.
    """
    wanted = frozenset(required)
    properties = {}
    for name in sorted(names):
        schema = (differing or {}).get(name) or field_schema(name) or ANY
        # what is left out and what is null are the same
        properties[name] = schema if name in wanted else _or_null(schema)
    return object_of(properties, wanted, more=False)


def field_schema(name: str) -> Schema | None:
    """Values of the field of this name; None when it is not described."""
    if name in _FIELDS:
        return _FIELDS[name]
    if name in SAMPLING_FIELDS:
        return _sampling_control(SAMPLING_FIELDS[name])
    return None


def _sampling_control(name: str) -> Schema:
    """Values of a field of ``SamplingParams``, by its declared type and default."""
    if name in _WRITTEN:
        return _WRITTEN[name]
    (default,) = [f.default for f in fields(SamplingParams) if f.name == name]
    hint = get_type_hints(SamplingParams)[name]
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = [part for part in get_args(hint) if part is not type(None)]
    schema = {int: INTEGER, float: NUMBER, bool: FLAG, str: TEXT}[hint]
    return schema if default is None or default is MISSING else {**schema, "default": default}


def _or_null(schema: Schema) -> Schema:
    if not schema:
        return schema
    kind = schema.get("type")
    if isinstance(kind, str) and "enum" not in schema:
        return {**schema, "type": [kind, "null"]}
    return either(*schema.get("anyOf", (schema,)), {"type": "null"})
