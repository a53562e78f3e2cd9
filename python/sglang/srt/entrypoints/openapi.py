"""`/openapi.json`: what every route takes and gives, by the names of fields that requests are checked against."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from sglang.srt.entrypoints import openapi_fields as types
from sglang.srt.entrypoints.admin_routes import UPDATE_FIELDS
from sglang.srt.entrypoints.anthropic_request import MESSAGE_FIELDS
from sglang.srt.entrypoints.native_protocol import GENERATE_FIELDS
from sglang.srt.entrypoints.openai_protocol import CHAT_FIELDS, COMPLETION_FIELDS
from sglang.srt.entrypoints.openai_responses_request import RESPONSE_FIELDS
from sglang.srt.entrypoints.openapi_fields import Schema, body_of, either, list_of, object_of, one_or_list
from sglang.srt.entrypoints.parse_routes import CALL_TEXT_FIELDS, THOUGHT_TEXT_FIELDS
from sglang.srt.entrypoints.profile_request import PROFILE_FIELDS
from sglang.srt.entrypoints.tokenization import DETOKENIZE_FIELDS, TOKENIZE_FIELDS

_IDS = list_of(types.COUNT)
_PROMPT = one_or_list(types.TEXT)
_SAMPLING = types.sampling_schema()
_GENERATE: Mapping[str, Schema] = {
    "text": _PROMPT,
    "input_ids": one_or_list(_IDS),
    "sampling_params": one_or_list(_SAMPLING),
    "rid": one_or_list(types.TEXT),
    "return_logprob": one_or_list(types.FLAG),
    "logprob_start_len": one_or_list(types.INTEGER),
    "top_logprobs_num": one_or_list(types.COUNT),
    "token_ids_logprob": either(_IDS, list_of(either(_IDS, {"type": "null"}))),
    "return_text_in_logprobs": types.FLAG,
    "return_hidden_states": one_or_list(types.FLAG),
    "return_accept_lens": one_or_list(types.FLAG),
    "custom_logit_processor": one_or_list(types.TEXT),
}
_ITEM = object_of({"role": types.choice_of("user", "assistant", "system", "developer"), "content": types.ANY})
_BLOCKS = either(types.TEXT, list_of(types.OBJECT))
_TURN = object_of({"role": types.choice_of("user", "assistant", "system"), "content": _BLOCKS}, ("role", "content"))
_SEQUENCE = {"text": types.TEXT, "output_ids": _IDS, "meta_info": types.OBJECT}
_COMPLETION = {
    "id": types.TEXT,
    "object": types.TEXT,
    "created": types.COUNT,
    "model": types.TEXT,
    "choices": list_of(types.OBJECT),
    "usage": types.OBJECT,
}
_ERROR = object_of(
    {
        "message": types.TEXT,
        "type": types.TEXT,
        "param": {"type": ["string", "null"]},
        "code": {"type": ["string", "null"]},
    },
    ("message", "type", "param", "code"),
    more=False,
)
_EVENT = object_of({"event": types.TEXT, "data": types.TEXT}, ("data",))
_OPENAI_ERROR = object_of({"error": _ERROR}, ("error",), more=False)
_ANTHROPIC_ERROR = object_of({"type": types.choice_of("error"), "error": types.OBJECT}, ("type", "error"), more=False)


@dataclass(frozen=True, slots=True)
class _Route:
    """Body and reply of a route; ``text`` is the media type of a reply that is no JSON."""

    body: Schema | None = None
    may_be_empty: bool = False
    reply: Mapping[str, Schema] | Schema | None = None
    streams: bool = False
    text: str | None = None


def _reply(properties: Mapping[str, Schema]) -> Schema:
    return object_of(properties, properties)


def _completion(names: tuple[str, ...], required: str, differing: Mapping[str, Schema]) -> _Route:
    return _Route(body_of(names, (required,), differing), reply=_reply(_COMPLETION), streams=True)


_TOKENIZE = _Route(
    body_of(TOKENIZE_FIELDS, ("prompt",), {"prompt": _PROMPT}),
    reply=_reply({"tokens": one_or_list(_IDS), "count": one_or_list(types.COUNT), "max_model_len": types.COUNT}),
)
_DETOKENIZE = _Route(body_of(DETOKENIZE_FIELDS, ("tokens",)), reply=_reply({"text": _PROMPT}))
_MESSAGES = {"messages": list_of(_TURN), "tools": list_of(types.OBJECT), "tool_choice": types.OBJECT}
_INPUT = {
    "input": either(types.TEXT, list_of(_ITEM)),
    "text": types.OBJECT,
    "tools": list_of(types.OBJECT),
    "tool_choice": either(types.TEXT, types.OBJECT),
}
_ABORTED = _reply({"aborted": types.COUNT})
_NOTHING = _Route(text="text/plain")

_ROUTES: Mapping[str, _Route] = {
    "/generate": _Route(
        {**body_of(GENERATE_FIELDS, (), _GENERATE), "anyOf": [{"required": ["text"]}, {"required": ["input_ids"]}]},
        reply=one_or_list(_reply(_SEQUENCE)),
        streams=True,
    ),
    "/v1/chat/completions": _completion(CHAT_FIELDS, "messages", {"logprobs": types.FLAG}),
    "/v1/completions": _completion(
        COMPLETION_FIELDS, "prompt", {"logprobs": types.COUNT, "prompt": either(_PROMPT, one_or_list(_IDS))}
    ),
    "/v1/responses": _Route(
        body_of(RESPONSE_FIELDS, ("input",), _INPUT),
        reply=_reply({"id": types.TEXT, "object": types.TEXT, "output": list_of(types.OBJECT)}),
        streams=True,
    ),
    "/v1/messages": _Route(
        body_of(MESSAGE_FIELDS, ("messages", "max_tokens"), _MESSAGES),
        reply=_reply({"id": types.TEXT, "type": types.TEXT, "content": list_of(types.OBJECT)}),
        streams=True,
    ),
    "/v1/messages/count_tokens": _Route(
        body_of(MESSAGE_FIELDS, ("messages",), _MESSAGES), reply=_reply({"input_tokens": types.COUNT})
    ),
    "/parse_function_call": _Route(
        body_of(CALL_TEXT_FIELDS, ("text",)),
        reply=_reply({"normal_text": types.TEXT, "calls": list_of(types.OBJECT)}),
    ),
    "/separate_reasoning": _Route(
        body_of(THOUGHT_TEXT_FIELDS, ("text",)), reply=_reply({"reasoning_text": types.TEXT, "text": types.TEXT})
    ),
    "/tokenize": _TOKENIZE,
    "/v1/tokenize": _TOKENIZE,
    "/detokenize": _DETOKENIZE,
    "/v1/detokenize": _DETOKENIZE,
    "/v1/models": _Route(reply=_reply({"object": types.TEXT, "data": list_of(types.OBJECT)})),
    "/abort_request": _Route(body_of(("rid", "abort_all")), reply=_ABORTED),
    "/pause_generation": _Route(body_of(("mode",)), may_be_empty=True, reply=_ABORTED),
    "/flush_cache": _Route(reply=_reply({"success": types.FLAG, "message": types.TEXT})),
    "/get_internal_state": _Route(reply=list_of(types.OBJECT)),
    "/get_load": _Route(
        reply=list_of(_reply(dict.fromkeys(("dp_rank", "num_reqs", "num_waiting_reqs", "num_tokens"), types.COUNT)))
    ),
    "/set_internal_state": _Route(body_of(("server_args",), ("server_args",)), reply=list_of(types.FLAG)),
    "/start_profile": _Route(body_of(PROFILE_FIELDS), may_be_empty=True, reply=types.OBJECT),
    "/update_weights_from_disk": _Route(
        body_of(UPDATE_FIELDS, ("model_path",)), reply=_reply({"success": types.FLAG, "message": types.TEXT})
    ),
    "/metrics": _NOTHING,
}
# status 200 says it all
_WITHOUT_BODY = frozenset({"/health", "/health_generate", "/ping", "/ready"})
_PLAIN = _Route(reply=types.OBJECT)


def described_routes() -> frozenset[str]:
    """Paths that have an entry of their own here."""
    return frozenset(_ROUTES) | _WITHOUT_BODY


def openapi_document(app: FastAPI, *, needs_key: bool) -> dict[str, Any]:
    """The document of an app with all its routes."""
    with warnings.catch_warnings():
        # routes of two methods or two names are one function, so FastAPI finds the same operation id twice
        warnings.simplefilter("ignore", UserWarning)
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    document["components"] = {"schemas": {"Error": _OPENAI_ERROR, "AnthropicError": _ANTHROPIC_ERROR}}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            operation["operationId"] = f"{method} {path}"
            _describe(operation, path, method)
    if needs_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _describe(operation: dict[str, Any], path: str, method: str) -> None:
    route = _ROUTES.get(path, _PLAIN)
    if route.body is not None and method != "get":
        operation["requestBody"] = {"required": not route.may_be_empty, "content": _json(route.body)}
    good: dict[str, Any] = {"description": "done"}
    if path not in _WITHOUT_BODY:
        good["content"] = {route.text: {"schema": types.TEXT}} if route.text else _json(route.reply or types.ANY)
    if route.streams:
        good["content"]["text/event-stream"] = {"schema": _EVENT}
    error = "AnthropicError" if path.startswith("/v1/messages") else "Error"
    refused = {"description": "an error", "content": _json({"$ref": f"#/components/schemas/{error}"})}
    operation["responses"] = {"200": good, "default": refused}


def _json(schema: Schema) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
