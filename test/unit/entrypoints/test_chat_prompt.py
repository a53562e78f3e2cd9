"""Prompts of chats: tools, calls and results through a model's own template, however that wants results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang.srt.entrypoints.chat_prompt import ChatTemplate
from sglang.srt.entrypoints.errors import ApiError
from sglang.srt.entrypoints.openai_protocol import parse_chat_request
from sglang.srt.utils.embedded import EMBEDDED_MODELS
from sglang.srt.utils.hf_transformers.tokenizer import load_tokenizer

Q = '<|"|>'
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALLED = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}},
            {"id": "b", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}},
        ],
    },
    {"role": "tool", "tool_call_id": "b", "content": '{"sky": "sunny"}'},
    {"role": "tool", "tool_call_id": "a", "content": "no idea"},
]
# results as a field of the message that asked
FOLDED = """{%- for m in messages if m.role != 'tool' -%}[{{ m.role }}]{{ m.content }}
{%- for r in m.tool_responses or [] -%}<{{ r.name }}:{% if r.response is mapping %}{% for k, v in r.response | items
%}{{ k }}={{ v }}{% endfor %}{% else %}{{ r.response }}{% endif %}>{%- endfor -%}{%- endfor -%}"""
# results as text only
TEXT = """{%- for m in messages -%}[{{ m.role }}]{{ m.content | trim }}{%- endfor -%}"""
NONE = """{%- for m in messages if m.role in ('user', 'assistant') -%}[{{ m.role }}]{{ m.content }}{%- endfor -%}"""


def render(template: str | None = None, **body: Any) -> str:
    tokenizer = load_tokenizer(Path(EMBEDDED_MODELS["tiny-gemma4"].target), trust_remote_code=False)
    if template is not None:
        tokenizer.chat_template = template
    return ChatTemplate(tokenizer).render(parse_chat_request({"messages": CALLED, **body}, {}))


def test_a_conversation_with_calls_is_one_turn_of_the_model() -> None:
    text = render(tools=[WEATHER])
    assert text.startswith("<bos><|turn>system\n<|tool>declaration:get_weather{") and text.count("<|tool>") == 1
    calls = "".join(f"<|tool_call>call:get_weather{{city:{Q}{city}{Q}}}<tool_call|>" for city in ("Rome", "Oslo"))
    results = (
        f"<|tool_response>response:get_weather{{sky:{Q}sunny{Q}}}<tool_response|>"
        f"<|tool_response>response:get_weather{{value:{Q}no idea{Q}}}<tool_response|>"
    )
    assert text.endswith(f"<|turn>model\n{calls}{results}")
    answered = render(messages=[*CALLED, {"role": "assistant", "content": "Fine."}, {"role": "user", "content": "Ok"}])
    assert answered.endswith(f"{results}Fine.<turn|>\n<|turn>user\nOk<turn|>\n<|turn>model\n")


def test_tools_that_are_not_to_be_used_are_not_shown() -> None:
    assert "<|tool>" not in render(tools=[WEATHER], tool_choice="none")


def test_thinking_reaches_the_template() -> None:
    assert "<|think|>" not in render() and "<|think|>" not in render(reasoning_effort="none")
    assert render(enable_thinking=True) == render(reasoning_effort="high")
    assert "<|turn>system\n<|think|>\n" in render(chat_template_kwargs={"enable_thinking": True})


def test_results_in_the_form_a_template_takes() -> None:
    assert render(FOLDED) == "[user]Weather?[assistant]<get_weather:sky=sunny><get_weather:no idea>"
    assert render(TEXT) == '[user]Weather?[assistant][tool]{"sky": "sunny"}[tool]no idea'


@pytest.mark.parametrize("body, param", [({}, "messages"), ({"messages": CALLED[:1], "tools": [WEATHER]}, "tools")])
def test_what_a_template_cannot_show_is_refused(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError, match="template of this model") as caught:
        render(NONE, **body)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert render(NONE, messages=CALLED[:1]) == "[user]Weather?"


def test_a_template_that_raises_is_the_request_s_fault() -> None:
    with pytest.raises(ApiError, match="messages cannot be rendered: no, thank you") as caught:
        render("{{ raise_exception('no, thank you') }}", messages=CALLED[:1])
    assert (caught.value.status, caught.value.param) == (400, "messages")
    with pytest.raises(ApiError, match="cannot be set: it is not a variable") as caught:
        render(chat_template_kwargs={"chat_template": "x"})
    assert caught.value.param == "chat_template_kwargs.chat_template"


def test_templates_run_in_a_sandbox() -> None:
    with pytest.raises(ApiError, match="cannot be rendered"):
        render("{{ messages.__class__.__base__.__subclasses__() }}", messages=CALLED[:1])
