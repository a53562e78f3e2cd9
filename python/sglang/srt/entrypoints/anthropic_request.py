"""Requests of Anthropic's Messages API, field by field, as chat requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.srt.entrypoints.errors import bad_field
from sglang.srt.entrypoints.native_protocol import check_fields
from sglang.srt.entrypoints.translated_chat import (
    EXTRA_FIELDS,
    Conversation,
    TranslatedRequest,
    parse_text_part,
    parse_text_parts,
)

_SAME = (*EXTRA_FIELDS, "max_tokens", "model", "stream", "temperature", "top_p")
# fields about the account of the caller or about caching; they cannot change an answer
_NO_EFFECT = ("cache_control", "diagnostics", "inference_geo", "metadata", "service_tier", "speed")
MESSAGE_FIELDS = (
    *_SAME,
    *_NO_EFFECT,
    "messages",
    "output_config",
    "stop_sequences",
    "system",
    "thinking",
    "tool_choice",
    "tools",
)
_LATER: Mapping[str, tuple[Any, ...]] = {"container": (), "context_management": (), "mcp_servers": ()}
_NAMES: Mapping[str, str] = {
    "max_thinking_tokens": "thinking.budget_tokens",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "stop": "stop_sequences",
}
_ROLES = ("user", "assistant", "system")
_TEXT: Mapping[str, str] = {"text": "text"}
_CHOICES: Mapping[str, str] = {"auto": "auto", "any": "required", "none": "none"}
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
_THINKING = ("enabled", "adaptive", "disabled")


def parse_message_request(body: Mapping[str, Any], *, counts_only: bool = False) -> TranslatedRequest:
    """The chat request that a request for a message stands for. ``ApiError`` names the field that is at fault.

    ``counts_only``: only its prompt is wanted, which needs no ``max_tokens``.
    """
    check_fields(body, MESSAGE_FIELDS, _LATER)
    if body.get("max_tokens") is None and not counts_only:
        raise bad_field("max_tokens", "is missing: say how many tokens the answer may have")
    conversation = _parse_conversation(body)
    chat = {name: body[name] for name in _SAME if name in body}
    chat |= {"messages": conversation.messages, "stop": _parse_stop(body.get("stop_sequences"))}
    if conversation.messages[-1]["role"] == "assistant":
        chat["continue_final_message"] = True
    thinking, output = _parse_thinking(body.get("thinking")), _parse_output_config(body.get("output_config"))
    twice = next((name for name in (*thinking, *output) if body.get(name) is not None), None)
    if twice is not None:
        raise bad_field(twice, "and what thinking or output_config say exclude each other: leave it out")
    chat |= thinking | output
    chat |= {"tools": _parse_tools(body.get("tools")), **_parse_tool_choice(body.get("tool_choice"))}
    names = {**_NAMES, **conversation.names}
    for i in range(len(chat["tools"] or ())):
        names |= {f"tools[{i}].function": f"tools[{i}]"}
        names |= {f"tools[{i}].function.parameters": f"tools[{i}].input_schema"}
    return TranslatedRequest(chat, names)


def _parse_conversation(body: Mapping[str, Any]) -> Conversation:
    conversation = Conversation("id")
    if body.get("system") is not None:
        parts = parse_text_parts("system", body["system"], _TEXT)
        if any(parts):
            conversation.say("system", "system", parts, join=False)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad_field("messages", f"must be a list of messages that is not empty, got {messages!r:.200}")
    for i, message in enumerate(messages):
        path = f"messages[{i}]"
        if not isinstance(message, dict):
            raise bad_field(path, f"must be an object, got {message!r:.200}")
        role, content = message.get("role"), message.get("content")
        if role not in _ROLES:
            raise bad_field(f"{path}.role", f"must be one of {', '.join(_ROLES)}, got {role!r:.200}")
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        elif not isinstance(content, list) or not content:
            raise bad_field(f"{path}.content", f"must be a string or a list of blocks, got {content!r:.200}")
        for j, block in enumerate(content):
            _add_block(conversation, f"{path}.content[{j}]", role, block)
    return conversation


def _add_block(conversation: Conversation, path: str, role: str, block: Any) -> None:
    kind = block.get("type") if isinstance(block, dict) else None
    if role == "user" and kind == "tool_result":
        _add_result(conversation, path, block)
    elif role == "assistant" and kind == "tool_use":
        if not isinstance(block.get("input"), dict):
            raise bad_field(f"{path}.input", f"must be an object, got {block.get('input')!r:.200}")
        conversation.call(path, block.get("id"), block.get("name"), block["input"])
    elif role == "assistant" and kind == "thinking":
        conversation.think(path, parse_text_part(path, block, {"thinking": "thinking"}))
    elif role == "assistant" and kind == "redacted_thinking":
        pass  # a thought of another server, in a form that only that one can read
    elif role == "assistant":
        conversation.answer(path, [parse_text_part(path, block, _TEXT)])
    else:
        conversation.say(path, role, [parse_text_part(path, block, _TEXT)], join=True)


def _add_result(conversation: Conversation, path: str, block: Mapping[str, Any]) -> None:
    is_error, content = block.get("is_error"), block.get("content")
    if is_error is not None and not isinstance(is_error, bool):
        raise bad_field(f"{path}.is_error", f"must be true or false, got {is_error!r:.200}")
    parts = [] if content is None else parse_text_parts(f"{path}.content", content, _TEXT)
    if is_error:
        parts = ["Error:", *parts]
    conversation.result(path, "tool_use_id", block.get("tool_use_id"), parts)


def _parse_stop(value: Any) -> Any:
    if value is not None and not isinstance(value, list):
        raise bad_field("stop_sequences", f"must be a list of strings, got {value!r:.200}")
    return value


def _parse_thinking(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in _THINKING:
        raise bad_field("thinking", f"must be an object with a type of {', '.join(_THINKING)}, got {value!r:.200}")
    if value.get("display") not in (None, "summarized"):
        problem = f"must be summarized, got {value['display']!r:.200}: thoughts are given as they are"
        raise bad_field("thinking.display", problem)
    if kind != "enabled":
        return {"enable_thinking": kind == "adaptive"}
    budget = value.get("budget_tokens")
    if not isinstance(budget, int) or isinstance(budget, bool) or budget < 1:
        raise bad_field("thinking.budget_tokens", f"must be a whole number at least 1, got {budget!r:.200}")
    return {"enable_thinking": True, "max_thinking_tokens": budget}


def _parse_output_config(value: Any) -> dict[str, Any]:
    """``effort`` is a word for templates that know it; how much a model thinks is said by ``thinking``."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise bad_field("output_config", f"must be an object, got {value!r:.200}")
    for name in value:
        if name not in ("effort", "format"):
            raise bad_field(f"output_config.{name!s:.100}", "is not a known field: known fields are effort and format")
    chat: dict[str, Any] = {}
    effort, form = value.get("effort"), value.get("format")
    if effort is not None:
        if effort not in _EFFORTS:
            allowed = ", ".join(_EFFORTS)
            raise bad_field("output_config.effort", f"must be one of {allowed}, got {effort!r:.200}")
        chat["chat_template_kwargs"] = {"reasoning_effort": effort}
    if form is not None:
        if not isinstance(form, dict) or form.get("type") != "json_schema":
            shape = '{"type": "json_schema", "schema": {...}}'
            raise bad_field("output_config.format", f"must be like {shape}, got {form!r:.200}")
        chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}
    return chat


