"""The scheduler with the shipped pair: memory pressure, chunks and speculation change no token of an answer."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from sglang.srt.managers.io_struct import (
    BatchTokenOut,
    ControlReply,
    ControlReq,
    FromScheduler,
    SchedulerReady,
    TokenizedGenerateReqInput,
    TokenOut,
    ToScheduler,
)
from sglang.srt.managers.scheduler import run_scheduler
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.server_args_resolution import resolve_server_args
from sglang.srt.utils.hf_transformers.tokenizer import load_tokenizer

QUESTIONS = ("Count from 1 to 12.", "Count from 3 to 9.", "What is 2 + 3?", "Count down from 9 to 1.", "Say hello.")
NUM_TOKENS = 40
pytestmark = pytest.mark.usefixtures("one_thread")

FROZEN_KV_MTP = {"speculative_algorithm": "FROZEN_KV_MTP", "speculative_num_steps": 4}
TIGHT = {
    "max_total_tokens": 96,
    "chunked_prefill_size": 8,
    "max_running_requests": 5,
    "schedule_conservativeness": 0.01,
}


class ThreadChannel:
    """Both ends of a channel between two threads."""

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[ToScheduler] = queue.SimpleQueue()
        self.outbox: queue.SimpleQueue[FromScheduler] = queue.SimpleQueue()

    def recv(self, timeout_s: float | None) -> list[ToScheduler]:
        messages = [self.inbox.get()] if timeout_s is None else []
        while not self.inbox.empty():
            messages.append(self.inbox.get())
        return messages

    def send(self, msg: FromScheduler) -> None:
        self.outbox.put(msg)

    def take(self) -> FromScheduler:
        return self.outbox.get(timeout=60)

    def finals(self, num: int) -> dict[str, TokenOut]:
        found: dict[str, TokenOut] = {}
        while len(found) < num:
            message = self.take()
            assert isinstance(message, BatchTokenOut), message
            found |= {out.rid: out for out in message.outs if out.finish_reason is not None}
        return found


def answers(prompts: Sequence[tuple[int, ...]], **kwargs: object) -> tuple[dict[str, TokenOut], ControlReply]:
    """Final replies to all prompts at once, and the state afterwards, when memory must balance."""
    channel = ThreadChannel()
    args = resolve_server_args(ServerArgs(model_path="tiny-gemma4", random_seed=7, **kwargs))
    thread = threading.Thread(target=run_scheduler, args=(args, channel), daemon=True)
    thread.start()
    ready = channel.take()
    assert isinstance(ready, SchedulerReady) and ready.error is None, ready
    for i, prompt in enumerate(prompts):
        temperature = 0.0 if i % 2 == 0 else 0.8
        params = SamplingParams(temperature=temperature, max_new_tokens=NUM_TOKENS, sampling_seed=i, ignore_eos=True)
        channel.inbox.put(TokenizedGenerateReqInput(f"r{i}", prompt, params, stream=False))
    outs = channel.finals(len(prompts))
    replies = []
    for action in ("check_integrity", "server_info", "shutdown"):
        channel.inbox.put(ControlReq(action, action))
        replies.append(channel.take())
    thread.join(timeout=30)
    assert not thread.is_alive()
    assert all(isinstance(reply, ControlReply) and reply.ok for reply in replies), replies
    return outs, replies[1]


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    args = resolve_server_args(ServerArgs(model_path="tiny-gemma4"))
    tokenizer = load_tokenizer(Path(args.tokenizer_path), trust_remote_code=False)
    turns = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [tuple(tokenizer.apply_chat_template(t, add_generation_prompt=True, return_dict=False)) for t in turns]


@pytest.fixture(scope="module")
def plain(prompts: list[tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Answers one at a time, with all the memory there is."""
    outs, _ = answers(prompts, max_running_requests=1, max_total_tokens=2048)
    return {rid: out.token_ids for rid, out in outs.items()}


@pytest.mark.parametrize("page_size", [1, 8])
@pytest.mark.parametrize("spec", [{}, FROZEN_KV_MTP], ids=["plain", "frozen_kv_mtp"])
def test_answers_under_memory_pressure(
    prompts: list[tuple[int, ...]], plain: dict[str, tuple[int, ...]], spec: dict[str, str], page_size: int
) -> None:
    outs, info = answers(prompts, page_size=page_size, **TIGHT, **spec)
    assert {rid: out.token_ids for rid, out in outs.items()} == plain
    assert info.data["totals"]["num_retractions"] > 0
    for out in outs.values():
        assert (out.spec is not None) == bool(spec)
    if spec:
        assert info.data["avg_spec_accept_length"] > 1.5


def test_the_self_test_leaves_no_trace() -> None:
    channel = ThreadChannel()
    args = resolve_server_args(ServerArgs(model_path="tiny-gemma4", max_total_tokens=256, **FROZEN_KV_MTP))
    channel.inbox.put(ControlReq("info", "server_info"))
    channel.inbox.put(ControlReq("end", "shutdown"))
    run_scheduler(args, channel)
    ready, info, end = channel.take(), channel.take(), channel.take()
    assert isinstance(ready, SchedulerReady)
    assert ready.info["spec_self_test"]["accept_length"] > 1.5
    assert len(ready.info["spec_self_test"]["accept_rate_by_position"]) == args.speculative_num_steps
    assert isinstance(info, ControlReply) and isinstance(end, ControlReply)
    assert info.data["totals"]["num_requests"] == info.data["totals"]["verify_ct"] == 0
    assert info.data["kv_cache"]["free"] == info.data["kv_cache"]["total"]


def test_a_start_that_fails_is_one_sentence() -> None:
    channel = ThreadChannel()
    args = resolve_server_args(ServerArgs(model_path="tiny-gemma4", max_total_tokens=3, **FROZEN_KV_MTP))
    run_scheduler(args, channel)
    ready = channel.take()
    assert isinstance(ready, SchedulerReady)
    assert ready.error is not None and "--max-total-tokens" in ready.error
