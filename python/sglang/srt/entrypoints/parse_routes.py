"""`/parse_function_call` and `/separate_reasoning`: the text of an answer taken apart without generating anything."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request, Response

from sglang.srt.configs.registries import OUTPUT_FORMATS, load_entry
from sglang.srt.entrypoints.errors import bad_field
from sglang.srt.entrypoints.native_protocol import check_fields
from sglang.srt.entrypoints.openai_messages import parse_tool_use
from sglang.srt.entrypoints.parsers.base import OutputFormat, ParsedText, join_events
from sglang.srt.entrypoints.responses import json_response, read_object
from sglang.srt.server_args import ServerArgs

CALL_TEXT_FIELDS = ("text", "tools", "tool_call_parser")
THOUGHT_TEXT_FIELDS = ("text", "reasoning_parser")


def parse_routes(server_args: ServerArgs) -> APIRouter:
    """Both routes. A request that names no parser is read with that of the server. Takes resolved arguments."""
    router = APIRouter()

    @router.post("/parse_function_call")
    async def parse_function_call(request: Request) -> Response:
        body = await read_object(request)
        check_fields(body, CALL_TEXT_FIELDS, {})
        parser = _named_format(body, "tool_call_parser", server_args.tool_call_parser)
        names = parse_tool_use({"tools": body.get("tools")}).names
        parsed = await _parse(body, parser, tools=True)
        calls = [
            {
                "tool_index": names.index(call.name) if call.name in names else -1,
                "name": call.name,
                "parameters": call.arguments,
            }
            for call in parsed.calls
        ]
        return json_response({"normal_text": parsed.content, "calls": calls})

    @router.post("/separate_reasoning")
    async def separate_reasoning(request: Request) -> Response:
        body = await read_object(request)
        check_fields(body, THOUGHT_TEXT_FIELDS, {})
        parser = _named_format(body, "reasoning_parser", server_args.reasoning_parser)
        parsed = await _parse(body, parser, tools=False)
        return json_response({"reasoning_text": parsed.reasoning, "text": parsed.content})

    return router


def _named_format(body: Mapping[str, Any], field: str, of_server: str | None) -> OutputFormat:
    name = of_server if body.get(field) is None else body[field]
    known = sorted(OUTPUT_FORMATS)
    if not isinstance(name, str) or name not in known:
        raise bad_field(field, f"must be one of {', '.join(known)}, got {name!r:.200}")
    output_format: OutputFormat = load_entry(OUTPUT_FORMATS, name)()
    return output_format


async def _parse(body: Mapping[str, Any], output_format: OutputFormat, *, tools: bool) -> ParsedText:
    """Reads either calls or thoughts: markers of the other are text."""
    text = body.get("text")
    if not isinstance(text, str):
        raise bad_field("text", f"must be a string, got {text!r:.200}")
    parser = output_format.make_parser(reasoning=not tools, tools=tools)
    # off the event loop: the text may be long
    return await asyncio.to_thread(lambda: join_events([*parser.feed(text), *parser.finish()]))
