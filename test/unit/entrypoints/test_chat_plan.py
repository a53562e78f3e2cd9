"""What a chat asks of the engine: which markers it shows, what it is held to, and what a server must have for that."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.entrypoints.chat_plan import ChatPlan, ChatPlanner
from sglang.srt.entrypoints.errors import ApiError
from sglang.srt.entrypoints.openai_protocol import parse_chat_request
from sglang.srt.managers.channel import make_memory_channel
from sglang.srt.managers.io_struct import SchedulerReady
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.server_args import ServerArgs
from sglang.srt.server_args_resolution import resolve_server_args
from sglang.srt.utils.embedded import EMBEDDED_MODELS
from sglang.srt.utils.hf_transformers.tokenizer import load_tokenizer

THOUGHT = ("<|channel>", "<channel|>")
CALL = ("<|tool_call>", "<tool_call|>", '<|"|>')
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
LIMITS = {"context_len": 8192, "max_req_input_len": 8000, "max_total_num_tokens": 9000, "vocab_size": 4096}


def plan(args: dict[str, Any] | None = None, template: str | None = None, **body: Any) -> ChatPlan:
    tokenizer = load_tokenizer(Path(EMBEDDED_MODELS["tiny-gemma4"].target), trust_remote_code=False)
    if template is not None:
        tokenizer.chat_template = template

    async def make() -> ChatPlan:
        _, channel = make_memory_channel(asyncio.get_running_loop())
        manager = TokenizerManager(channel, tokenizer, SchedulerReady(LIMITS))
        server_args = resolve_server_args(
            ServerArgs(model_path="tiny-gemma4", device="cpu", **({"grammar_backend": "none"} | (args or {})))
        )
        request = parse_chat_request({"messages": [{"role": "user", "content": "a"}], **body}, {})
        return await ChatPlanner(server_args, manager).plan(request)

    return asyncio.run(make())


@pytest.mark.parametrize(
    "args, body, shown",
    [
        ({}, {}, THOUGHT),
        ({}, {"tools": [TOOL]}, THOUGHT + CALL),
        ({}, {"tools": [TOOL], "tool_choice": "none"}, THOUGHT),
        ({"reasoning_parser": "none"}, {"tools": [TOOL]}, CALL),
        ({"tool_call_parser": "none"}, {"tools": [TOOL]}, THOUGHT),
        ({"reasoning_parser": "none"}, {}, None),
        ({}, {"skip_special_tokens": False}, None),
    ],
)
def test_only_markers_that_are_parsed_are_shown(args: Any, body: Any, shown: Any) -> None:
    made = plan(args, **body)
    assert made.request.shown_tokens == shown
    assert made.sampling_params.skip_special_tokens is (shown is None and "skip_special_tokens" not in body)
    assert made.answer_format.reasoning is (args.get("reasoning_parser") != "none")
    assert (made.answer_format.format is None) is (args == {"reasoning_parser": "none"} and not body)


def test_one_call_only_ends_at_its_end() -> None:
    assert plan(tools=[TOOL]).sampling_params.stop_token_ids == ()
    made = plan(tools=[TOOL], parallel_tool_calls=False, stop_token_ids=[77])
    assert made.sampling_params.stop_token_ids == (77, 13)
    assert plan(parallel_tool_calls=False).sampling_params.stop_token_ids == ()


def test_a_call_that_is_asked_for_needs_a_grammar_and_a_parser() -> None:
    body = {"tools": [TOOL], "tool_choice": "required"}
    with pytest.raises(ApiError, match="tool_choice that asks for a call needs a server with a --grammar-backend"):
        plan(**body)
    with pytest.raises(ApiError, match="tool_choice that asks for a call needs a server with a --tool-call-parser"):
        plan({"tool_call_parser": "none"}, **body)
    assert plan(tools=[TOOL]).sampling_params.ebnf is None


def test_a_named_tool_is_the_only_one_in_the_grammar() -> None:
    pytest.importorskip("xgrammar")
    other = {"type": "function", "function": {"name": "other_one"}}
    both = plan({"grammar_backend": "xgrammar"}, tools=[TOOL, other], tool_choice="required").sampling_params.ebnf
    named = {"type": "function", "function": {"name": "f"}}
    one = plan({"grammar_backend": "xgrammar"}, tools=[TOOL, other], tool_choice=named).sampling_params.ebnf
    assert "other_one" in both and "call:f" in both and "call:f" in one and "other_one" not in one


def test_a_thought_that_the_template_opens() -> None:
    made = plan(template="<bos>{{ messages[0].content }}<|turn>model\n<|channel>thought\nHm").answer_format
    assert made.thought_begun == "<|channel>thought\nHm" and (made.num_thought_begun or 0) >= 3
    assert plan().answer_format.num_thought_begun is None
