"""`/parse_function_call` and `/separate_reasoning`, without a server behind them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from fixtures.answers import ADD, PARIS, THOUGHT
from sglang.srt.entrypoints.errors import ApiError
from sglang.srt.entrypoints.parse_routes import parse_routes
from sglang.srt.server_args import ServerArgs
from sglang.srt.server_args_resolution import resolve_server_args

RESOLVED = resolve_server_args(ServerArgs(model_path="tiny-gemma4", device="cpu"))
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("add", "get_weather")]


def ask(path: str, body: dict[str, Any], **args: Any) -> Any:
    app = FastAPI()
    app.include_router(parse_routes(RESOLVED.derive(**args)))

    async def post() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x", timeout=10) as client:
            return await client.post(path, json=body)

    return asyncio.run(post()).json()


def test_calls() -> None:
    other = PARIS.replace("get_weather", "other")
    body = {"text": f"One {PARIS} two {ADD}{other}", "tools": TOOLS}
    for named in ({}, {"tool_call_parser": "gemma4"}):
        parsed = ask("/parse_function_call", body | named)
        assert parsed["normal_text"] == "One  two "
        found = [(call["tool_index"], call["name"], json.loads(call["parameters"])) for call in parsed["calls"]]
        city = {"city": "Paris"}
        assert found == [(1, "get_weather", city), (0, "add", {"a": 1, "b": 2}), (-1, "other", city)]


def test_thoughts() -> None:
    parsed = ask("/separate_reasoning", {"text": f"{THOUGHT}So {PARIS}", "reasoning_parser": "gemma4"})
    assert parsed == {"reasoning_text": "One, two.", "text": f"So {PARIS}"}
    assert ask("/separate_reasoning", {"text": "plain"}) == {"reasoning_text": "", "text": "plain"}


@pytest.mark.parametrize(
    "path, body, args, problem",
    [
        ("/parse_function_call", {}, {}, "^text must be a string"),
        ("/parse_function_call", {"text": "", "tool_call_parser": "x"}, {}, "^tool_call_parser must be one of gemma4"),
        ("/parse_function_call", {"text": ""}, {"tool_call_parser": "none"}, "^tool_call_parser must be one of"),
        ("/parse_function_call", {"text": "", "tools": 3}, {}, "^tools must be a list"),
        ("/separate_reasoning", {"text": 3}, {}, "^text must be a string"),
        ("/separate_reasoning", {"text": "", "reasoning_parser": 3}, {}, "^reasoning_parser must be one of gemma4"),
    ],
)
def test_bad_requests(path: str, body: dict[str, Any], args: dict[str, Any], problem: str) -> None:
    with pytest.raises(ApiError, match=problem):
        ask(path, body, **args)
