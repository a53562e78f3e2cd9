"""How a message of Anthropic's Messages API looks: its blocks, and the events in which they grow."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from sglang.srt.entrypoints.chat_output import AnswerReader
from sglang.srt.entrypoints.errors import ApiError
from sglang.srt.entrypoints.parsers.base import (
    ContentText,
    Event,
    ReasoningText,
    ToolCallArguments,
    ToolCallBegin,
)
from sglang.srt.managers.generate_output import GenerateOutput
from sglang.srt.managers.io_struct import FinishReason

_STOP_REASONS: Mapping[str, str] = {"stop": "end_turn", "length": "max_tokens"}


class MessageReply:
    """See ``Reply``."""

    def __init__(self, model_name: str) -> None:
        self._message: dict[str, Any] = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model_name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        self._blocks: list[dict[str, Any]] = []
        self._open: _Block | None = None

    def begin(self, out: GenerateOutput) -> list[dict[str, Any]]:
        started = {**self._message, "usage": _usage(out, 0) | {"output_tokens": 0}}
        return [{"type": "message_start", "message": started}, {"type": "ping"}]

    def add(self, events: Sequence[Event], out: GenerateOutput) -> list[dict[str, Any]]:
        return [sent for event in events for sent in self._take(event)]

    def end(self, out: GenerateOutput, reader: AnswerReader) -> list[dict[str, Any]]:
        assert out.finish_reason is not None
        sent = self._close()
        delta = _end_fields(out.finish_reason, ends_with_call=reader.ends_with_call)
        usage = _usage(out, reader.reasoning_tokens)
        self._message |= {**delta, "content": self._blocks, "usage": usage}
        return [*sent, {"type": "message_delta", "delta": delta, "usage": usage}, {"type": "message_stop"}]

    def fail(self, error: ApiError) -> list[dict[str, Any]]:
        return [error.to_anthropic()]

    def whole(self) -> dict[str, Any]:
        return self._message

    def _take(self, event: Event) -> list[dict[str, Any]]:
        if isinstance(event, (ReasoningText, ContentText)):
            kind = "thinking" if isinstance(event, ReasoningText) else "text"
            opened = [] if self._open is not None and self._open.kind == kind else self._begin(kind, {kind: ""})
            return [*opened, self._grow(f"{kind}_delta", kind, event.text)]
        if isinstance(event, ToolCallBegin):
            return self._begin("tool_use", {"id": f"toolu_{uuid.uuid4().hex[:24]}", "name": event.name, "input": {}})
        if isinstance(event, ToolCallArguments):
            return [self._grow("input_json_delta", "partial_json", event.text)]
        return self._close()

    def _begin(self, kind: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
        closed = self._close()
        start = {"type": kind, **fields} | ({"signature": ""} if kind == "thinking" else {})
        self._open = _Block(kind, len(self._blocks), start)
        return [*closed, {"type": "content_block_start", "index": self._open.index, "content_block": start}]

    def _grow(self, kind: str, field: str, text: str) -> dict[str, Any]:
        assert self._open is not None, kind
        self._open.pieces.append(text)
        return {"type": "content_block_delta", "index": self._open.index, "delta": {"type": kind, field: text}}

    def _close(self) -> list[dict[str, Any]]:
        if self._open is None:
            return []
        block, self._open = self._open, None
        whole = block.whole()
        self._blocks.append(whole)
        sent: list[dict[str, Any]] = []
        if block.kind == "thinking":
            delta = {"type": "signature_delta", "signature": whole["signature"]}
            sent.append({"type": "content_block_delta", "index": block.index, "delta": delta})
        return [*sent, {"type": "content_block_stop", "index": block.index}]


class _Block:
    """A block that grows. ``start``: what it is without the pieces."""

    __slots__ = ("kind", "index", "pieces", "_start")

    def __init__(self, kind: str, index: int, start: dict[str, Any]) -> None:
        self.kind = kind
        self.index = index
        self.pieces: list[str] = []
        self._start = start

    def whole(self) -> dict[str, Any]:
        text = "".join(self.pieces)
        if self.kind == "text":
            return {**self._start, "text": text}
        if self.kind == "thinking":
            # clients keep only thoughts that are signed; nobody but its reader has a use for the sum
            return {**self._start, "thinking": text, "signature": hashlib.sha256(text.encode()).hexdigest()}
        return {**self._start, "input": _parse_input(text)}


def _parse_input(text: str) -> Any:
    """Arguments of a call as a value. Of what ``max_tokens`` cut short: what is complete, as clients read streams."""
    try:
        return from_json(text or "{}", allow_partial=True)
    except ValueError as error:
        raise ApiError(500, f"the arguments of a call cannot be given as an object: {error!s:.100}") from error


def _end_fields(reason: FinishReason, *, ends_with_call: bool) -> dict[str, Any]:
    if reason.type == "stop" and ends_with_call:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if reason.type == "stop" and isinstance(reason.matched, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": reason.matched}
    return {"stop_reason": _STOP_REASONS[reason.type], "stop_sequence": None}


def _usage(out: GenerateOutput, reasoning_tokens: int) -> dict[str, Any]:
    """Tokens whose KV was reused are not among the ``input_tokens``."""
    return {
        "input_tokens": out.prompt_tokens - out.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": out.cached_tokens,
        "output_tokens": out.completion_tokens,
        "output_tokens_details": {"thinking_tokens": reasoning_tokens},
    }
