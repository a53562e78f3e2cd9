"""The OpenAPI document: every route is in it, with every field that the checks of requests know."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from fixtures.echo_scheduler import INFO
from sglang.srt.entrypoints.admin_routes import UPDATE_FIELDS
from sglang.srt.entrypoints.anthropic_request import MESSAGE_FIELDS
from sglang.srt.entrypoints.http_app import build_app
from sglang.srt.entrypoints.native_protocol import GENERATE_FIELDS
from sglang.srt.entrypoints.openai_protocol import CHAT_FIELDS, COMPLETION_FIELDS
from sglang.srt.entrypoints.openai_responses_request import RESPONSE_FIELDS
from sglang.srt.entrypoints.openapi import described_routes
from sglang.srt.entrypoints.parse_routes import CALL_TEXT_FIELDS, THOUGHT_TEXT_FIELDS
from sglang.srt.entrypoints.profile_request import PROFILE_FIELDS
from sglang.srt.entrypoints.server_state import load_server_tokenizer
from sglang.srt.entrypoints.tokenization import DETOKENIZE_FIELDS, TOKENIZE_FIELDS
from sglang.srt.managers.channel import make_memory_channel
from sglang.srt.managers.io_struct import SchedulerReady
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.server_args_resolution import resolve_server_args

TAKEN = {
    "/generate": GENERATE_FIELDS,
    "/v1/chat/completions": CHAT_FIELDS,
    "/v1/completions": COMPLETION_FIELDS,
    "/v1/responses": RESPONSE_FIELDS,
    "/v1/messages": MESSAGE_FIELDS,
    "/v1/messages/count_tokens": MESSAGE_FIELDS,
    "/tokenize": TOKENIZE_FIELDS,
    "/v1/detokenize": DETOKENIZE_FIELDS,
    "/parse_function_call": CALL_TEXT_FIELDS,
    "/separate_reasoning": THOUGHT_TEXT_FIELDS,
    "/start_profile": PROFILE_FIELDS,
    "/update_weights_from_disk": UPDATE_FIELDS,
}
# fields that cannot change an answer: any value is taken
ANY_VALUE = {
    *("cache_control", "diagnostics", "inference_geo", "max_tool_calls", "metadata", "prompt_cache_key"),
    *("prompt_cache_retention", "safety_identifier", "service_tier", "speed", "store", "user"),
}


def _app(**changes: Any) -> FastAPI:
    args = resolve_server_args(ServerArgs(model_path="tiny-gemma4", device="cpu", **changes))

    async def build() -> FastAPI:
        _, channel = make_memory_channel(asyncio.get_running_loop())
        manager = TokenizerManager(channel, load_server_tokenizer(args), SchedulerReady(INFO))
        return build_app(args, manager, None)

    return asyncio.run(build())


@pytest.fixture(scope="module")
def app() -> FastAPI:
    return _app()


@pytest.fixture(scope="module")
def document(app: FastAPI) -> dict[str, Any]:
    # as it goes over the wire
    return json.loads(json.dumps(app.openapi()))


def _body(document: Mapping[str, Any], path: str, method: str = "post") -> dict[str, Any]:
    return document["paths"][path][method]["requestBody"]["content"]["application/json"]["schema"]


def _operations(document: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            yield path, method, operation


def test_every_route_is_described(app: FastAPI, document: dict[str, Any]) -> None:
    routes = {(r.path_format, m.lower()) for r in app.routes if isinstance(r, APIRoute) for m in r.methods}
    shown = {(path, method) for path, method, _ in _operations(document)}
    assert {("/generate", "post"), ("/generate", "put"), ("/v1/models/{name}", "get")} <= routes <= shown
    assert described_routes() <= set(document["paths"])
    ids = [operation["operationId"] for _, _, operation in _operations(document)]
    assert len(set(ids)) == len(ids) > 40
    for path, _, operation in _operations(document):
        assert set(operation["responses"]) == {"200", "default"}, path


@pytest.mark.parametrize("path", TAKEN)
def test_a_body_has_the_fields_that_are_checked(document: dict[str, Any], path: str) -> None:
    body = _body(document, path)
    assert set(body["properties"]) == set(TAKEN[path]) and body["additionalProperties"] is False
    vague = {name for name, schema in body["properties"].items() if not schema}
    assert vague <= ANY_VALUE, f"describe {vague - ANY_VALUE} in openapi_fields.py"


def test_sampling_controls_have_their_types_and_defaults(document: dict[str, Any]) -> None:
    controls = _body(document, "/generate")["properties"]["sampling_params"]["anyOf"][0]["properties"]
    assert set(controls) == {f.name for f in fields(SamplingParams)} | {"speculative"}
    assert controls["temperature"] == {"type": ["number", "null"], "default": 1.0}
    assert controls["max_new_tokens"] == {"type": ["integer", "null"], "default": 128}
    assert controls["ebnf"] == {"type": ["string", "null"]}
    chat = _body(document, "/v1/chat/completions")
    assert chat["properties"]["top_p"] == controls["top_p"] and chat["required"] == ["messages"]
    assert _body(document, "/generate", "put") == _body(document, "/generate")


def test_a_server_with_a_key_says_so(document: dict[str, Any]) -> None:
    assert "security" not in document
    assert _app(api_key="k").openapi()["security"] == [{"key": []}]
