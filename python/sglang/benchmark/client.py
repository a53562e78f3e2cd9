"""Requests of `bench_serving`: one streamed request at a time, with the times at which its tokens came."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import httpx

from sglang.benchmark.datasets import Prompt


@dataclass(slots=True)  # mutable: filled in while the request runs
class Outcome:
    """What came of one request. Times are seconds of ``time.perf_counter``, durations seconds.

    ``arrivals`` are (time, number of tokens); a piece counts as one token where the API does not say how many it has.
    ``output_len`` is what the server reported in the end. ``verify_ct`` and ``accepted`` stay 0 where it reports none.
    """

    prompt: Prompt
    start_s: float
    error: str = ""
    text: str = ""
    prompt_len: int = 0
    output_len: int = 0
    end_s: float = 0.0
    verify_ct: int = 0
    accepted: int = 0
    arrivals: list[tuple[float, int]] = field(default_factory=list)

    @property
    def latency_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def ttft_s(self) -> float:
        return (self.arrivals[0][0] if self.arrivals else self.end_s) - self.start_s

    @property
    def itls_s(self) -> list[float]:
        """Times between tokens; tokens that came together share the time equally."""
        gaps = []
        for (before, _), (now, count) in zip(self.arrivals, self.arrivals[1:], strict=False):
            gaps += [(now - before) / count] * count
        return gaps


class Api(Protocol):
    """One way to ask for text."""

    path: str

    def body(self, prompt: Prompt, args: argparse.Namespace) -> dict[str, Any]:
        """The request, without ``stream``."""

    def take(self, event: Mapping[str, Any], outcome: Outcome) -> int:
        """Note what an event of a stream, or a whole reply, says; returns how many new tokens it brought."""


class NativeApi:
    """`/generate`: every event repeats the whole text and counts tokens and verifications."""

    path = "/generate"

    def body(self, prompt: Prompt, args: argparse.Namespace) -> dict[str, Any]:
        key = "text" if isinstance(prompt.prompt, str) else "input_ids"
        params = {"temperature": 0.0, "max_new_tokens": prompt.output_len, "ignore_eos": not args.disable_ignore_eos}
        return {key: prompt.prompt, "sampling_params": params}

    def take(self, event: Mapping[str, Any], outcome: Outcome) -> int:
        info = event["meta_info"]
        reason = info["finish_reason"]
        if reason is not None and reason["type"] == "abort":
            raise RequestError(reason.get("message") or "the request was aborted")
        new = info["completion_tokens"] - outcome.output_len
        outcome.text = event["text"]
        outcome.prompt_len, outcome.output_len = info["prompt_tokens"], info["completion_tokens"]
        outcome.verify_ct = info.get("spec_verify_ct", 0)
        outcome.accepted = info.get("spec_accept_token_num", 0)
        return int(new)


class CompletionsApi:
    """`/v1/completions`: pieces of text, and the numbers of tokens at the end."""

    path = "/v1/completions"

    def body(self, prompt: Prompt, args: argparse.Namespace) -> dict[str, Any]:
        ids = prompt.prompt if isinstance(prompt.prompt, str) else list(prompt.prompt)
        return {"prompt": ids, "max_tokens": prompt.output_len, **_openai_fields(args)}

    def take(self, event: Mapping[str, Any], outcome: Outcome) -> int:
        texts = [choice.get("text") for choice in event["choices"]]
        return _take_openai(event, texts, outcome)


class ChatApi:
    """`/v1/chat/completions`: the prompt as the only message of a user."""

    path = "/v1/chat/completions"

    def body(self, prompt: Prompt, args: argparse.Namespace) -> dict[str, Any]:
        if not isinstance(prompt.prompt, str):
            raise ValueError("--tokenize-prompt makes token ids, which a chat cannot take: use another --backend")
        messages = [{"role": "user", "content": prompt.prompt}]
        return {"messages": messages, "max_completion_tokens": prompt.output_len, **_openai_fields(args)}

    def take(self, event: Mapping[str, Any], outcome: Outcome) -> int:
        texts = []
        for choice in event["choices"]:
            message = choice.get("delta") or choice.get("message") or {}
            texts += [message.get("reasoning_content"), message.get("content")]
        return _take_openai(event, texts, outcome)


def _openai_fields(args: argparse.Namespace) -> dict[str, Any]:
    fields = {"model": args.model, "temperature": 0.0, "ignore_eos": not args.disable_ignore_eos}
    return fields if args.disable_stream else fields | {"stream_options": {"include_usage": True}}


def _take_openai(event: Mapping[str, Any], texts: list[str | None], outcome: Outcome) -> int:
    text = "".join(text for text in texts if text)
    outcome.text += text
    usage = event.get("usage")
    if usage:
        outcome.prompt_len, outcome.output_len = usage["prompt_tokens"], usage["completion_tokens"]
    return 1 if text else 0


APIS: Mapping[str, Api] = MappingProxyType(
    {
        "sglang": NativeApi(),
        "sglang-native": NativeApi(),
        "sglang-oai": CompletionsApi(),
        "sglang-oai-chat": ChatApi(),
        "vllm": CompletionsApi(),
        "vllm-chat": ChatApi(),
    }
)


class RequestError(Exception):
    """The server did not answer as it should."""


async def send_request(client: httpx.AsyncClient, prompt: Prompt, args: argparse.Namespace) -> Outcome:
    """Ask, and read to the end. Never raises for what the server or the network does: see ``Outcome.error``."""
    api = APIS[args.backend]
    body = {**api.body(prompt, args), "stream": not args.disable_stream, **args.extra_request_body}
    outcome = Outcome(prompt, time.perf_counter(), prompt_len=prompt.prompt_len)
    try:
        async with client.stream("POST", api.path, json=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                raise RequestError(f"status {response.status_code}: {text[:500]}")
            if args.disable_stream:
                api.take(json.loads(await response.aread()), outcome)
                outcome.end_s = time.perf_counter()
            else:
                await _read_stream(response, api, outcome)
    except (RequestError, httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        outcome.error = str(error) or type(error).__name__
    return outcome


async def _read_stream(response: httpx.Response, api: Api, outcome: Outcome) -> None:
    finished = False
    async for data in _events(response):
        now = time.perf_counter()
        if data == b"[DONE]":
            finished = True
            continue
        event = json.loads(data)
        if "error" in event:
            raise RequestError(str(event["error"]))
        new = api.take(event, outcome)
        outcome.end_s = now
        if new:
            outcome.arrivals.append((now, new))
    if not finished:
        raise RequestError("the stream ended before its end was announced")


async def _events(response: httpx.Response) -> AsyncIterator[bytes]:
    """The data of server-sent events."""
    rest = b""
    async for chunk in response.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
