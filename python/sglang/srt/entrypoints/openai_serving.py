"""``/v1/chat/completions`` and ``/v1/completions``: requests to prompts, outputs to choices."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang.srt.entrypoints.chat_output import ChatShape
from sglang.srt.entrypoints.chat_plan import ChatPlan, ChatPlanner
from sglang.srt.entrypoints.completion_output import TextFormat, TextShape, echo_of
from sglang.srt.entrypoints.errors import ApiError
from sglang.srt.entrypoints.openai_protocol import (
    CompletionRequest,
    RequestOptions,
    in_openai_terms,
    parse_chat_request,
    parse_completion_request,
)
from sglang.srt.entrypoints.openai_replies import usage
from sglang.srt.managers.generate_output import GenerateOutput
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_transformers.config import load_generation_config

_MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def load_sampling_defaults(server_args: ServerArgs) -> dict[str, Any]:
    """Sampling values for what an OpenAI request leaves out, as ``--sampling-defaults`` says.

    A ``generation_config.json`` with ``do_sample`` false asks for greedy decoding.
    """
    if server_args.sampling_defaults != "model":
        return {}
    config = load_generation_config(Path(server_args.model_path)) or {}
    defaults = {name: config[name] for name in _MODEL_DEFAULTS if config.get(name) is not None}
    return defaults | {"temperature": 0.0} if config.get("do_sample") is False else defaults


class OpenAIServing:
    """Serves both kinds of completion. Each method takes a request body that is a JSON object."""

    def __init__(self, server_args: ServerArgs, manager: TokenizerManager) -> None:
        self.manager = manager
        self.cache_report = server_args.enable_cache_report
        self._model_name = server_args.served_model_name or server_args.model_path
        self._accepted_names = (self._model_name, server_args.model_path, "default")
        self._defaults = load_sampling_defaults(server_args)
        self._planner = ChatPlanner(server_args, manager)

    @property
    def model_name(self) -> str:
        return self._model_name

    def check_model(self, name: str | None) -> None:
        """``ApiError`` 404 unless ``name`` means the model that is served, or nothing is named."""
        if name is not None and name not in self._accepted_names:
            message = f"the model {name!r:.200} does not exist: this server has {self._model_name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def plan_chat(self, body: Mapping[str, Any]) -> ChatPlan:
        """A chat request, checked and ready to run. ``ApiError`` names the field of ``body`` that is at fault."""
        try:
            request = parse_chat_request(body, self._defaults)
            self.check_model(request.options.model)
            return await self._planner.plan(request)
        except ValueError as error:
            raise in_openai_terms(error, body) from error

    async def chat(self, body: Mapping[str, Any]) -> _Completion:
        """A chat completion, checked and ready to run."""
        plan = await self.plan_chat(body)
        shape = ChatShape(plan.answer_format, self.manager.pieces)
        return _Completion(self, body, plan.options, plan.request, shape)

    async def completion(self, body: Mapping[str, Any]) -> _Completion:
        """A text completion, checked and ready to run."""
        try:
            parsed = parse_completion_request(body, self._defaults)
        except ValueError as error:
            raise in_openai_terms(error, body) from error
        options = parsed.options
        self.check_model(options.model)
        request = options.generate_request(parsed.prompts, "prompt", options.sampling_params)
        return _Completion(self, body, options, request, self._text_shape(parsed))

    def _text_shape(self, request: CompletionRequest) -> TextShape:
        params, pieces = request.options.sampling_params, self.manager.pieces
        hidden_ids = pieces.special_ids if params.skip_special_tokens else frozenset()
        echoes = tuple(echo_of(prompt, pieces, hidden_ids) for prompt in request.prompts) if request.echo else None
        return TextShape(TextFormat(params.n, echoes, hidden_ids), pieces)


_Shape = ChatShape | TextShape


class _Completion:
    """One request on its way to a reply: run it with ``whole`` or ``stream``, whichever it asks for."""

    def __init__(
        self,
        serving: OpenAIServing,
        body: Mapping[str, Any],
        options: RequestOptions,
        request: GenerateReqInput,
        shape: _Shape,
    ) -> None:
        self.is_stream = options.stream
        self._serving = serving
        self._body = body
        self._options = options
        self._request = request
        self._shape = shape
        # of tokens that no piece has told of: those that show nothing
        self._places: dict[int, list[int]] = {}
        self._head = {
            "id": f"{shape.id_prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": serving.model_name,
        }

    async def whole(self) -> dict[str, Any]:
        try:
            outputs = await self._serving.manager.generate_whole(self._request)
        except ValueError as error:
            raise in_openai_terms(error, self._body) from error
        choices = [self._shape.choice(out) | _runs(out) for out in outputs]
        return {**self._head, "object": self._shape.whole, "choices": choices, "usage": self._usage(outputs)}

    def _usage(self, outputs: Sequence[GenerateOutput]) -> dict[str, Any]:
        return usage(
            outputs,
            self._options.sampling_params.n,
            self._shape.reasoning_tokens,
            cached=self._serving.cache_report,
            spec=self._options.spec_usage,
        )

    async def stream(self) -> AsyncGenerator[dict[str, Any], None]:
        """Chunks of the reply, each with a piece of one choice; the last one has the usage if it was asked for."""
        head = {**self._head, "object": self._shape.piece}
        if self._options.include_usage:
            head["usage"] = None
        latest: dict[int, GenerateOutput] = {}
        try:
            async with contextlib.aclosing(self._serving.manager.generate_request(self._request)) as outputs:
                async for out in outputs:
                    for choice in self._pieces(out, latest):
                        so_far = {"usage": self._usage(list(latest.values()))} if self._options.continuous_usage else {}
                        yield {**head, "choices": [choice], **so_far}
        except ValueError as error:
            raise in_openai_terms(error, self._body) from error
        if self._options.include_usage:
            yield {**head, "choices": [], "usage": self._usage(list(latest.values()))}

    def _pieces(self, out: GenerateOutput, latest: dict[int, GenerateOutput]) -> Iterator[dict[str, Any]]:
        """What is new, token by token where runs were asked for. Keeps the ``latest`` output of each choice."""
        for part, place in ((out, None),) if out.runs is None else out.by_token():
            pieces = self._shape.pieces(part, part.index not in latest)
            latest[part.index] = part
            places = self._places.setdefault(part.index, [])
            if place is not None:
                places.append(place)
            if pieces and places:
                pieces[0] = pieces[0] | {"accept_positions": self._places.pop(part.index)}
            yield from pieces


def _runs(out: GenerateOutput) -> dict[str, Any]:
    return {} if out.runs is None else {"accept_lens": list(out.runs.accept_lens)}
