"""Messages and tools of a chat request: checked field by field, in the form that chat templates take."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.entrypoints.errors import bad_field

_ROLES = ("system", "developer", "user", "assistant", "tool")
_MEDIA = ("image", "audio", "video", "file")
_MAX_TOOLS = 1024
# what no notation of calls can mistake for the end of a name
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_TOOL_CHOICES = ("auto", "none", "required")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools of a request. ``required``: at least one call must be made; ``name``: and it calls this tool."""

    tools: tuple[dict[str, Any], ...] = ()
    required: bool = False
    name: str | None = None
    parallel: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(tool["function"]["name"] for tool in self.tools)


def parse_messages(value: Any) -> tuple[dict[str, Any], ...]:
    """The conversation. Arguments of calls and results of tools become objects; results get their tools' names."""
    if not isinstance(value, list) or not value:
        raise bad_field("messages", f"must be a list of messages that is not empty, got {value!r:.200}")
    messages: list[dict[str, Any]] = []
    # calls of the assistant's message before, id -> name: what a result may answer
    open_calls: dict[str, str] = {}
    for i, message in enumerate(value):
        parsed = _parse_message(f"messages[{i}]", message, open_calls)
        if parsed["role"] != "tool":
            open_calls = {call["id"]: call["function"]["name"] for call in parsed.get("tool_calls", ())}
        messages.append(parsed)
    return tuple(messages)


def parse_tool_use(body: Mapping[str, Any]) -> ToolUse:
    """``tools``, ``tool_choice`` and ``parallel_tool_calls``. With ``tool_choice`` none there are no tools."""
    tools = _parse_tools(body.get("tools"))
    parallel = body.get("parallel_tool_calls")
    if parallel is not None and not isinstance(parallel, bool):
        raise bad_field("parallel_tool_calls", f"must be true or false, got {parallel!r:.200}")
    choice = body.get("tool_choice")
    name = None if choice is None or isinstance(choice, str) else _parse_named(choice)
    if isinstance(choice, str) and choice not in _TOOL_CHOICES:
        raise bad_field("tool_choice", f"must be {', '.join(_TOOL_CHOICES)} or name a function, got {choice!r:.200}")
    use = ToolUse(tools, required=choice == "required" or name is not None, name=name, parallel=parallel is not False)
    if use.required and not tools:
        raise bad_field("tool_choice", f"{choice!r:.200} needs tools, and there are none")
    if name is not None and name not in use.names:
        raise bad_field("tool_choice", f"names the function {name!r:.200}, which is not among the tools")
    return ToolUse() if choice == "none" else use


