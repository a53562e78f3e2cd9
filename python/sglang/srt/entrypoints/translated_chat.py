"""Chats in the terms of another API: its requests become chat requests, and answers of the model become its events."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sglang.srt.entrypoints.chat_output import AnswerReader
from sglang.srt.entrypoints.chat_plan import ChatPlan
from sglang.srt.entrypoints.errors import ApiError, bad_field
from sglang.srt.entrypoints.openai_protocol import in_openai_terms
from sglang.srt.entrypoints.openai_serving import OpenAIServing
from sglang.srt.entrypoints.parsers.base import Event
from sglang.srt.entrypoints.responses import logged_api_error
from sglang.srt.managers.generate_output import GenerateOutput
from sglang.srt.managers.tokenizer_manager import TokenizerManager

# what a request is told that somebody else ended: it is not at fault, and need not be tried again
_ABORTED = 499
_PATH = re.compile(r"[a-z][\w.\[\]]*")
# Controls beyond other APIs that mean the same there as in a chat request
EXTRA_FIELDS = (
    "chat_template_kwargs",
    "ebnf",
    "enable_thinking",
    "frequency_penalty",
    "ignore_eos",
    "logit_bias",
    "max_thinking_tokens",
    "min_p",
    "min_tokens",
    "presence_penalty",
    "regex",
    "repetition_penalty",
    "rid",
    "seed",
    "skip_special_tokens",
    "speculative",
    "speculative_num_steps",
    "stop_regex",
    "stop_token_ids",
    "top_k",
)


@dataclass(frozen=True, slots=True)
class TranslatedRequest:
    """A chat request, and what its fields are called in the request that it was made from.

    Of several names that begin the path of a field the longest one counts.
    """

    body: dict[str, Any]
    names: Mapping[str, str]

    def restate(self, error: ApiError) -> ApiError:
        """The same error about the field that was sent."""
        match = _PATH.match(error.message)
        head = "" if match is None else match[0]
        message = self._renamed(head) + self._rest(error.message[len(head) :])
        param = None if error.param is None else self._renamed(error.param)
        return ApiError(error.status, message, param=param, code=error.code)

    def _renamed(self, path: str) -> str:
        known = [name for name in self.names if path == name or path.startswith((f"{name}.", f"{name}["))]
        name = max(known, key=len, default="")
        return self.names[name] + path[len(name) :] if name else path

    def _rest(self, text: str) -> str:
        # names of one word may be meant as words
        words = [re.escape(name) for name in self.names if name.isidentifier() and "_" in name]
        return re.sub(rf"\b(?:{'|'.join(words)})\b", lambda m: self.names[m[0]], text) if words else text


class Conversation:
    """Messages of a chat request, collected from pieces that belong to one message or are one each.

    Pieces of one text stand on lines of their own: templates put parts together without anything between them.
    ``names`` tells where each of them came from. ``id_field``: what a result calls the id of its call.
    """

    def __init__(self, id_field: str) -> None:
        self.messages: list[dict[str, Any]] = []
        self.names: dict[str, str] = {}
        self._id_field = id_field
        self._open_calls: set[str] = set()

    def say(self, path: str, role: str, parts: Sequence[str], *, join: bool) -> None:
        """Text of a user or of the system; with ``join`` it goes on with the message before, if that has its role."""
        if join and self.messages and self.messages[-1]["role"] == role:
            self.messages[-1]["content"] += "\n" + "\n".join(parts)
            return
        self._open_calls.clear()
        self._begin(path, {"role": role, "content": "\n".join(parts)})

    def answer(self, path: str, parts: Sequence[str]) -> None:
        """What the assistant said."""
        message = self._assistant(path)
        message["content"] = "\n".join([message["content"], *parts] if "content" in message else parts)

    def think(self, path: str, text: str) -> None:
        """What the assistant thought."""
        message = self._assistant(path)
        message["reasoning_content"] = message.get("reasoning_content", "") + text

    def call(self, path: str, call_id: Any, name: Any, arguments: Any) -> None:
        """A call that the assistant made."""
        if not isinstance(call_id, str) or not call_id:
            raise bad_field(f"{path}.{self._id_field}", f"must be a string that is not empty, got {call_id!r:.200}")
        calls = self._assistant(path).setdefault("tool_calls", [])
        self.names[f"messages[{len(self.messages) - 1}].tool_calls[{len(calls)}].function"] = path
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})
        self._open_calls.add(call_id)

    def result(self, path: str, id_field: str, call_id: Any, parts: Sequence[str]) -> None:
        """What one of the newest calls came to."""
        if not isinstance(call_id, str) or call_id not in self._open_calls:
            problem = f"must be the id of a call right before it, got {call_id!r:.200}"
            raise bad_field(f"{path}.{id_field}", problem)
        self._begin(path, {"role": "tool", "tool_call_id": call_id, "content": "\n".join(parts)})

    def _assistant(self, path: str) -> dict[str, Any]:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self._open_calls.clear()
            self._begin(path, {"role": "assistant"})
        return self.messages[-1]

    def _begin(self, path: str, message: dict[str, Any]) -> None:
        self.names[f"messages[{len(self.messages)}]"] = path
        self.messages.append(message)


def parse_text_parts(path: str, value: Any, kinds: Mapping[str, str]) -> list[str]:
    """Texts of a string, or of a list of parts; ``kinds``: type of a part -> its field with text."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise bad_field(path, f"must be a string or a list of parts, got {value!r:.200}")
    return [parse_text_part(f"{path}[{i}]", part, kinds) for i, part in enumerate(value)]


