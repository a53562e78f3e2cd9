"""Requests of OpenAI's Responses API, field by field, as chat requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.srt.entrypoints.errors import bad_field
from sglang.srt.entrypoints.native_protocol import check_fields, selects_nothing
from sglang.srt.entrypoints.translated_chat import EXTRA_FIELDS, Conversation, TranslatedRequest, parse_text_parts

_SAME = (
    *EXTRA_FIELDS,
    "metadata",
    "model",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "stop",
    "store",
    "stream",
    "stream_options",
    "temperature",
    "top_p",
    "user",
)
RESPONSE_FIELDS = (
    *_SAME,
    "include",
    "input",
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "reasoning",
    "text",
    "tool_choice",
    "tools",
    "top_logprobs",
    "truncation",
)
_REFUSED: Mapping[str, str] = {
    "background": "is not supported: wait for the reply or stream it",
    "context_management": "is not supported: send what the model should read as input",
    "conversation": "is not supported, since no conversation is kept: send all of it as input",
    "moderation": "is not supported: leave it out",
    "previous_response_id": "is not supported, since no response is kept: send the whole conversation as input",
    "prompt": "is not supported, since no prompts are kept: send its text as input",
}
# not of OpenAI, but routers send it
_LATER: Mapping[str, tuple[Any, ...]] = {"priority": (0,)}
_NAMES: Mapping[str, str] = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
}
_INPUT_PARTS: Mapping[str, str] = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_ROLES = ("user", "assistant", "system", "developer")
_LOGPROBS = "message.output_text.logprobs"
# thoughts are always given in plain text, so there is nothing to encrypt
_INCLUDES = (_LOGPROBS, "reasoning.encrypted_content")
_SUMMARIES = ("auto", "concise", "detailed")


def parse_response_request(body: Mapping[str, Any]) -> TranslatedRequest:
    """The chat request that a request for a response stands for. ``ApiError`` names the field that is at fault."""
    for name, problem in _REFUSED.items():
        if not selects_nothing(body.get(name)):
            raise bad_field(name, problem)
    check_fields({name: value for name, value in body.items() if name not in _REFUSED}, RESPONSE_FIELDS, _LATER)
    conversation = _parse_input(body)
    chat = {name: body[name] for name in _SAME if name in body}
    chat |= {"messages": conversation.messages, "max_tokens": body.get("max_output_tokens")}
    chat |= _parse_reasoning(body.get("reasoning")) | _parse_text(body.get("text")) | _parse_logprobs(body)
    chat |= {"tools": _parse_tools(body.get("tools")), "tool_choice": _parse_tool_choice(body.get("tool_choice"))}
    if body.get("truncation") not in (None, "disabled"):
        raise bad_field("truncation", f"must be disabled, got {body['truncation']!r:.200}: nothing of an input is cut")
    names = {**_NAMES, **conversation.names}
    for i in range(len(chat["tools"] or ())):
        names[f"tools[{i}].function"] = f"tools[{i}]"
    return TranslatedRequest(chat, names)


def _parse_input(body: Mapping[str, Any]) -> Conversation:
    conversation = Conversation("call_id")
    instructions, given = body.get("instructions"), body.get("input")
    if instructions is not None and not isinstance(instructions, str):
        raise bad_field("instructions", f"must be a string, got {instructions!r:.200}")
    if instructions:
        conversation.say("instructions", "system", [instructions], join=False)
    if isinstance(given, str):
        conversation.say("input", "user", [given], join=False)
        return conversation
    if not isinstance(given, list) or not given:
        raise bad_field("input", f"must be a string or a list of items that is not empty, got {given!r:.200}")
    for i, item in enumerate(given):
        _add_item(conversation, f"input[{i}]", item)
    return conversation


def _add_item(conversation: Conversation, path: str, item: Any) -> None:
    if not isinstance(item, dict):
        raise bad_field(path, f"must be an object, got {item!r:.200}")
    kind = item.get("type", "message" if "role" in item else None)
    if kind == "message":
        _add_message(conversation, path, item)
    elif kind == "function_call":
        arguments = item.get("arguments")
        if not isinstance(arguments, str):
            raise bad_field(f"{path}.arguments", f"must be the text of a JSON object, got {arguments!r:.200}")
        conversation.call(path, item.get("call_id"), item.get("name"), arguments)
    elif kind == "function_call_output":
        parts = parse_text_parts(f"{path}.output", item.get("output"), _INPUT_PARTS)
        conversation.result(path, "call_id", item.get("call_id"), parts)
    elif kind == "reasoning":
        thought = _parse_thought(path, item)
        if thought:
            conversation.think(path, thought)
    elif kind == "item_reference":
        raise bad_field(f"{path}.type", "item_reference is not supported, since no item is kept: send the item itself")
    else:
        known = "message, function_call, function_call_output, reasoning"
        raise bad_field(f"{path}.type", f"must be one of {known}, got {kind!r:.200}")


def _add_message(conversation: Conversation, path: str, item: Mapping[str, Any]) -> None:
    role = item.get("role")
    if role not in _ROLES:
        raise bad_field(f"{path}.role", f"must be one of {', '.join(_ROLES)}, got {role!r:.200}")
    parts = parse_text_parts(f"{path}.content", item.get("content"), _INPUT_PARTS)
    if role == "assistant":
        conversation.answer(path, parts)
    elif not parts:
        raise bad_field(f"{path}.content", "must have at least one part")
    elif role == "user":
        conversation.say(path, role, parts, join=False)
    else:
        # instructions, and what else stands at the beginning, are one message
        conversation.say(path, "system", parts, join=True)


def _parse_thought(path: str, item: Mapping[str, Any]) -> str:
    """A thought, or where an earlier one only has a summary, that."""
    content = item.get("content")
    if content:
        return "".join(parse_text_parts(f"{path}.content", content, {"reasoning_text": "text", "text": "text"}))
    summary = item.get("summary")
    return "".join(parse_text_parts(f"{path}.summary", summary, {"summary_text": "text"})) if summary else ""


def _parse_tools(value: Any) -> list[dict[str, Any]] | None:
    if value is None:
        return None
    if not isinstance(value, list):
        raise bad_field("tools", f"must be a list of functions, got {value!r:.200}")
    tools = []
    for i, tool in enumerate(value):
        if not isinstance(tool, dict):
            raise bad_field(f"tools[{i}]", f"must be an object, got {tool!r:.200}")
        if tool.get("type") != "function":
            problem = f"must be function, got {tool.get('type')!r:.200}: the server itself has no tools"
            raise bad_field(f"tools[{i}].type", problem)
        function = {name: part for name, part in tool.items() if name != "type"}
        tools.append({"type": "function", "function": function})
    return tools


def _parse_tool_choice(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    name = value.get("name") if isinstance(value, dict) and value.get("type") == "function" else None
    if not isinstance(name, str):
        form = 'auto, none, required or like {"type": "function", "name": "..."}'
        raise bad_field("tool_choice", f"must be {form}, got {value!r:.200}")
    return {"type": "function", "function": {"name": name}}


def _parse_reasoning(value: Any) -> dict[str, Any]:
    fields = _parse_object("reasoning", value, ("effort", "summary", "generate_summary"))
    for name in ("summary", "generate_summary"):
        if fields.get(name) not in (None, *_SUMMARIES):
            allowed = ", ".join(_SUMMARIES)
            raise bad_field(f"reasoning.{name}", f"must be one of {allowed}, got {fields[name]!r:.200}")
    return {"reasoning_effort": fields.get("effort")}


def _parse_text(value: Any) -> dict[str, Any]:
    fields = _parse_object("text", value, ("format", "verbosity"))
    if fields.get("verbosity") not in (None, "medium"):
        problem = f"must be medium, got {fields['verbosity']!r:.200}: the model knows no other"
        raise bad_field("text.verbosity", problem)
    form = fields.get("format")
    if isinstance(form, dict) and form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": {key: part for key, part in form.items() if key != "type"}}
    return {"response_format": form}


def _parse_object(path: str, value: Any, known: tuple[str, ...]) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise bad_field(path, f"must be an object, got {value!r:.200}")
    for name in value:
        if name not in known:
            raise bad_field(f"{path}.{name!s:.100}", f"is not a known field: known fields are {', '.join(known)}")
    return value


def _parse_logprobs(body: Mapping[str, Any]) -> dict[str, Any]:
    include, count = body.get("include"), body.get("top_logprobs")
    if include is None:
        include = []
    if not isinstance(include, list):
        raise bad_field("include", f"must be a list, got {include!r:.200}")
    for i, name in enumerate(include):
        if name not in _INCLUDES:
            raise bad_field(f"include[{i}]", f"must be one of {', '.join(_INCLUDES)}, got {name!r:.200}")
    if _LOGPROBS in include:
        return {"logprobs": True, "top_logprobs": count}
    if not selects_nothing(count) and count != 0:
        raise bad_field("top_logprobs", f'needs "{_LOGPROBS}" in include')
    return {}