def _parse_tools(value: Any) -> list[dict[str, Any]] | None:
    if value is None:
        return None
    if not isinstance(value, list):
        raise bad_field("tools", f"must be a list of tools, got {value!r:.200}")
    tools = []
    for i, tool in enumerate(value):
        if not isinstance(tool, dict):
            raise bad_field(f"tools[{i}]", f"must be an object, got {tool!r:.200}")
        if tool.get("type") not in (None, "custom"):
            problem = f"must be custom, got {tool['type']!r:.200}: the server itself has no tools"
            raise bad_field(f"tools[{i}].type", problem)
        if not isinstance(tool.get("input_schema"), dict):
            problem = f"must be a JSON schema, got {tool.get('input_schema')!r:.200}"
            raise bad_field(f"tools[{i}].input_schema", problem)
        function = {"name": tool.get("name"), "description": tool.get("description")}
        tools.append({"type": "function", "function": function | {"parameters": tool["input_schema"]}})
    return tools


def _parse_tool_choice(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("auto", "any", "tool", "none"):
        form = '{"type": "auto"}, any, none, or {"type": "tool", "name": "..."}'
        raise bad_field("tool_choice", f"must be like {form}, got {value!r:.200}")
    single = value.get("disable_parallel_tool_use")
    if single is not None and not isinstance(single, bool):
        raise bad_field("tool_choice.disable_parallel_tool_use", f"must be true or false, got {single!r:.200}")
    if kind != "tool":
        return {"tool_choice": _CHOICES[kind], "parallel_tool_calls": not single}
    if not isinstance(value.get("name"), str):
        raise bad_field("tool_choice.name", f"must be the name of a tool, got {value.get('name')!r:.200}")
    choice = {"type": "function", "function": {"name": value["name"]}}
    return {"tool_choice": choice, "parallel_tool_calls": not single}
