"""The tokenizer manager over a scheduler that echoes prompts, through threads and through sockets."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from fixtures.echo_scheduler import INFO, EchoScheduler
from sglang.srt.entrypoints.native_protocol import generate_events, generate_reply, parse_generate_request
from sglang.srt.managers.channel import ZmqManagerChannel, ZmqSchedulerChannel, make_memory_channel
from sglang.srt.managers.generate_output import RequestFailedError
from sglang.srt.managers.intake import RefusedError
from sglang.srt.managers.io_struct import AbortReq, ControlReq, SchedulerReady, TokenizedGenerateReqInput
from sglang.srt.managers.request_logger import RequestLogger
from sglang.srt.managers.tokenizer_manager import SchedulerDiedError, TokenizerManager
from sglang.srt.server_args import PortArgs
from sglang.srt.utils.embedded import EMBEDDED_MODELS
from sglang.srt.utils.hf_transformers.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer(Path(EMBEDDED_MODELS["tiny-gemma4"].target), trust_remote_code=False)
Work = Callable[[TokenizerManager, EchoScheduler], Awaitable[None]]


@asynccontextmanager
async def _manager(
    kind: str, *, request_logger: RequestLogger | None = None, allow_auto_truncate: bool = False, **echo: Any
) -> AsyncIterator[tuple[TokenizerManager, EchoScheduler]]:
    ports = PortArgs.init_new()
    if kind == "memory":
        scheduler_channel, channel = make_memory_channel(asyncio.get_running_loop())
    else:
        scheduler_channel, channel = ZmqSchedulerChannel(ports), ZmqManagerChannel(ports)
    scheduler = EchoScheduler(scheduler_channel, **echo)
    thread = threading.Thread(target=scheduler.run)
    thread.start()
    ready = await channel.recv()
    assert isinstance(ready, SchedulerReady)
    manager = TokenizerManager(
        channel, TOKENIZER, ready, request_logger=request_logger, allow_auto_truncate=allow_auto_truncate
    )
    manager.start()
    try:
        yield manager, scheduler
    finally:
        channel.send(ControlReq("shutdown", "shutdown"))
        await asyncio.to_thread(thread.join)
        await manager.close()
        channel.close()
        ports.remove()


@pytest.fixture(params=["memory", "zmq"])
def run(request: pytest.FixtureRequest) -> Callable[..., None]:
    def run_it(work: Work, **echo: Any) -> None:
        async def main() -> None:
            async with _manager(request.param, **echo) as (manager, scheduler):
                await asyncio.wait_for(work(manager, scheduler), 15)

        asyncio.run(main())

    return run_it


def _params(**values: Any) -> dict[str, Any]:
    return {"max_new_tokens": 6, **values}


async def _reply(manager: TokenizerManager, **body: Any) -> Any:
    req = parse_generate_request(body)
    return generate_reply(req, await manager.generate_whole(req))


def test_one_prompt(run: Callable[..., None]) -> None:
    async def work(manager: TokenizerManager, scheduler: EchoScheduler) -> None:
        ids = TOKENIZER.encode("hello world")
        reply = await _reply(manager, text="hello world", sampling_params=_params(max_new_tokens=len(ids)))
        assert reply["text"] == "hello world" and reply["output_ids"] == ids
        info = reply["meta_info"]
        assert info["finish_reason"] == {"type": "length", "length": len(ids)}
        assert (info["prompt_tokens"], info["completion_tokens"], info["cached_tokens"]) == (len(ids), len(ids), 1)
        assert 0 < info["ttft"] <= info["e2e_latency"]
        assert info["spec_verify_ct"] == 4 and info["spec_accept_length"] == 2.5 and info["spec_accept_rate"] == 0.5
        assert info["spec_accept_histogram"] == [1, 1, 1, 1]
        assert info["spec_accept_by_position"] == [0.75, 0.5, 0.25]
        assert info["spec_accept_token_num"] == 6 and info["spec_draft_token_num"] == 12

    run(work)


def test_lists_and_samples_keep_their_order_and_seeds(run: Callable[..., None]) -> None:
    async def work(manager: TokenizerManager, scheduler: EchoScheduler) -> None:
        params = [_params(n=2, sampling_seed=(1 << 63) - 1), _params(n=1, max_new_tokens=2)]
        replies = await _reply(manager, input_ids=[[50, 51], [60, 61]], sampling_params=params, rid=["a", "b"])
        assert [r["meta_info"]["id"] for r in replies] == ["a_0", "a_1", "b"]
        assert [r["output_ids"] for r in replies] == [[50, 51] * 3, [50, 51] * 3, [60, 61]]
        seeds = [m.sampling_params.sampling_seed for m in scheduler.log if isinstance(m, TokenizedGenerateReqInput)]
        assert seeds == [(1 << 63) - 1, -(1 << 63), None]

    run(work)


def test_stream_is_cumulative_and_ends_like_the_whole(run: Callable[..., None]) -> None:
    async def work(manager: TokenizerManager, scheduler: EchoScheduler) -> None:
        body = {"text": "one two three", "sampling_params": _params(), "stream": True}
        events = [event async for event in generate_events(manager, parse_generate_request(body))]
        whole = await _reply(manager, **{**body, "stream": False})
        for event in events:
            assert whole["text"].startswith(event["text"]) and "index" not in event
        assert [len(e["output_ids"]) for e in events] == sorted({len(e["output_ids"]) for e in events})
        assert events[-1]["output_ids"] == whole["output_ids"] and events[-1]["text"] == whole["text"]
        assert all(event["meta_info"]["finish_reason"] is None for event in events[:-1])
        body["sampling_params"] = _params(n=2)
        indices = {event["index"] async for event in generate_events(manager, parse_generate_request(body))}
        assert indices == {0, 1}

    run(work)


def test_closing_a_stream_aborts_what_runs(run: Callable[..., None]) -> None:
    async def work(manager: TokenizerManager, scheduler: EchoScheduler) -> None:
        req = parse_generate_request({"input_ids": [50, 51], "sampling_params": _params(n=3, max_new_tokens=60)})
        async with aclosing(manager.generate_request(req)) as outputs:
            async for _ in outputs:
                break
        assert manager.num_pending == 0
        (reply,) = await manager.control("server_info")
        assert reply.ok and reply.data == {"running": 0}
        assert sum(isinstance(msg, AbortReq) for msg in scheduler.log) == 3

    run(work, step_s=0.02)


def test_abort_by_id_and_all(run: Callable[..., None]) -> None:
    async def work(manager: TokenizerManager, scheduler: EchoScheduler) -> None:
        params = _params(max_new_tokens=60)
        tasks = [
            asyncio.ensure_future(_reply(manager, input_ids=[50], sampling_params={**params, "n": n}, rid=rid))
            for rid, n in (("one", 1), ("two", 2), ("onemore", 1))
        ]
        while manager.num_pending < 4:
            await asyncio.sleep(0.01)
        with pytest.raises(ValueError, match="rid 'one' is in use"):
            await _reply(manager, input_ids=[50], rid="one")
        assert manager.abort_request("two") == 2 and manager.abort_request("none") == 0
        assert {r["meta_info"]["finish_reason"]["type"] for r in await tasks[1]} == {"abort"}
        assert not tasks[0].done() and not tasks[2].done()
        assert manager.abort_request("one") == 1
        assert (await tasks[0])["meta_info"]["finish_reason"]["message"] == "aborted"
        assert manager.abort_request(abort_all=True) == 1
        assert (await tasks[2])["meta_info"]["finish_reason"]["type"] == "abort"

    run(work, step_s=0.05)


def test_full_queue_fails_the_request_and_nothing_else(run: Callable[..., None]) -> None:
    async def work(manager: TokenizerManager, scheduler: EchoScheduler) -> None:
        first = asyncio.ensure_future(_reply(manager, input_ids=[50], sampling_params=_params(max_new_tokens=20)))
        await asyncio.sleep(0.05)
        with pytest.raises(RequestFailedError, match="queue is full") as caught:
            await _reply(manager, input_ids=[[50], [51]])
        assert caught.value.status == 503
        assert len((await first)["output_ids"]) == 20 and manager.num_pending == 0

    run(work, max_running=1, step_s=0.02)


def test_death_of_the_scheduler_reaches_everybody(run: Callable[..., None]) -> None:
    async def work(manager: TokenizerManager, scheduler: EchoScheduler) -> None:
        waiting = asyncio.ensure_future(_reply(manager, input_ids=[50], sampling_params=_params(max_new_tokens=60)))
        await asyncio.sleep(0.05)
        asked = asyncio.ensure_future(manager.control("server_info"))
        manager.scheduler_died("it was ended by SIGKILL")
        for future in (waiting, _reply(manager, input_ids=[50]), manager.control("ping")):
            with pytest.raises(SchedulerDiedError, match="SIGKILL"):
                await future
        await asyncio.wait((asked,))

    run(work, step_s=0.05)


BAD = [
    ({"text": ""}, r"text is empty"),
    ({"text": []}, r"text must be a string or a list of strings that is not empty"),
    ({"text": ["a", 1]}, r"text must be a string or a list of strings"),
    ({"text": "a", "input_ids": [1]}, r"text or input_ids must be given, and not both"),
    ({}, r"text or input_ids must be given"),
    ({"text": "\ud800"}, r"text is not valid Unicode at character 0"),
    ({"input_ids": []}, r"input_ids must be a list of token ids"),
    ({"input_ids": [[1], []]}, r"input_ids is empty"),
    ({"input_ids": [1, True]}, r"input_ids must be a list of token ids"),
    ({"input_ids": [1.0]}, r"input_ids must be a list of token ids"),
    ({"input_ids": [4096]}, r"input_ids has the token id 4096: ids must be from 0 to 4095"),
    ({"input_ids": [-1]}, r"input_ids has the token id -1"),
    ({"input_ids": [10**30]}, r"input_ids has the token id 1000"),
    ({"input_ids": [50] * 64}, r"input_ids has 64 tokens, but the context length is 64 tokens"),
    ({"input_ids": [50] * 61}, r"holds prompts of at most 60 tokens"),
    ({"text": "a", "stream": "yes"}, r"stream must be true or false"),
    ({"text": "a", "rid": ["a", "b"]}, r"rid has 2 different ids for 1 prompts"),
    ({"text": ["a", "b"], "rid": ["a", "a"]}, r"rid has 1 different ids for 2 prompts"),
    ({"text": "a", "rid": 5}, r"rid must be a string"),
    ({"text": "a", "sampling_params": 5}, r"sampling_params must be an object or a list"),
    ({"text": "a", "sampling_params": [{}, {}]}, r"sampling_params has 2 entries for 1 prompts"),
    ({"text": "a", "sampling_params": {"max_new_tokens": 10**9}}, r"max_new_tokens is 1000000000.* at most 63"),
    ({"text": "a", "sampling_params": {"stop_token_ids": [5000]}}, r"stop_token_ids has the token id 5000"),
    ({"text": "a", "sampling_params": {"logit_bias": {"5000": 1}}}, r"logit_bias has the token id 5000"),
    ({"text": "a", "return_logprob": 1}, r"return_logprob must be true or false, got 1"),
    ({"text": "a", "logprob_start_len": -2}, r"logprob_start_len must be an integer from -1"),
    ({"text": ["a", "b"], "top_logprobs_num": [1]}, r"top_logprobs_num has 1 entries for 2 prompts"),
    ({"text": "a", "token_ids_logprob": ["x"]}, r"token_ids_logprob must be a list of token ids"),
    ({"text": "a", "sampling_params": {"stop_regex": "a$"}}, r"stop_regex 'a\$' has \$, which is not supported"),
    ({"text": "a", "image_data": "x"}, r"image_data is not supported yet"),
    ({"text": "a", "txet": "b"}, r"txet is not a known field"),
]


def test_bad_requests_are_refused_before_anything_is_sent(run: Callable[..., None]) -> None:
    async def work(manager: TokenizerManager, scheduler: EchoScheduler) -> None:
        for body, message in BAD:
            with pytest.raises(ValueError, match=message):
                await _reply(manager, **body)
        assert scheduler.log == [] and manager.num_pending == 0

    run(work)


def test_limits_at_their_edges(run: Callable[..., None]) -> None:
    async def work(manager: TokenizerManager, scheduler: EchoScheduler) -> None:
        room = INFO["context_len"] - 60
        replies = [
            await _reply(manager, input_ids=[50] * 60, sampling_params={"max_new_tokens": length})
            for length in (room, None)
        ]
        replies.append(await _reply(manager, input_ids=[50] * 60))
        assert [len(reply["output_ids"]) for reply in replies] == [room, room, room]
        params = {"top_k": 10**30, "max_new_tokens": 1, "logit_bias": {"4095": 1}}
        assert (await _reply(manager, text="a", sampling_params=params))["output_ids"]

    run(work)


def test_what_is_too_long_is_cut_where_the_server_allows_it(run: Callable[..., None]) -> None:
    ids = list(range(50, 150))

    async def work(manager: TokenizerManager, scheduler: EchoScheduler) -> None:
        room = INFO["context_len"] - 60
        for length in (10**9, room + 1, 2):
            reply = await _reply(manager, input_ids=ids, sampling_params={"max_new_tokens": length})
            assert reply["meta_info"]["prompt_tokens"] == 60
            assert reply["output_ids"] == ids[: min(length, room)]
        with pytest.raises(ValueError, match="input_ids has the token id 4096"):
            await _reply(manager, input_ids=[4096, *ids])

    run(work, allow_auto_truncate=True)


def test_a_bos_of_the_text_is_not_doubled(run: Callable[..., None]) -> None:
    async def work(manager: TokenizerManager, scheduler: EchoScheduler) -> None:
        bos = TOKENIZER.bos_token_id
        assert (await manager.tokenize("<bos>a", "text"))[:2] != (bos, bos)
        assert await manager.tokenize("<bos><bos>a", "text", add_special_tokens=False) == (
            bos,
            bos,
            *TOKENIZER.encode("a"),
        )
        long = "ab " * 20_000
        assert list(await manager.tokenize(long, "text")) == TOKENIZER.encode(long)

    run(work)


def _logged(caplog: pytest.LogCaptureFixture, level: int, **body: Any) -> list[dict[str, Any]]:
    """What lines of a request hold, by name."""

    async def main() -> None:
        logger = RequestLogger(level, as_json=False)
        async with _manager("memory", request_logger=logger, allow_auto_truncate=True) as (manager, _):
            await _reply(manager, sampling_params=_params(), **body)

    caplog.clear()
    with caplog.at_level("INFO"):
        asyncio.run(main())
    lines = [record.getMessage() for record in caplog.records if record.levelname == "INFO"]
    assert [line.partition(": ")[0] for line in lines] == ["Receive", "Finish"]
    pairs = [line.partition(": ")[2] for line in lines]
    return [json.loads("{" + re.sub(r"(^|, )(\w+)=", r'\1"\2": ', pair) + "}") for pair in pairs]


def test_requests_are_logged_when_that_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    receive, finish = _logged(caplog, 0, text="<bos>secret", rid="mine\n[2026] forged")
    assert receive == {"rid": "mine\n[2026] forged", "prompt_tokens": receive["prompt_tokens"], "stream": False}
    assert finish["finish_reason"] == {"type": "length", "length": 6} and finish["completion_tokens"] == 6
    times = {"e2e_latency", "ttft", "queue_time", "cached_tokens", "spec_verify_ct", "spec_accept_length"}
    assert set(finish) == {"rid", "prompt_tokens", "completion_tokens", "finish_reason"} | times
    assert "secret" not in caplog.text
    receive, _ = _logged(caplog, 1, text="<bos>secret")
    assert receive["sampling_params"]["max_new_tokens"] == 6 and "secret" not in caplog.text
    receive, finish = _logged(caplog, 2, text="secret" * 400)
    assert receive["text"] == ("secret" * 400)[:2048] and "output_text" in finish
    receive, finish = _logged(caplog, 3, text="secret" * 400)
    assert receive["text"] == "secret" * 400
    # what the scheduler echoes is the beginning of the prompt
    assert finish["output_text"] and receive["text"].startswith(finish["output_text"].strip())
    receive, _ = _logged(caplog, 3, input_ids=[50, 51])
    assert receive["input_ids"] == [50, 51]


def test_a_client_that_goes_away_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        logger = RequestLogger(0, as_json=False)
        async with _manager("memory", request_logger=logger, step_s=0.001) as (manager, _):
            body = {"input_ids": [50], "stream": True, "sampling_params": _params(max_new_tokens=60)}
            async with aclosing(generate_events(manager, parse_generate_request(body))) as events:
                await anext(events)
            await manager.wait_idle()

    with caplog.at_level("INFO"):
        asyncio.run(main())
    assert "the client went away" in caplog.text and '"type": "abort"' in caplog.text


def test_json_lines_are_nothing_but_json(capfd: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        async with _manager("memory", request_logger=RequestLogger(2, as_json=True)) as (manager, _):
            await _reply(manager, text="a\nb", sampling_params=_params())

    before = logging.getLogger().level
    logging.getLogger().setLevel("INFO")
    try:
        asyncio.run(main())
    finally:
        logging.getLogger().setLevel(before)
    received, finished = map(json.loads, capfd.readouterr().err.splitlines())
    assert (received["event"], finished["event"]) == ("request.received", "request.finished")
    assert received["rid"] == finished["rid"] and received["text"] == "a\nb"
    assert received["timestamp"].endswith("+00:00")


def test_requests_wait_for_a_pause_and_then_all_pass(run: Callable[..., None]) -> None:
    async def work(manager: TokenizerManager, scheduler: EchoScheduler) -> None:
        assert manager.closed_because is None
        for _ in range(2):  # pausing twice is pausing
            assert manager.pause_generation() == 0
        waiting = [
            asyncio.ensure_future(_reply(manager, input_ids=[60 + i], sampling_params=_params())) for i in range(20)
        ]
        await manager.control("ping")
        assert not any(task.done() for task in waiting) and not scheduler.running
        assert "paused" in (manager.closed_because or "")
        manager.continue_generation()
        replies = await asyncio.gather(*waiting)
        assert [reply["output_ids"][0] for reply in replies] == [60 + i for i in range(20)]

    run(work)


def test_weights_are_updated_when_nothing_runs(run: Callable[..., None]) -> None:
    async def work(manager: TokenizerManager, scheduler: EchoScheduler) -> None:
        long = asyncio.ensure_future(
            _reply(manager, input_ids=[50], sampling_params=_params(max_new_tokens=50, ignore_eos=True))
        )
        while not scheduler.running:
            await manager.control("ping")
        updates = [asyncio.ensure_future(manager.update_weights(f"/{i}", None, abort=False)) for i in range(2)]
        while manager.closed_because is None:
            await manager.control("ping")
        assert manager.closed_because == "weights are being updated"
        late = asyncio.ensure_future(_reply(manager, input_ids=[51], sampling_params=_params()))
        (num_running, message), (_, again) = [await update for update in updates]
        assert num_running == 1 and message == again == ""
        assert (await long)["meta_info"]["completion_tokens"] == 50
        assert (await late)["output_ids"][0] == 51 and manager.closed_because is None
        kinds = [msg.action if isinstance(msg, ControlReq) else msg.rid for msg in scheduler.log]
        order = [kind for kind in kinds if kind != "ping"]
        # one after the other, and a request that came meanwhile is behind them or between them
        assert order[1] == "update_weights" and order.count("update_weights") == 2
        (first, _) = (msg for msg in scheduler.log if isinstance(msg, ControlReq) and msg.action == "update_weights")
        assert first.data == {"model_path": "/0", "draft_model_path": None}

    run(work, step_s=0.002)


def test_who_waits_hears_that_the_server_ends(run: Callable[..., None]) -> None:
    async def work(manager: TokenizerManager, scheduler: EchoScheduler) -> None:
        manager.pause_generation()
        waiting = asyncio.ensure_future(_reply(manager, input_ids=[60], sampling_params=_params()))
        await manager.control("ping")
        manager.refuse_requests("the server is shutting down")
        with pytest.raises(RefusedError, match="shutting down"):
            await waiting
        with pytest.raises(RefusedError, match="shutting down"):
            await _reply(manager, input_ids=[60], sampling_params=_params())
        await manager.wait_idle()

    run(work)


def test_hundreds_of_requests_at_once(run: Callable[..., None]) -> None:
    async def work(manager: TokenizerManager, scheduler: EchoScheduler) -> None:
        async def one(i: int) -> None:
            reply = await _reply(
                manager, input_ids=[100 + i, 600 + i], sampling_params=_params(max_new_tokens=1 + i % 7)
            )
            assert reply["output_ids"] == ([100 + i, 600 + i] * 4)[: 1 + i % 7]

        await asyncio.gather(*(one(i) for i in range(300)))

    run(work, max_running=1000)
