"""Several schedulers behind one tokenizer manager: each request goes to one of them, every question to all."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence

from sglang.srt.managers.channel import ManagerChannel
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenOut,
    ControlAction,
    ControlReply,
    ControlReq,
    FinishReason,
    FromScheduler,
    SchedulerReady,
    TokenizedGenerateReqInput,
    TokenOut,
    ToScheduler,
)
from sglang.srt.managers.load_balancer import LoadBalancer

_UNAVAILABLE = 503
_EMPTY_THE_CACHE: tuple[ControlAction, ...] = ("flush_cache", "update_weights")


class ReplicaChannel:
    """The tokenizer manager's end of a channel to several schedulers, used from one event loop.

    A ``ControlReq`` is answered by ``num_replicas`` replies, one of each replica that lives.
    """

    def __init__(self, channels: Sequence[ManagerChannel], balancer: LoadBalancer) -> None:
        self._channels = channels
        self._balancer = balancer
        self._arrived: asyncio.Queue[FromScheduler] = asyncio.Queue()
        self._pumps: list[asyncio.Task[None]] = []
        # what the replicas that live were asked and have not answered, by request id
        self._asked: dict[int, dict[str, ControlAction]] = {replica: {} for replica in range(len(channels))}
        self._lost: dict[int, str] = {}

    @property
    def num_replicas(self) -> int:
        return len(self._asked)

    @property
    def lost_replicas(self) -> Mapping[int, str]:
        return self._lost

    def send(self, msg: ToScheduler) -> None:
        if isinstance(msg, TokenizedGenerateReqInput):
            self._channels[self._balancer.choose(msg)].send(msg)
        elif isinstance(msg, AbortReq) and msg.rid is not None:
            replica = self._balancer.replica_of(msg.rid)
            if replica is not None:
                self._channels[replica].send(msg)
        else:
            for replica in self._balancer.alive:
                if isinstance(msg, ControlReq):
                    self._asked[replica][msg.request_id] = msg.action
                self._channels[replica].send(msg)

    async def recv(self) -> FromScheduler:
        if not self._pumps:
            self._pumps = [asyncio.ensure_future(self._pump(i, channel)) for i, channel in enumerate(self._channels)]
            for pump in self._pumps:
                pump.add_done_callback(self._pump_ended)
        return await self._arrived.get()

    def lose(self, replica: int, cause: str) -> None:
        """``replica`` ended: its requests fail with ``cause``, and nothing is sent there any more."""
        self._lost[replica] = cause
        outs = tuple(_lost(req, last, cause) for req, last in self._balancer.lose(replica))
        if outs:
            self._arrived.put_nowait(BatchTokenOut(outs))
        for request_id in self._asked.pop(replica):
            self._arrived.put_nowait(ControlReply(request_id, False, cause, {}, replica, lost=True))

    def close(self) -> None:
        for pump in self._pumps:
            pump.cancel()
        for channel in self._channels:
            channel.close()

    async def _pump(self, replica: int, channel: ManagerChannel) -> None:
        while replica in self._asked:
            msg = await channel.recv()
            if replica not in self._asked:
                return  # last words of a replica that was given up
            if isinstance(msg, SchedulerReady):
                continue  # its last word: whoever watches the process tells why it ended
            if isinstance(msg, BatchTokenOut):
                for out in msg.outs:
                    self._balancer.received(out)
            else:
                action = self._asked[replica].pop(msg.request_id, None)
                if msg.ok and action in _EMPTY_THE_CACHE:
                    self._balancer.forget_prefixes(replica)
                msg = dataclasses.replace(msg, replica=replica)
            self._arrived.put_nowait(msg)

    def _pump_ended(self, pump: asyncio.Task[None]) -> None:
        """Nobody awaits a pump: whatever broke it must reach the tokenizer manager."""
        error = None if pump.cancelled() else pump.exception()
        if error is not None:
            self._arrived.put_nowait(SchedulerReady({}, f"receiving from a replica failed: {error!r}"))


def _lost(req: TokenizedGenerateReqInput, last: TokenOut | None, cause: str) -> TokenOut:
    """The final reply of a request that nobody computes any more."""
    return TokenOut(
        rid=req.rid,
        token_ids=(),
        finish_reason=FinishReason("abort", message=cause, status=_UNAVAILABLE),
        prompt_tokens=len(req.input_ids),
        completion_tokens=0 if last is None else last.completion_tokens,
        cached_tokens=0 if last is None else last.cached_tokens,
        spec=None if last is None else last.spec,
        queue_time_s=0.0 if last is None else last.queue_time_s,
    )
