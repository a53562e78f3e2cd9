"""Requests drawn from the server's own OpenAPI document, right and wrong ones, to every route: none is a server error,
and every reply is one that the document announces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import hypothesis
import pytest
import schemathesis
from hypothesis import strategies as st
from schemathesis import APIOperation, Case, GenerationMode, checks
from schemathesis.specs.openapi import checks as openapi_checks

from fixtures.server_process import ServerProcess, ready_server

# a short context: whatever a request asks for, its answer ends soon
ARGS = ("--context-length", "96", "--speculative-algorithm", "FROZEN_KV_MTP", "--speculative-num-steps", "2")
CHECKS = (
    checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_schema_conformance,
)
_MESSAGES = [{"role": "user", "content": "Say fox 3 times."}]
_TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
# requests that are served; drawn fields are put into them, so that these get past the first check
SERVED: Mapping[str, dict[str, Any]] = {
    "/generate": {"text": "<bos>Once", "sampling_params": {"max_new_tokens": 4}},
    "/v1/chat/completions": {"messages": _MESSAGES, "max_tokens": 4},
    "/v1/completions": {"prompt": "Once", "max_tokens": 4},
    "/v1/responses": {"input": "Say fox 3 times.", "max_output_tokens": 4},
    "/v1/messages": {"messages": _MESSAGES, "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": _MESSAGES},
    "/parse_function_call": {"text": "<|tool_call>call:f{}<tool_call|>", "tools": _TOOLS},
    "/separate_reasoning": {"text": "a"},
    "/tokenize": {"prompt": "Once"},
    "/v1/tokenize": {"prompt": "Once"},
    "/detokenize": {"tokens": [50, 60]},
    "/v1/detokenize": {"tokens": [50, 60]},
    "/abort_request": {"rid": "mine"},
    "/pause_generation": {},
    "/set_internal_state": {"server_args": {"log_requests": False}},
    "/start_profile": {"num_steps": 1},
    "/update_weights_from_disk": {"model_path": "."},
}
# what has to be undone for the server to go on
AFTER: Mapping[str, str] = {"/pause_generation": "/continue_generation", "/start_profile": "/stop_profile"}
EXAMPLES = 24
# slow ones, and other names of the same
FEW: Mapping[str, int] = {
    "/start_profile": 2,
    "/update_weights_from_disk": 6,
    "/v1/messages/count_tokens": 8,
    "/v1/tokenize": 4,
    "/v1/detokenize": 4,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("openapi")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_TORCH_PROFILER_DIR", str(folder))
        with ready_server(folder, *ARGS) as running:
            yield running


@pytest.fixture(scope="module")
def schema(server: ServerProcess) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def _settings(path: str, has_body: bool) -> hypothesis.settings:
    return hypothesis.settings(
        max_examples=FEW.get(path, EXAMPLES) if has_body else 2,
        derandomize=True,
        database=None,
        deadline=None,
        phases=(hypothesis.Phase.generate,),
        suppress_health_check=list(hypothesis.HealthCheck),
    )


def _put_into_served(draw: st.DataObject, case: Case) -> None:
    """Keep a few of the drawn fields and take the others from a request that is served."""
    served = SERVED.get(case.operation.path)
    if served is None or not isinstance(case.body, dict) or draw.draw(st.integers(0, 3)) == 0:
        return
    kept = draw.draw(st.lists(st.sampled_from(sorted(case.body)), max_size=3)) if case.body else []
    case.body = served | {name: case.body[name] for name in kept}


def _statuses(url: str, operation: APIOperation[Any, Any, Any], mode: GenerationMode) -> set[int]:
    """Put drawn requests to an operation and hold every reply to the document; the statuses that came."""
    seen: set[int] = set()

    def call(case: Case, draw: st.DataObject) -> None:
        _put_into_served(draw, case)
        seen.add(_status(url, case))

    settings = _settings(operation.path, bool(operation.body))
    settings(hypothesis.given(operation.as_strategy(generation_mode=mode), st.data())(call))()
    return seen


def _status(url: str, case: Case) -> int:
    response = case.call(base_url=url, timeout=120)
    undo = AFTER.get(case.operation.path)
    if undo is not None:
        httpx.post(url + undo, timeout=120)
    case.validate_response(response, checks=list(CHECKS))
    return response.status_code


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["right", "wrong"])
def test_every_reply_is_one_that_the_document_announces(
    server: ServerProcess, schema: schemathesis.BaseSchema, mode: GenerationMode
) -> None:
    operations = [result.ok() for result in schema.get_all_operations()]
    if mode == GenerationMode.NEGATIVE:
        operations = [operation for operation in operations if operation.body]
    seen = {operation.label: _statuses(server.url, operation, mode) for operation in operations}
    refusing = [label for label, statuses in seen.items() if 400 in statuses]
    assert len(refusing) > len([operation for operation in operations if operation.body]) / 2, seen
    assert len(operations) > (20 if mode == GenerationMode.POSITIVE else 10)


@pytest.mark.parametrize("stream", [False, True])
def test_requests_that_are_served(server: ServerProcess, schema: schemathesis.BaseSchema, stream: bool) -> None:
    for path, body in SERVED.items():
        operation = schema[path]["POST"]
        has_stream = (
            "stream" in operation.definition.raw["requestBody"]["content"]["application/json"]["schema"]["properties"]
        )
        if has_stream or not stream:
            case = operation.Case(body=body | ({"stream": True} if stream else {}), media_type="application/json")
            assert _status(server.url, case) == 200, path


def test_what_other_servers_have_and_this_one_does_not(server: ServerProcess) -> None:
    for path in ("/encode", "/classify", "/v1/embeddings", "/v1/score", "/v1/rerank", "/open_session"):
        assert httpx.post(server.url + path, json={}).status_code == 404, path


@pytest.mark.parametrize(("status", "content"), [(500, None), (200, b'{"tokens": "none"}'), (400, b'{"detail": []}')])
def test_a_reply_that_is_not_announced_is_found(
    server: ServerProcess, schema: schemathesis.BaseSchema, status: int, content: bytes | None
) -> None:
    case = schema["/tokenize"]["POST"].Case(body=SERVED["/tokenize"], media_type="application/json")
    response = case.call(base_url=server.url, timeout=120)
    response.status_code, response.content = status, content or response.content
    with pytest.raises(checks.FailureGroup):
        case.validate_response(response, checks=list(CHECKS))
