"""Requests over several schedulers: who takes which, what is owed, and what becomes of those of a replica that ends."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenOut,
    ControlReply,
    ControlReq,
    FinishReason,
    FromScheduler,
    SchedulerReady,
    TokenizedGenerateReqInput,
    TokenOut,
    ToScheduler,
)
from sglang.srt.managers.load_balancer import LoadBalancer, PrefixRecord
from sglang.srt.managers.replica_channel import ReplicaChannel
from sglang.srt.sampling.sampling_params import SamplingParams


def request(rid: str, num_tokens: int = 64, first: int = 0, max_new_tokens: int = 10) -> TokenizedGenerateReqInput:
    ids = tuple(range(first, first + num_tokens))
    return TokenizedGenerateReqInput(rid, ids, SamplingParams(max_new_tokens=max_new_tokens), stream=True)


def reply(rid: str, completed: int, *, ended: bool = False) -> TokenOut:
    finish = FinishReason("length", length=completed) if ended else None
    return TokenOut(rid, (7,), finish, 64, completed, 32, None, 0.5)


def test_turns() -> None:
    balancer = LoadBalancer(3, "round_robin")
    assert [balancer.choose(request(str(i))) for i in range(6)] == [0, 1, 2, 0, 1, 2]


def test_requests_go_where_least_is_owed() -> None:
    balancer = LoadBalancer(2)
    assert balancer.choose(request("long", num_tokens=500)) == 0
    # 500 + 10 are owed there: five of 64 + 10 go elsewhere before it is its turn again
    chosen = [balancer.choose(request(str(i), first=1000 * (i + 1))) for i in range(8)]
    assert chosen == [1] * 7 + [0]
    balancer.received(reply("long", 1))  # its prompt is done
    assert balancer.owed[0] == 9 + 74
    assert balancer.choose(request("next", first=9000)) == 0


def test_a_prefix_is_worth_its_tokens() -> None:
    balancer = LoadBalancer(2)
    assert balancer.choose(request("a", num_tokens=640)) == 0
    assert balancer.choose(request("b", num_tokens=640, first=5000)) == 1
    for rid in ("a", "b"):
        balancer.received(reply(rid, 10, ended=True))
    # the same beginnings return to the same replicas, however the turn stands
    assert [balancer.choose(request(f"a{i}", num_tokens=640)) for i in range(2)] == [0, 1]  # then 0 owes 650
    assert balancer.choose(request("b1", num_tokens=320, first=5000)) == 1


def test_the_record_forgets_the_least_recent() -> None:
    record = PrefixRecord(max_blocks=4)
    record.add(range(64), 0)
    record.add(range(100, 164), 1)
    assert record.matches(range(64), 2) == [64, 0]
    record.add(range(64), 1)
    record.add(range(200, 264), 0)
    assert record.matches(range(100, 164), 2) == [0, 0]
    assert record.matches(range(40), 2) == [32, 32]
    record.forget(1)
    assert record.matches(range(64), 2) == [64, 0]
    assert record.matches(range(31), 2) == [0, 0]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 200), st.booleans()), max_size=60), st.integers(1, 4))
def test_books_balance(events: list[tuple[int, int, bool]], num_replicas: int) -> None:
    """Whatever comes in whatever order, what is owed is what the running requests still owe."""
    balancer = LoadBalancer(num_replicas)
    open_reqs: dict[str, tuple[int, int]] = {}
    for i, (which, size, ended) in enumerate(events):
        if which < 5 or not open_reqs:
            rid = f"r{i}"
            open_reqs[rid] = balancer.choose(request(rid, num_tokens=size, first=which)), size + 10
        else:
            rid = sorted(open_reqs)[which % len(open_reqs)]
            completed = size % 10 + 1
            balancer.received(reply(rid, completed, ended=ended))
            replica, _ = open_reqs.pop(rid)
            if not ended:
                open_reqs[rid] = replica, 10 - completed
        owed = [sum(n for where, n in open_reqs.values() if where == r) for r in range(num_replicas)]
        assert balancer.owed == owed
    for rid, (replica, _) in open_reqs.items():
        assert balancer.replica_of(rid) == replica
        balancer.received(reply(rid, 10, ended=True))
    assert balancer.owed == [0] * num_replicas and balancer.replica_of("r0") is None


class Link:
    """A channel whose other end is the test."""

    def __init__(self) -> None:
        self.sent: list[ToScheduler] = []
        self.inbox: asyncio.Queue[FromScheduler | Exception] = asyncio.Queue()
        self.closed = False

    def send(self, msg: ToScheduler) -> None:
        self.sent.append(msg)

    async def recv(self) -> FromScheduler:
        msg = await self.inbox.get()
        if isinstance(msg, Exception):
            raise msg
        return msg

    def close(self) -> None:
        self.closed = True


def run_with_links(num_replicas: int, body: Any) -> None:
    async def main() -> None:
        links = [Link() for _ in range(num_replicas)]
        channel = ReplicaChannel(links, LoadBalancer(num_replicas))
        await asyncio.wait_for(body(channel, links), 10)
        channel.close()
        assert all(link.closed for link in links)

    asyncio.run(main())


def test_messages_find_their_replica() -> None:
    async def body(channel: ReplicaChannel, links: list[Link]) -> None:
        for rid in ("a", "b"):
            channel.send(request(rid))
        channel.send(AbortReq("b"))
        channel.send(AbortReq("unknown"))
        channel.send(AbortReq(None, abort_all=True))
        channel.send(ControlReq("q", "ping"))
        rest: list[ToScheduler] = [AbortReq(None, abort_all=True), ControlReq("q", "ping")]
        assert links[0].sent == [request("a"), *rest]
        assert links[1].sent == [request("b"), AbortReq("b"), *rest]
        out = BatchTokenOut((reply("b", 3),))
        links[1].inbox.put_nowait(out)
        assert await channel.recv() == out
        assert channel.num_replicas == 2

    run_with_links(2, body)


def test_a_replica_that_ends_takes_only_its_own_requests_along() -> None:
    async def body(channel: ReplicaChannel, links: list[Link]) -> None:
        for rid in ("a", "b"):
            channel.send(request(rid))
        links[0].inbox.put_nowait(BatchTokenOut((reply("a", 3),)))
        await channel.recv()
        channel.send(ControlReq("q", "ping"))
        channel.lose(0, "replica 0 was killed")
        lost = await channel.recv()
        assert isinstance(lost, BatchTokenOut)
        (out,) = lost.outs
        assert out.rid == "a" and out.completion_tokens == 3 and out.cached_tokens == 32 and not out.token_ids
        assert out.finish_reason == FinishReason("abort", message="replica 0 was killed", status=503)
        assert await channel.recv() == ControlReply("q", False, "replica 0 was killed", {}, replica=0, lost=True)
        assert channel.lost_replicas == {0: "replica 0 was killed"}
        links[0].inbox.put_nowait(BatchTokenOut((reply("a", 4),)))  # still in the pipe
        answer = ControlReply("q", ok=True, message="", data={})
        links[1].inbox.put_nowait(answer)
        assert await channel.recv() == replace(answer, replica=1)
        for i in range(3):
            channel.send(request(f"c{i}"))
        assert len(links[1].sent) == 5 and channel.num_replicas == 1

    run_with_links(2, body)


@pytest.mark.parametrize("flushed", [True, False])
def test_a_prefix_is_forgotten_with_the_cache_it_was_in(flushed: bool) -> None:
    async def body(channel: ReplicaChannel, links: list[Link]) -> None:
        channel.send(request("a", num_tokens=640))
        links[0].inbox.put_nowait(BatchTokenOut((reply("a", 10, ended=True),)))
        await channel.recv()
        channel.send(ControlReq("q", "flush_cache"))
        for link in links:
            link.inbox.put_nowait(ControlReply("q", ok=flushed, message="", data={}))
            await channel.recv()
        channel.send(request("b", num_tokens=640))
        # where the prefix is known, or else where it is the turn
        assert links[1 if flushed else 0].sent[-1] == request("b", num_tokens=640)

    run_with_links(2, body)


def test_a_broken_channel_is_told() -> None:
    async def body(channel: ReplicaChannel, links: list[Link]) -> None:
        links[1].inbox.put_nowait(OSError("broken pipe"))
        told = await channel.recv()
        assert isinstance(told, SchedulerReady) and "broken pipe" in str(told.error)

    run_with_links(2, body)


@pytest.mark.parametrize("method", ["auto", "round_robin"])
def test_lost_replicas_are_not_chosen(method: Any) -> None:
    balancer = LoadBalancer(3, method)
    balancer.lose(1)
    assert {balancer.choose(request(str(i))) for i in range(9)} == {0, 2} and balancer.alive == [0, 2]
