"""What a chat request becomes: a prompt, sampling controls, and a way to read the answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sglang.srt.configs.registries import OUTPUT_FORMATS, load_entry
from sglang.srt.entrypoints.chat_output import AnswerFormat
from sglang.srt.entrypoints.chat_prompt import ChatTemplate
from sglang.srt.entrypoints.errors import bad_field
from sglang.srt.entrypoints.openai_messages import ToolUse
from sglang.srt.entrypoints.openai_protocol import ChatRequest, RequestOptions
from sglang.srt.entrypoints.parsers.base import OutputFormat
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """``request`` is what the engine runs; each of its answers is read by an ``AnswerReader`` of ``answer_format``."""

    options: RequestOptions
    request: GenerateReqInput
    answer_format: AnswerFormat

    @property
    def prompt(self) -> tuple[int, ...]:
        (prompt,) = self.request.prompts
        assert isinstance(prompt, tuple), "chats are tokenized when they are planned"
        return prompt

    @property
    def sampling_params(self) -> SamplingParams:
        return self.request.sampling_params[0]


class ChatPlanner:
    """Makes plans for one model and its parsers. Takes resolved arguments."""

    def __init__(self, server_args: ServerArgs, manager: TokenizerManager) -> None:
        self._manager = manager
        self._template = ChatTemplate(manager.tokenizer)
        self._reasoning = _load_format(server_args.reasoning_parser)
        self._tools = _load_format(server_args.tool_call_parser)
        self._has_grammar = server_args.grammar_backend != "none"
        self._thought_tokens = manager.pieces.thought_tokens

    async def plan(self, request: ChatRequest) -> ChatPlan:
        """``ApiError`` or ``ValueError`` when the request asks for what cannot be had."""
        text = self._template.render(request)
        use = request.tool_use
        tools = self._tools if use.tools else None
        if use.required and tools is None:
            raise bad_field("tool_choice", "that asks for a call needs a server with a --tool-call-parser")
        params = request.options.sampling_params
        if tools is not None and use.required:
            params = self._require_call(params, use, tools)
        if tools is not None and not use.parallel:
            params = self._end_with_first_call(params, tools)
        prompt = await self._manager.tokenize(text, "messages", add_special_tokens=False)
        markers: tuple[str, ...] = () if self._reasoning is None else self._reasoning.thought_markers
        markers = markers if tools is None else (*markers, *tools.call_markers)
        # stop strings are looked for in the text that is parsed, so markers must be part of it for both
        shown = markers if markers and params.skip_special_tokens else None
        params = params if shown is None else replace(params, skip_special_tokens=False)
        return ChatPlan(
            options=request.options,
            request=replace(request.options.generate_request((prompt,), "messages", params), shown_tokens=shown),
            answer_format=self._answer_format(request, text, prompt, tools),
        )

    def _answer_format(
        self, request: ChatRequest, text: str, prompt: Sequence[int], tools: OutputFormat | None
    ) -> AnswerFormat:
        reasoning, thought_begun, num_begun = self._reasoning, "", None
        if reasoning is not None:
            thought_begun = reasoning.open_thought(text)
            if thought_begun and self._thought_tokens is not None:
                num_begun = len(prompt) - 1 - _last_index(prompt, self._thought_tokens.open_id)
        return AnswerFormat(
            format=reasoning or tools,
            reasoning=reasoning is not None,
            tools=tools is not None,
            thought_begun=thought_begun,
            separate_reasoning=request.separate_reasoning,
            stream_reasoning=request.stream_reasoning,
            thought_tokens=None if reasoning is None else self._thought_tokens,
            num_thought_begun=num_begun,
        )

    def _require_call(self, params: SamplingParams, use: ToolUse, tools: OutputFormat) -> SamplingParams:
        """Controls under which an answer, behind its thought, begins with a call of one of the tools asked for."""
        if not self._has_grammar:
            raise bad_field("tool_choice", "that asks for a call needs a server with a --grammar-backend")
        wanted = [tool for tool in use.tools if use.name in (None, tool["function"]["name"])]
        return replace(params, ebnf=tools.call_grammar(wanted, parallel=use.parallel))

    def _end_with_first_call(self, params: SamplingParams, tools: OutputFormat) -> SamplingParams:
        close = self._manager.pieces.token_id(tools.call_markers[1])
        if close is None:
            problem = f"false cannot be kept to: the tokenizer has no token {tools.call_markers[1]}"
            raise bad_field("parallel_tool_calls", problem)
        return replace(params, stop_token_ids=(*params.stop_token_ids, close))


def _load_format(name: str | None) -> OutputFormat | None:
    assert name is not None, "resolve_server_args has not run"
    if name == "none":
        return None
    output_format: OutputFormat = load_entry(OUTPUT_FORMATS, name)()
    return output_format


def _last_index(ids: Sequence[int], token_id: int) -> int:
    return len(ids) - 1 - tuple(reversed(ids)).index(token_id)