def _parse_tools(value: Any) -> tuple[dict[str, Any], ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > _MAX_TOOLS:
        raise bad_field("tools", f"must be a list of at most {_MAX_TOOLS} tools, got {value!r:.200}")
    tools = tuple(_parse_tool(f"tools[{i}]", tool) for i, tool in enumerate(value))
    seen: set[str] = set()
    for i, tool in enumerate(tools):
        name = tool["function"]["name"]
        if name in seen:
            raise bad_field(f"tools[{i}].function.name", f"{name!r} is the name of another tool too: rename one")
        seen.add(name)
    return tools


def _parse_tool(path: str, tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise bad_field(path, f"must be an object, got {tool!r:.200}")
    if tool.get("type", "function") != "function":
        raise bad_field(f"{path}.type", f"must be function, got {tool['type']!r:.200}")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise bad_field(f"{path}.function", f"must be an object, got {function!r:.200}")
    _check_name(f"{path}.function.name", function.get("name"))
    description, parameters = function.get("description"), function.get("parameters")
    if description is not None and not isinstance(description, str):
        raise bad_field(f"{path}.function.description", f"must be a string, got {description!r:.200}")
    if parameters is not None and not isinstance(parameters, dict):
        raise bad_field(f"{path}.function.parameters", f"must be a JSON schema, got {parameters!r:.200}")
    # templates read all of these; a tool without parameters takes an object without properties
    schema = {"type": "object", "properties": {}, "required": []} | (parameters or {})
    declared = function | {"description": description or "", "parameters": schema}
    return {"type": "function", "function": declared}


def _parse_named(choice: Any) -> str:
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        form = '{"type": "function", "function": {"name": "..."}}'
        raise bad_field("tool_choice", f"must be {', '.join(_TOOL_CHOICES)} or like {form}, got {choice!r:.200}")
    name: str = function["name"]
    return name


def _check_name(path: str, name: Any) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise bad_field(path, f"must be 1 to 128 letters, digits, dots, hyphens and underscores, got {name!r:.200}")


def _parse_message(path: str, message: Any, open_calls: Mapping[str, str]) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise bad_field(path, f"must be an object, got {message!r:.200}")
    role = message.get("role")
    if role == "function":
        raise bad_field(f"{path}.role", "function is not supported: give results as role tool")
    if role not in _ROLES:
        raise bad_field(f"{path}.role", f"must be one of {', '.join(_ROLES)}, got {role!r:.200}")
    for field in ("function_call", "audio"):
        if message.get(field):
            raise bad_field(f"{path}.{field}", "is not supported: leave it out")
    name = message.get("name")
    if name is not None and not isinstance(name, str):
        raise bad_field(f"{path}.name", f"must be a string, got {name!r:.200}")
    if role == "tool":
        return _parse_result(path, message, open_calls)
    if message.get("tool_calls") and role != "assistant":
        raise bad_field(f"{path}.tool_calls", f"is only allowed in messages of the assistant, not of {role}")
    parsed: dict[str, Any] = {"role": role} if name is None else {"role": role, "name": name}
    if role == "assistant":
        parsed |= _parse_assistant_extras(path, message)
    content = message.get("content")
    is_optional = content is None and parsed.keys() & {"tool_calls", "reasoning_content"}
    return parsed | {"content": "" if is_optional else _parse_content(f"{path}.content", content)}


def _parse_assistant_extras(path: str, message: Mapping[str, Any]) -> dict[str, Any]:
    extras: dict[str, Any] = {}
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise bad_field(f"{path}.tool_calls", f"must be a list, got {calls!r:.200}")
    if calls:
        extras["tool_calls"] = [_parse_call(f"{path}.tool_calls[{i}]", call) for i, call in enumerate(calls)]
    for field in ("reasoning_content", "reasoning"):
        reasoning = message.get(field)
        if reasoning is not None and not isinstance(reasoning, str):
            raise bad_field(f"{path}.{field}", f"must be a string, got {reasoning!r:.200}")
        if reasoning:
            # templates know it by either name
            extras |= {"reasoning_content": reasoning, "reasoning": reasoning}
    return extras


def _parse_call(path: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        form = '{"id": "...", "type": "function", "function": {"name": "...", "arguments": "{...}"}}'
        raise bad_field(path, f"must be like {form}, got {call!r:.200}")
    if not isinstance(call.get("id"), str) or not call["id"]:
        raise bad_field(f"{path}.id", f"must be a string that is not empty, got {call.get('id')!r:.200}")
    if call.get("type", "function") != "function":
        raise bad_field(f"{path}.type", f"must be function, got {call['type']!r:.200}")
    _check_name(f"{path}.function.name", function.get("name"))
    arguments = _parse_arguments(f"{path}.function.arguments", function.get("arguments"))
    return {
        "id": call["id"],
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _parse_arguments(path: str, value: Any) -> dict[str, Any]:
    if value is None or value == "":
        return {}
    arguments = _object_in(value) if isinstance(value, str) else value
    if not isinstance(arguments, dict):
        raise bad_field(path, f"must be the text of a JSON object, got {value!r:.200}")
    return arguments


def _parse_result(path: str, message: Mapping[str, Any], open_calls: Mapping[str, str]) -> dict[str, Any]:
    if not open_calls:
        raise bad_field(f"{path}.role", "tool is only allowed behind a message of the assistant with tool_calls")
    call_id = message.get("tool_call_id")
    if not isinstance(call_id, str) or call_id not in open_calls:
        ids = ", ".join(map(repr, open_calls))
        raise bad_field(
            f"{path}.tool_call_id", f"must be the id of a call before it ({ids:.200}), got {call_id!r:.200}"
        )
    content = message.get("content")
    text = _joined(_parse_content(f"{path}.content", content))
    found = _object_in(text)
    result = found if isinstance(found, dict) else text
    return {"role": "tool", "name": open_calls[call_id], "tool_call_id": call_id, "content": result}


def _object_in(text: str) -> Any:
    """The value of a JSON text; None when it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _joined(content: str | Sequence[Mapping[str, str]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _parse_content(path: str, content: Any) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise bad_field(path, f"must be a string or a list of content parts, got {content!r:.200}")
    parts = [_parse_part(f"{path}[{i}]", part) for i, part in enumerate(content)]
    # a template gets the plainest form that says the same
    return parts[0]["text"] if len(parts) == 1 else parts


def _parse_part(path: str, part: Any) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and any(word in kind for word in _MEDIA):
        raise bad_field(f"{path}.type", f"{kind!r:.100} is not supported yet: this server takes text only")
    if kind != "text" or not isinstance(part.get("text"), str):
        raise bad_field(path, f'must be like {{"type": "text", "text": "..."}}, got {part!r:.200}')
    return {"type": "text", "text": part["text"]}
