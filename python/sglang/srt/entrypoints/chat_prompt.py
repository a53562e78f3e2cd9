"""From a chat request to the text of its prompt, through the model's own chat template."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import TemplateError

from sglang.srt.entrypoints.errors import ApiError, bad_field

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from sglang.srt.entrypoints.openai_protocol import ChatRequest

# a template reports what it cannot render, or trips over it
_TEMPLATE_ERRORS = (TemplateError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "Probe.",
        "parameters": {
            "type": "object",
            "properties": {"probe_key": {"type": "string", "description": "Probe."}},
            "required": ["probe_key"],
        },
    },
}
_PROBE_CALL = {"id": "probe", "type": "function", "function": {"name": "probe_tool", "arguments": {"probe_key": "x"}}}
_PROBE_CONVERSATION = (
    {"role": "user", "content": "probe"},
    {"role": "assistant", "content": "", "tool_calls": [_PROBE_CALL]},
    {"role": "tool", "name": "probe_tool", "tool_call_id": "probe", "content": {"probe_result": "probe_text"}},
)


class ResultStyle(Enum):
    """How a template takes the results of tools."""

    OBJECT = auto()  # messages of role tool whose content may be an object
    FOLDED = auto()  # as ``tool_responses`` of the assistant's message with the calls
    TEXT = auto()  # messages of role tool whose content is text


class ChatTemplate:
    """A tokenizer's chat template, and what it can render: that is tried once, by rendering."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        # a request must not reach the renderer's own parameters, among them the template itself
        parameters = inspect.signature(tokenizer.apply_chat_template).parameters
        self._reserved = frozenset(parameters) | {"messages", "bos_token", "eos_token"}
        self._takes_tools = "probe_tool" in self._try([_PROBE_CONVERSATION[0]], tools=[_PROBE_TOOL])
        self._result_style = next((style for style in ResultStyle if self._shows_results(style)), None)

    def render(self, request: ChatRequest) -> str:
        """The prompt, up to where the answer begins; the template writes its own bos. Errors name the field."""
        for name in request.template_kwargs:
            if name in self._reserved:
                raise bad_field(f"chat_template_kwargs.{name}", "cannot be set: it is not a variable of the template")
        tools = request.tool_use.tools
        if tools and not self._takes_tools:
            raise bad_field("tools", "cannot be given: the chat template of this model has no place for them")
        messages: Sequence[Mapping[str, Any]] = request.messages
        if any(message["role"] == "tool" for message in messages):
            if self._result_style is None:
                raise bad_field(
                    "messages", "have results of tools, which the chat template of this model cannot render"
                )
            messages = _in_style(messages, self._result_style)
        try:
            return self._render(
                messages,
                tools=list(tools) or None,
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                **request.template_kwargs,
            )
        except _TEMPLATE_ERRORS as error:
            raise ApiError(400, f"messages cannot be rendered: {error!s:.300}", param="messages") from error

    def _render(self, messages: Sequence[Mapping[str, Any]], **values: Any) -> str:
        # templates test fields with [] as well as with .get, and must find what a message does not have to be undefined
        text: str = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, **values
        )
        return text

    def _try(self, messages: Sequence[Mapping[str, Any]], **values: Any) -> str:
        try:
            return self._render(messages, add_generation_prompt=True, **values)
        except _TEMPLATE_ERRORS:
            return ""

    def _shows_results(self, style: ResultStyle) -> bool:
        text = self._try(_in_style(_PROBE_CONVERSATION, style))
        if "probe_text" not in text:
            return False
        # an object that a template does not know as one comes out as Python writes it
        return style is ResultStyle.TEXT or "'probe_result'" not in text


def _in_style(messages: Sequence[Mapping[str, Any]], style: ResultStyle) -> list[Mapping[str, Any]]:
    """The same conversation with results of tools as a template takes them."""
    if style is ResultStyle.OBJECT:
        return list(messages)
    styled: list[Mapping[str, Any]] = []
    for message in messages:
        if message["role"] != "tool":
            styled.append(message)
        elif style is ResultStyle.TEXT:
            content = message["content"]
            text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
            styled.append({**message, "content": text})
        else:
            asked = styled[-1]
            response = {"name": message["name"], "response": message["content"]}
            styled[-1] = {**asked, "tool_responses": [*asked.get("tool_responses", ()), response]}
    return styled
