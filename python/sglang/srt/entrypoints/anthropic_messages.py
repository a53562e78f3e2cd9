"""`/v1/messages`: Anthropic's Messages API on top of chats."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from sglang.srt.entrypoints.anthropic_output import MessageReply
from sglang.srt.entrypoints.anthropic_request import parse_message_request
from sglang.srt.entrypoints.openai_serving import OpenAIServing
from sglang.srt.entrypoints.responses import EventStream, json_response, read_object, while_connected
from sglang.srt.entrypoints.translated_chat import TranslatedChat, plan_translated
from sglang.srt.managers.tokenizer_manager import TokenizerManager


def messages_routes(manager: TokenizerManager, openai: OpenAIServing) -> APIRouter:
    """All routes under `/v1/messages`."""
    router = APIRouter(prefix="/v1/messages")

    @router.post("")
    async def create_message(request: Request) -> Response:
        translated = parse_message_request(await read_object(request))
        plan = await plan_translated(openai, translated)
        chat = TranslatedChat(manager, translated, plan, MessageReply(openai.model_name))
        if chat.is_stream:
            return EventStream(chat.stream(), named=True)
        return json_response(await while_connected(request.receive, chat.whole()))

    @router.post("/count_tokens")
    async def count_tokens(request: Request) -> Response:
        translated = parse_message_request(await read_object(request), counts_only=True)
        plan = await plan_translated(openai, translated)
        return json_response({"input_tokens": len(plan.prompt)})

    return router
