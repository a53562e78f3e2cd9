"""How a chat completion looks: answers taken apart into reasoning, content and tool calls, whole or as they grow."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

from sglang.srt.entrypoints.openai_logprobs import chat_logprobs
from sglang.srt.entrypoints.openai_replies import end_fields, hidden_fields
from sglang.srt.entrypoints.parsers.base import (
    ContentText,
    Event,
    OutputFormat,
    OutputParser,
    ReasoningText,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
    join_events,
    merge_events,
)
from sglang.srt.managers.detokenizer_manager import TokenPieces
from sglang.srt.managers.generate_output import GenerateOutput
from sglang.srt.managers.io_struct import FinishReason
from sglang.srt.sampling.logprobs import TokenLogprobs
from sglang.srt.sampling.thought_budget import ThoughtState, ThoughtTokens


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How the answers to one request are read. ``format`` None: they are content as they stand.

    ``thought_begun``: the beginning of a thought that the prompt left open, and ``num_thought_begun`` the tokens since
    its mark, None if there is none. ``thought_tokens``: marks by which the tokens of thoughts are counted.
    """

    format: OutputFormat | None = None
    reasoning: bool = False
    tools: bool = False
    thought_begun: str = ""
    separate_reasoning: bool = True
    stream_reasoning: bool = True
    thought_tokens: ThoughtTokens | None = None
    num_thought_begun: int | None = None


class ChatShape:
    """See ``openai_serving``: one for each request, since answers are read piece by piece."""

    id_prefix, whole, piece = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, answer_format: AnswerFormat, pieces: TokenPieces | None = None) -> None:
        """``pieces``: texts of tokens, needed where log-probabilities are shown."""
        self._format = answer_format
        self._pieces = pieces
        # log-probabilities of tokens whose text is still held back
        self._waiting: dict[int, list[TokenLogprobs]] = {}
        self._answers: dict[int, AnswerReader] = {}

    @property
    def reasoning_tokens(self) -> int:
        return sum(answer.reasoning_tokens for answer in self._answers.values())

    def choice(self, out: GenerateOutput) -> dict[str, Any]:
        answer = self._answer(out.index)
        parsed = join_events(answer.read(out))
        calls = [_call(i, name=call.name, arguments=call.arguments) for i, call in enumerate(parsed.calls)]
        message = {
            "role": "assistant",
            "content": None if calls and not parsed.content else parsed.content,
            "reasoning_content": parsed.reasoning or None,
            "tool_calls": [{key: value for key, value in call.items() if key != "index"} for call in calls] or None,
            "refusal": None,
        }
        end = {**answer.end_fields(out.finish_reason), **hidden_fields(out)}
        return {"index": out.index, "message": message, "logprobs": self._logprobs(out), **end}

    def pieces(self, out: GenerateOutput, is_first: bool) -> list[dict[str, Any]]:
        answer = self._answer(out.index)
        deltas = [_delta(event) for event in answer.read(out) if not isinstance(event, ToolCallEnd)]
        if is_first:
            deltas.insert(0, {"role": "assistant", "content": "", "reasoning_content": None})
        ends = [end_fields(None)] * len(deltas)
        if out.finish_reason is not None:
            deltas.append({})
            ends.append({**answer.end_fields(out.finish_reason), **hidden_fields(out)})
        choices = [_choice(out.index, delta, end) for delta, end in zip(deltas, ends, strict=True)]
        if len(choices) > is_first:
            # all tokens up to here come with the first piece that shows some of their text
            choices[is_first]["logprobs"] = self._logprobs(out)
        else:
            self._wait(out)
        return choices

    def _wait(self, out: GenerateOutput) -> None:
        if out.logprobs is not None:
            self._waiting.setdefault(out.index, []).extend(out.logprobs.output)

    def _logprobs(self, out: GenerateOutput) -> dict[str, Any] | None:
        """Of all tokens up to here that were not shown yet; None where nobody asked."""
        if out.logprobs is None:
            return None
        assert self._pieces is not None, "log-probabilities need the texts of tokens"
        self._wait(out)
        return chat_logprobs(self._waiting.pop(out.index), self._pieces)

    def _answer(self, index: int) -> AnswerReader:
        if index not in self._answers:
            self._answers[index] = AnswerReader(self._format)
        return self._answers[index]


class AnswerReader:
    """One answer as it is read: from outputs of the engine to typed pieces, whatever form they are shown in."""

    def __init__(self, answer_format: AnswerFormat) -> None:
        self._format = answer_format
        self._parser: OutputParser | None = None
        self._waiting: list[Event] = []
        self._is_last_call_complete = False
        self._thought = ThoughtState(0, answer_format.num_thought_begun)
        if answer_format.format is not None:
            self._parser = answer_format.format.make_parser(
                reasoning=answer_format.reasoning, tools=answer_format.tools
            )
            self._parser.feed(answer_format.thought_begun)

    @property
    def reasoning_tokens(self) -> int:
        return self._thought.used

    @property
    def ends_with_call(self) -> bool:
        """Whether the newest call is complete, as it is when the model ends its answer to have tools run."""
        return self._is_last_call_complete

    def read(self, out: GenerateOutput) -> list[Event]:
        """What is new: thoughts wait for their end if they are not to be streamed."""
        if self._format.thought_tokens is not None:
            for token_id in out.output_ids:
                self._thought = self._thought.after(token_id, self._format.thought_tokens)
        is_last = out.finish_reason is not None
        events = self._parse(out.text, is_last=is_last)
        for event in events:
            if isinstance(event, (ToolCallBegin, ToolCallEnd)):
                self._is_last_call_complete = isinstance(event, ToolCallEnd)
        if not self._format.separate_reasoning:
            events = [ContentText(event.text) if isinstance(event, ReasoningText) else event for event in events]
        elif not self._format.stream_reasoning and not is_last and events and isinstance(events[-1], ReasoningText):
            begun = events.pop()
            if not events:
                self._waiting.append(begun)
                return []
            events, self._waiting = [*self._waiting, *events], [begun]
            return merge_events(events)
        events, self._waiting = [*self._waiting, *events], []
        return merge_events(events)

    def end_fields(self, reason: FinishReason | None) -> dict[str, Any]:
        fields = end_fields(reason)
        if reason is not None and reason.type == "stop" and self.ends_with_call:
            fields["finish_reason"] = "tool_calls"
        return fields

    def _parse(self, text: str, *, is_last: bool) -> list[Event]:
        if self._parser is None:
            return [ContentText(text)] if text else []
        events = self._parser.feed(text)
        return merge_events([*events, *self._parser.finish()]) if is_last else events


def _call(index: int, *, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"index": index, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _delta(event: Event) -> dict[str, Any]:
    if isinstance(event, ReasoningText):
        return {"content": None, "reasoning_content": event.text}
    if isinstance(event, ContentText):
        return {"content": event.text, "reasoning_content": None}
    if isinstance(event, ToolCallBegin):
        call = _call(event.index, name=event.name, arguments="")
    else:
        assert isinstance(event, ToolCallArguments), event
        call = {"index": event.index, "function": {"arguments": event.text}}
    return {"content": None, "reasoning_content": None, "tool_calls": [call]}


def _choice(index: int, delta: dict[str, Any], end: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, **end}
