"""What reaches the scheduler of rank 0 reaches the schedulers of all ranks, in the same turn of their loops.

So they queue, run and end the same requests in the same order. Only rank 0 replies.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from sglang.srt.distributed.parallel_state import TpGroup
from sglang.srt.managers.channel import MessageCodec, SchedulerChannel, ZmqOutbox
from sglang.srt.managers.io_struct import FromScheduler, SchedulerReady, ToScheduler

logger = logging.getLogger(__name__)

_LENGTH_BYTES = 4


class LeadingChannel:
    """Rank 0's channel: what it receives is passed on."""

    def __init__(self, channel: SchedulerChannel, group: TpGroup) -> None:
        self._channel = channel
        self._group = group
        self._codec = MessageCodec()

    def recv(self, timeout_s: float | None) -> list[ToScheduler]:
        messages: list[ToScheduler] = []

        def receive() -> bytes:
            messages.extend(self._channel.recv(timeout_s))
            return _join([self._codec.encode(message) for message in messages])

        self._group.share(receive)
        return messages

    def send(self, msg: FromScheduler) -> None:
        self._channel.send(msg)


class FollowingChannel:
    """The channel of any other rank: it receives what rank 0 does, and says nothing but why it did not start."""

    def __init__(self, outbox: ZmqOutbox, group: TpGroup) -> None:
        self._outbox = outbox
        self._group = group
        self._codec = MessageCodec()

    def recv(self, timeout_s: float | None) -> list[ToScheduler]:
        """Waits for rank 0's turn, however long that takes."""
        frames = self._group.share(lambda: b"")
        return [self._codec.decode(frame) for frame in _split(frames)]

    def send(self, msg: FromScheduler) -> None:
        if isinstance(msg, SchedulerReady) and msg.error is not None:
            logger.error("%s", msg.error)
            self._outbox.send(SchedulerReady({}, error=f"rank {self._group.rank}: {msg.error}"))


def make_tp_channel(outside: SchedulerChannel | ZmqOutbox, group: TpGroup) -> SchedulerChannel:
    """The channel of a rank's scheduler. ``outside`` leads to the tokenizer manager, both ways for rank 0 only."""
    if isinstance(outside, ZmqOutbox):
        return FollowingChannel(outside, group)
    return outside if group.size == 1 else LeadingChannel(outside, group)


def _join(frames: Sequence[bytes]) -> bytes:
    return b"".join(len(frame).to_bytes(_LENGTH_BYTES, "big") + frame for frame in frames)


def _split(frames: bytes) -> list[bytes]:
    found, at = [], 0
    while at < len(frames):
        end = at + _LENGTH_BYTES + int.from_bytes(frames[at : at + _LENGTH_BYTES], "big")
        found.append(frames[at + _LENGTH_BYTES : end])
        at = end
    return found
