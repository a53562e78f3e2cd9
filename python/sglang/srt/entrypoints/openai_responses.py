"""`/v1/responses`: OpenAI's Responses API on top of chats. No response is kept."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request, Response

from sglang.srt.entrypoints.chat_plan import ChatPlan
from sglang.srt.entrypoints.errors import ApiError
from sglang.srt.entrypoints.openai_responses_logprobs import MessageLogprobs
from sglang.srt.entrypoints.openai_responses_output import ResponseReply
from sglang.srt.entrypoints.openai_responses_request import parse_response_request
from sglang.srt.entrypoints.openai_serving import OpenAIServing
from sglang.srt.entrypoints.responses import EventStream, json_response, read_object, while_connected
from sglang.srt.entrypoints.translated_chat import TranslatedChat, plan_translated
from sglang.srt.managers.tokenizer_manager import TokenizerManager

# fields of a response that repeat what its request said, and what they are if it said nothing
_REPEATED: Mapping[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "safety_identifier": None,
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "user": None,
}


def responses_routes(manager: TokenizerManager, openai: OpenAIServing) -> APIRouter:
    """All routes under `/v1/responses`."""
    router = APIRouter(prefix="/v1/responses")

    @router.post("")
    async def create_response(request: Request) -> Response:
        body = await read_object(request)
        translated = parse_response_request(body)
        plan = await plan_translated(openai, translated)
        logprobs = MessageLogprobs(manager.pieces, plan.answer_format)
        reply = ResponseReply(_head(body, plan, openai.model_name), logprobs)
        chat = TranslatedChat(manager, translated, plan, reply)
        if chat.is_stream:
            return EventStream(chat.stream(), named=True)
        return json_response(await while_connected(request.receive, chat.whole()))

    @router.api_route("/{response_id}", methods=["GET", "DELETE"])
    @router.get("/{response_id}/input_items")
    @router.post("/{response_id}/cancel")
    async def kept_response(response_id: str) -> Response:
        raise ApiError(404, f"there is no response {response_id!r:.200}: this server keeps none", param="response_id")

    return router


def _head(body: Mapping[str, Any], plan: ChatPlan, model_name: str) -> dict[str, Any]:
    """What a response says about its request."""
    given = {name: value for name, value in body.items() if value is not None}
    text, reasoning = given.get("text", {}), given.get("reasoning", {})
    return {
        "created_at": int(time.time()),
        "model": model_name,
        **{name: given.get(name, value) for name, value in _REPEATED.items()},
        "background": False,
        "previous_response_id": None,
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "service_tier": "default",
        "store": False,
        "temperature": plan.sampling_params.temperature,
        "text": {"format": text.get("format") or {"type": "text"}, "verbosity": "medium"},
        "top_p": plan.sampling_params.top_p,
        "truncation": "disabled",
    }
