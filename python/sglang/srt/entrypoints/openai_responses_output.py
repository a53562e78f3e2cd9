"""How a response of OpenAI's Responses API looks: its items, and the numbered events in which they grow."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from sglang.srt.entrypoints.chat_output import AnswerReader
from sglang.srt.entrypoints.errors import ApiError
from sglang.srt.entrypoints.openai_responses_logprobs import MessageLogprobs
from sglang.srt.entrypoints.parsers.base import ContentText, Event, ReasoningText, ToolCallArguments, ToolCallBegin
from sglang.srt.managers.generate_output import GenerateOutput

_Status = Literal["in_progress", "completed", "incomplete"]
_TextKind = Literal["message", "reasoning"]


class ResponseReply:
    """See ``Reply``. ``head``: the fields of the response that its request settles."""

    def __init__(self, head: Mapping[str, Any], logprobs: MessageLogprobs) -> None:
        self._response: dict[str, Any] = {
            "id": _new_id("resp"),
            "object": "response",
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
            **head,
        }
        self._items: list[dict[str, Any]] = []
        self._open: _TextItem | _CallItem | None = None
        self._num_events = 0
        self._logprobs = logprobs
        self._num_messages = 0

    def begin(self, out: GenerateOutput) -> list[dict[str, Any]]:
        steps = ("response.created", "response.in_progress")
        return self._numbered([{"type": step, "response": dict(self._response)} for step in steps])

    def add(self, events: Sequence[Event], out: GenerateOutput) -> list[dict[str, Any]]:
        if out.logprobs is not None:
            self._logprobs.read(out.logprobs.output)
        return self._numbered([sent for event in events for sent in self._take(event)])

    def end(self, out: GenerateOutput, reader: AnswerReader) -> list[dict[str, Any]]:
        assert out.finish_reason is not None
        is_cut = out.finish_reason.type == "length"
        status: _Status = "incomplete" if is_cut else "completed"
        sent = self._close(status)
        self._response |= {"status": status, "output": self._items, "usage": _usage(out, reader.reasoning_tokens)}
        if is_cut:
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
        return self._numbered([*sent, {"type": f"response.{status}", "response": self._response}])

    def fail(self, error: ApiError) -> list[dict[str, Any]]:
        described = {"code": error.code or "server_error", "message": error.message}
        self._response |= {"status": "failed", "output": self._items, "error": described}
        return self._numbered(
            [
                {"type": "error", **described, "param": error.param},
                {"type": "response.failed", "response": self._response},
            ]
        )

    def whole(self) -> dict[str, Any]:
        return self._response

    def _take(self, event: Event) -> list[dict[str, Any]]:
        if isinstance(event, (ReasoningText, ContentText)):
            kind: _TextKind = "reasoning" if isinstance(event, ReasoningText) else "message"
            opened = []
            if not isinstance(self._open, _TextItem) or self._open.kind != kind:
                opened = self._begin(self._make_thought if kind == "reasoning" else self._make_message)
            assert isinstance(self._open, _TextItem)
            return [*opened, self._open.grow(event.text)]
        if isinstance(event, ToolCallBegin):
            return self._begin(lambda index: _CallItem(index, event.name))
        assert isinstance(self._open, _CallItem), event
        return [self._open.grow(event.text)] if isinstance(event, ToolCallArguments) else self._close("completed")

    def _make_thought(self, index: int) -> _TextItem:
        return _TextItem(index, "reasoning", lambda first: [])

    def _make_message(self, index: int) -> _TextItem:
        self._num_messages += 1
        return _TextItem(index, "message", partial(self._logprobs.of_message, self._num_messages - 1))

    def _begin(self, make: Callable[[int], _TextItem | _CallItem]) -> list[dict[str, Any]]:
        closed = self._close("completed")
        self._open = make(len(self._items))
        return [*closed, *self._open.begin()]

    def _close(self, status: _Status) -> list[dict[str, Any]]:
        if self._open is None:
            return []
        item, sent = self._open.end(status)
        self._items.append(item)
        self._open = None
        return sent

    def _numbered(self, events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        first, self._num_events = self._num_events, self._num_events + len(events)
        return [{**event, "sequence_number": first + i} for i, event in enumerate(events)]


class _TextItem:
    """A message or a thought, with one part. ``logprobs``: entries of its tokens from a given one on."""

    def __init__(self, index: int, kind: _TextKind, logprobs: Callable[[int], list[dict[str, Any]]]) -> None:
        self.kind = kind
        self._index = index
        self._id = _new_id("msg" if kind == "message" else "rs")
        self._text: list[str] = []
        self._logprobs_from = logprobs
        self._num_shown = 0
        self._event = "response.output_text" if kind == "message" else "response.reasoning_text"
        self._place = {"item_id": self._id, "output_index": index, "content_index": 0}

    def begin(self) -> list[dict[str, Any]]:
        return [
            _item_event("added", self._index, self._item("in_progress", [])),
            {"type": "response.content_part.added", **self._place, "part": self._part("", [])},
        ]

    def grow(self, text: str) -> dict[str, Any]:
        self._text.append(text)
        logprobs = self._logprobs_from(self._num_shown)
        self._num_shown += len(logprobs)
        return {"type": f"{self._event}.delta", **self._place, "delta": text, **self._with(logprobs)}

    def end(self, status: _Status) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The item, and the events that end it."""
        text = "".join(self._text)
        logprobs = self._logprobs_from(0)
        part = self._part(text, logprobs)
        item = self._item(status, [part])
        return item, [
            {"type": f"{self._event}.done", **self._place, "text": text, **self._with(logprobs)},
            {"type": "response.content_part.done", **self._place, "part": part},
            _item_event("done", self._index, item),
        ]

    def _item(self, status: _Status, content: list[dict[str, Any]]) -> dict[str, Any]:
        own: dict[str, Any] = {"role": "assistant"} if self.kind == "message" else {"summary": []}
        return {"id": self._id, "type": self.kind, "status": status, **own, "content": content}

    def _part(self, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], **self._with(logprobs)}

    def _with(self, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        return {"logprobs": logprobs} if self.kind == "message" else {}


class _CallItem:
    """A call of a function."""

    def __init__(self, index: int, name: str) -> None:
        self._index = index
        self._name = name
        self._id = _new_id("fc")
        self._call_id = f"call_{uuid.uuid4().hex[:24]}"
        self._arguments: list[str] = []
        self._place = {"item_id": self._id, "output_index": index}

    def begin(self) -> list[dict[str, Any]]:
        return [_item_event("added", self._index, self._item("in_progress", ""))]

    def grow(self, text: str) -> dict[str, Any]:
        self._arguments.append(text)
        return {"type": "response.function_call_arguments.delta", **self._place, "delta": text}

    def end(self, status: _Status) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The item, and the events that end it."""
        arguments = "".join(self._arguments)
        item = self._item(status, arguments)
        done = {"type": "response.function_call_arguments.done", **self._place, "name": self._name}
        return item, [{**done, "arguments": arguments}, _item_event("done", self._index, item)]

    def _item(self, status: _Status, arguments: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "function_call",
            "status": status,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": arguments,
        }


def _item_event(step: Literal["added", "done"], index: int, item: dict[str, Any]) -> dict[str, Any]:
    return {"type": f"response.output_item.{step}", "output_index": index, "item": item}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def _usage(out: GenerateOutput, reasoning_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": out.prompt_tokens,
        "input_tokens_details": {"cached_tokens": out.cached_tokens},
        "output_tokens": out.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": out.prompt_tokens + out.completion_tokens,
    }