def parse_text_part(path: str, part: Any, kinds: Mapping[str, str]) -> str:
    """Text of one part; see ``parse_text_parts``."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise bad_field(path, f"must be an object with a type, got {part!r:.200}")
    if kind not in kinds:
        raise bad_field(f"{path}.type", f"{kind!r:.100} is not supported here: known are {', '.join(kinds)}")
    text = part.get(kinds[kind])
    if not isinstance(text, str):
        raise bad_field(f"{path}.{kinds[kind]}", f"must be a string, got {text!r:.200}")
    return text


class Reply(Protocol):
    """A reply as it grows: every method returns the events that a stream sends, and ``whole`` what they add up to."""

    def begin(self, out: GenerateOutput) -> list[dict[str, Any]]: ...

    def add(self, events: Sequence[Event], out: GenerateOutput) -> list[dict[str, Any]]: ...

    def end(self, out: GenerateOutput, reader: AnswerReader) -> list[dict[str, Any]]: ...

    def fail(self, error: ApiError) -> list[dict[str, Any]]: ...

    def whole(self) -> dict[str, Any]: ...


class TranslatedChat:
    """One request on its way to a reply: run it with ``whole`` or ``stream``, whichever it asks for."""

    def __init__(self, manager: TokenizerManager, request: TranslatedRequest, plan: ChatPlan, reply: Reply) -> None:
        self.is_stream = plan.options.stream
        self._manager = manager
        self._request = request
        self._plan = plan
        self._reply = reply

    async def whole(self) -> dict[str, Any]:
        async with contextlib.aclosing(self._run()) as steps:
            async for _ in steps:
                pass
        return self._reply.whole()

    async def stream(self) -> AsyncGenerator[dict[str, Any], None]:
        """Events of the reply. An error behind the first one is an event too."""
        started = False
        try:
            async with contextlib.aclosing(self._run()) as steps:
                async for events in steps:
                    for event in events:
                        started = True
                        yield event
        except Exception as error:
            if not started:
                raise
            for event in self._reply.fail(logged_api_error(error)):
                yield event

    async def _run(self) -> AsyncGenerator[list[dict[str, Any]], None]:
        reader = AnswerReader(self._plan.answer_format)
        is_first = True
        try:
            async with contextlib.aclosing(self._manager.generate_request(self._plan.request)) as outputs:
                async for out in outputs:
                    if is_first:
                        is_first = False
                        yield self._reply.begin(out)
                    yield self._reply.add(reader.read(out), out)
                    reason = out.finish_reason
                    if reason is not None and reason.type == "abort":
                        raise ApiError(_ABORTED, reason.message or "the request was aborted", code="aborted")
                    if reason is not None:
                        yield self._reply.end(out, reader)
        except ValueError as error:
            raise self._request.restate(in_openai_terms(error, self._request.body)) from error


async def plan_translated(openai: OpenAIServing, request: TranslatedRequest) -> ChatPlan:
    """Plan of a chat; errors are about the fields that were sent."""
    try:
        return await openai.plan_chat(request.body)
    except ApiError as error:
        raise request.restate(error) from error
