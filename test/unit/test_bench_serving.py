"""`bench_serving` without a server: prompts, streams of every API, and figures against sums done by hand."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from sglang.bench_serving import parse_args
from sglang.benchmark.client import APIS, Outcome, send_request
from sglang.benchmark.datasets import Prompt, PromptMaker
from sglang.benchmark.report import Run, figures, render
from sglang.srt.utils.embedded import EMBEDDED_MODELS
from sglang.srt.utils.hf_transformers.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer(Path(EMBEDDED_MODELS["tiny-gemma4"].target), trust_remote_code=False)


def _make(*argv: str) -> list[Prompt]:
    return PromptMaker(TOKENIZER, parse_args(argv)).make()


def test_random_prompts_have_the_lengths_asked_for() -> None:
    options = ("--num-prompts", "40", "--random-input-len", "80", "--random-output-len", "30")
    ids = _make(*options, "--tokenize-prompt", "--random-range-ratio", "0.5")
    assert len(ids) == 40 and all(isinstance(p.prompt, tuple) and len(p.prompt) == p.prompt_len for p in ids)
    assert {40 <= p.prompt_len <= 80 and 15 <= p.output_len <= 30 for p in ids} == {True}
    assert len({p.prompt_len for p in ids}) > 10
    assert not {i for p in ids for i in p.prompt} & set(TOKENIZER.all_special_ids)
    texts = _make(*options, "--random-range-ratio", "1")
    assert all(isinstance(p.prompt, str) and abs(p.prompt_len - 80) <= 8 for p in texts)
    assert {p.output_len for p in texts} == {30}
    assert texts == _make(*options, "--random-range-ratio", "1")
    assert texts != _make(*options, "--random-range-ratio", "1", "--seed", "2")


def test_groups_share_their_prefix() -> None:
    sizes = ("--gsp-num-groups", "3", "--gsp-prompts-per-group", "4", "--gsp-system-prompt-len", "50")
    rest = ("--gsp-question-len", "7", "--gsp-output-len", "9", "--tokenize-prompt", "--num-prompts", "1")
    prompts = _make("--dataset-name", "generated-shared-prefix", *sizes, *rest)
    assert [(p.prompt_len, p.output_len) for p in prompts] == [(57, 9)] * 12
    assert sorted(Counter(p.prompt[:50] for p in prompts).values()) == [4, 4, 4]
    assert len({p.prompt for p in prompts}) == 12


def test_sharegpt(tmp_path: Path) -> None:
    file = tmp_path / "share.json"
    talks = [
        {"conversations": [{"from": "human", "value": f"Count from {i} to {i + 9}."}, {"value": "one " * (5 + i)}]}
        for i in range(6)
    ]
    talks += [
        {"conversations": [{"value": "alone here it stands"}]},
        {"conversations": [{"value": "x"}, {"value": ""}]},
    ]
    file.write_text(json.dumps(talks))
    prompts = _make("--dataset-name", "sharegpt", "--dataset-path", str(file))
    assert {p.prompt for p in prompts} == {talk["conversations"][0]["value"] for talk in talks[:6]}
    assert {p.output_len for p in prompts} == {len(TOKENIZER.encode("one " * (5 + i))) for i in range(6)}
    fixed = _make("--dataset-name", "sharegpt", "--dataset-path", str(file), "--sharegpt-output-len", "11")
    assert {p.output_len for p in fixed} == {11} and len(fixed) == 6
    most = min(p.prompt_len + p.output_len for p in prompts)
    few = _make("--dataset-name", "sharegpt", "--dataset-path", str(file), "--sharegpt-context-len", str(most))
    assert {p.prompt_len + p.output_len for p in few} == {most}
    (one,) = _make("--dataset-name", "sharegpt", "--dataset-path", str(file), "--num-prompts", "1")
    assert one in prompts
    with pytest.raises(ValueError, match="no prompt that can be used"):
        _make("--dataset-name", "sharegpt", "--dataset-path", str(file), "--sharegpt-context-len", "5")


def test_custom(tmp_path: Path) -> None:
    file = tmp_path / "custom.jsonl"
    lines = [{"prompt": "What is 7 + 5?", "output_len": 6}, {"prompt": "Hello there, you"}]
    lines.append({"conversations": [{"content": "Spell the word cloud."}, {"content": "c l o u d"}]})
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    options = ("--dataset-name", "custom", "--dataset-path", str(file), "--random-output-len", "33")
    prompts = _make(*options)
    assert [p.prompt for p in prompts] == ["What is 7 + 5?", "Hello there, you", "Spell the word cloud."]
    assert [p.output_len for p in prompts] == [6, 33, len(TOKENIZER.encode("c l o u d"))]
    (chat, *_) = _make(*options, "--apply-chat-template")
    assert "<|turn>user\nWhat is 7 + 5?<turn|>" in chat.prompt and not chat.prompt.startswith("<bos>")
    file.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    with pytest.raises(ValueError, match="line 2 has neither prompt nor conversations"):
        _make(*options)
    file.write_text("{")
    with pytest.raises(ValueError, match="line 1 is not valid JSON"):
        _make(*options)


def _sse(*events: Any, done: bool = True) -> bytes:
    texts = [json.dumps(event) for event in events] + ["[DONE]"] * done
    return "".join(f"data: {text}\n\n" for text in texts).encode()


def _native(text: str, total: int, reason: Any = None) -> dict[str, Any]:
    info = {"completion_tokens": total, "prompt_tokens": 5, "finish_reason": reason}
    return {"text": text, "meta_info": info | {"spec_verify_ct": 3, "spec_accept_token_num": 4}}


_USAGE = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 7}}
_COMPLETION = [{"choices": [{"text": text}], "usage": None} for text in ("ab", "cd", "")]
_CHAT = [
    {"choices": [{"delta": delta}], "usage": None}
    for delta in ({"role": "assistant", "content": ""}, {"reasoning_content": "ab"}, {"content": "cd"}, {})
]
STREAMS = {
    "sglang": ([_native("ab", 1), _native("abcd", 7), _native("abcd", 7, {"type": "length"})], [1, 6], (3, 4)),
    "sglang-oai": ([*_COMPLETION, _USAGE], [1, 1], (0, 0)),
    "vllm": ([*_COMPLETION, _USAGE], [1, 1], (0, 0)),
    "sglang-oai-chat": ([*_CHAT, _USAGE], [1, 1], (0, 0)),
}


def _send(backend: str, answer: Callable[[httpx.Request], httpx.Response], *argv: str) -> Outcome:
    args = parse_args(["--backend", backend, "--model", "pet", *argv])
    return asyncio.run(_send_one(args, answer))


async def _send_one(args: argparse.Namespace, answer: Callable[[httpx.Request], httpx.Response]) -> Outcome:
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://x") as client:
        return await send_request(client, Prompt("hello", 2, 9), args)


@pytest.mark.parametrize("backend", STREAMS)
def test_streams(backend: str) -> None:
    events, counts, spec = STREAMS[backend]
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, content=_sse(*events))

    outcome = _send(backend, answer, "--extra-request-body", '{"rid": "r"}')
    assert outcome.error == "" and outcome.text == "abcd"
    assert (outcome.prompt_len, outcome.output_len) == (5, 7)
    assert [count for _, count in outcome.arrivals] == counts and len(outcome.itls_s) == sum(counts[1:])
    assert (outcome.verify_ct, outcome.accepted) == spec
    assert 0 <= outcome.ttft_s <= outcome.latency_s
    body = json.loads(asked[0].content)
    assert asked[0].url.path == APIS[backend].path and body["stream"] is True and body["rid"] == "r"
    if backend == "sglang":
        assert body["sampling_params"] == {"temperature": 0.0, "max_new_tokens": 9, "ignore_eos": True}
    else:
        assert body["model"] == "pet" and body["stream_options"] == {"include_usage": True}
        assert body["temperature"] == 0 and body.get("max_tokens", body.get("max_completion_tokens")) == 9


def test_whole_replies() -> None:
    reply = {"choices": [{"message": {"content": "abcd"}}], "usage": _USAGE["usage"]}
    outcome = _send("sglang-oai-chat", lambda request: httpx.Response(200, json=reply), "--disable-stream")
    assert (outcome.error, outcome.text, outcome.output_len, outcome.arrivals) == ("", "abcd", 7, [])


FAILURES = [
    (httpx.Response(503, text="full"), "status 503: full"),
    (httpx.Response(200, content=_sse(_native("a", 1), done=False)), "ended before its end"),
    (httpx.Response(200, content=_sse(_native("a", 1), {"error": {"message": "no"}})), "no"),
    (httpx.Response(200, content=_sse(_native("a", 1, {"type": "abort", "message": "gone"}))), "gone"),
    (httpx.Response(200, content=b"data: {\n\n"), "Expecting"),
    (httpx.Response(200, content=_sse({"other": 1})), "meta_info"),
]


@pytest.mark.parametrize(("response", "message"), FAILURES)
def test_a_failure_is_an_outcome(response: httpx.Response, message: str) -> None:
    assert message in _send("sglang", lambda request: response).error


def _outcome(start: float, arrivals: list[tuple[float, int]], **values: Any) -> Outcome:
    outcome = Outcome(Prompt("x", 3, 9), start, prompt_len=10, **values)
    outcome.output_len = sum(count for _, count in arrivals)
    outcome.arrivals, outcome.end_s = arrivals, arrivals[-1][0]
    return outcome


def test_figures() -> None:
    first = _outcome(0.0, [(0.5, 1), (0.9, 4), (1.1, 1)])
    second = _outcome(0.2, [(1.0, 1), (2.0, 1)])
    failed = Outcome(Prompt("x", 3, 9), 0.0, error="no")
    values = figures(Run([first, failed, second], 2.0, 2.5), 7)
    assert (values["completed"], values["failed"]) == (2, 1)
    assert (values["total_input_tokens"], values["total_output_tokens"]) == (20, 8)
    assert (values["request_throughput"], values["output_throughput"], values["total_throughput"]) == (1, 4, 14)
    assert values["concurrency"] == pytest.approx((1.1 + 1.8) / 2)
    assert values["max_concurrent_requests"] == 2 and values["max_output_tokens_per_s"] == 5
    assert values["mean_ttft_ms"] == pytest.approx((500 + 800) / 2)
    # six tokens: five after the first in 0.6 s; two tokens: one after the first in 1 s
    assert values["mean_tpot_ms"] == pytest.approx((120 + 1000) / 2)
    assert values["mean_itl_ms"] == pytest.approx((100 * 4 + 200 + 1000) / 6)
    assert values["median_itl_ms"] == pytest.approx(100) and values["max_itl_ms"] == pytest.approx(1000)
    assert values["median_e2e_latency_ms"] == pytest.approx(1450)
    record = {"backend": "sglang", "request_rate": "inf", "max_concurrency": None} | values
    text = render(record)
    for label, value in (
        ("Successful requests", "2"),
        ("Failed requests", "1"),
        ("Max request concurrency", "not set"),
        ("Output token throughput (tok/s)", "4.00"),
        ("Accept length", "2.50"),
        ("Mean TTFT (ms)", "650.00"),
        ("Mean TPOT (ms)", "560.00"),
        ("Mean ITL (ms)", "266.67"),
        ("Max ITL (ms)", "1000.00"),
        ("P99 E2E Latency (ms)", "1793.00"),
    ):
        assert f"{label + ':':<40} {value}\n" in text
    assert {len(line) for line in text.splitlines() if line[0] in "=-"} == {50}
    whole = render(record | {f"max_{name}_ms": 0.0 for name in ("ttft", "tpot", "itl")} | {"accept_length": None})
    assert "TTFT" not in whole and "ITL" not in whole and "Accept length" not in whole and "E2E" in whole


BAD_OPTIONS = [
    ("--request-rate", "0", "--request-rate must be above 0"),
    ("--random-range-ratio", "1.5", "--random-range-ratio must be from 0 to 1"),
    ("--num-prompts", "0", "must be at least 1"),
    ("--header", "a", "must be NAME=VALUE"),
    ("--extra-request-body", "[1]", "must be a JSON object"),
    ("--backend", "trt", "invalid choice"),
]


@pytest.mark.parametrize(("flag", "value", "message"), BAD_OPTIONS)
def test_a_bad_option_is_refused(flag: str, value: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_args([flag, value])
    assert caught.value.code == 2 and message in capsys.readouterr().err


def test_ids_are_not_for_chats(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--backend", "sglang-oai-chat", "--tokenize-prompt"])
    assert "--tokenize-prompt" in capsys.readouterr().err
