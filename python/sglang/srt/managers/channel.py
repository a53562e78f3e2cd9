"""How the tokenizer manager and the scheduler talk: through memory between threads, through ZMQ between processes.

Both ends are symmetrical in meaning: messages arrive whole, in order, each once. Waiting uses no CPU.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol

from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenOut,
    ControlReply,
    ControlReq,
    FromScheduler,
    SchedulerReady,
    TokenizedGenerateReqInput,
    ToScheduler,
)

if TYPE_CHECKING:
    from sglang.srt.server_args import PortArgs


class SchedulerChannel(Protocol):
    """The scheduler's end, used from one thread."""

    def recv(self, timeout_s: float | None) -> list[ToScheduler]:
        """All messages waiting. None blocks until there is one, 0 does not block, otherwise at most that long."""

    def send(self, msg: FromScheduler) -> None: ...


class ManagerChannel(Protocol):
    """The tokenizer manager's end, used from one event loop."""

    @property
    def num_replicas(self) -> int:
        """Schedulers that reply to a ``ControlReq``."""

    @property
    def lost_replicas(self) -> Mapping[int, str]:
        """Schedulers that ended while others go on, each with the cause."""

    def send(self, msg: ToScheduler) -> None: ...

    async def recv(self) -> FromScheduler: ...

    def close(self) -> None: ...


class _ToOneScheduler:
    """What a ``ManagerChannel`` says that leads to one scheduler."""

    @property
    def num_replicas(self) -> int:
        return 1

    @property
    def lost_replicas(self) -> Mapping[int, str]:
        return {}


class MemorySchedulerChannel:
    """Scheduler's end between two threads of a process."""

    def __init__(self, inbox: queue.SimpleQueue[ToScheduler], manager: MemoryManagerChannel) -> None:
        self._inbox = inbox
        self._manager = manager

    def recv(self, timeout_s: float | None) -> list[ToScheduler]:
        msgs: list[ToScheduler] = []
        try:
            if timeout_s != 0:
                msgs.append(self._inbox.get(timeout=timeout_s))
            while True:
                msgs.append(self._inbox.get_nowait())
        except queue.Empty:
            return msgs

    def send(self, msg: FromScheduler) -> None:
        self._manager.deliver(msg)


class MemoryManagerChannel(_ToOneScheduler):
    """Manager's end between two threads of a process; ``loop`` is the event loop that receives."""

    def __init__(self, inbox: queue.SimpleQueue[ToScheduler], loop: asyncio.AbstractEventLoop) -> None:
        self._scheduler_inbox = inbox
        self._loop = loop
        self._arrived: asyncio.Queue[FromScheduler] = asyncio.Queue()

    def send(self, msg: ToScheduler) -> None:
        self._scheduler_inbox.put(msg)

    async def recv(self) -> FromScheduler:
        return await self._arrived.get()

    def deliver(self, msg: FromScheduler) -> None:
        """Called in the scheduler's thread."""
        self._loop.call_soon_threadsafe(self._arrived.put_nowait, msg)

    def close(self) -> None:
        """Nothing to release."""


def make_memory_channel(loop: asyncio.AbstractEventLoop) -> tuple[MemorySchedulerChannel, MemoryManagerChannel]:
    """Both ends of a channel between a scheduler thread and ``loop``."""
    inbox: queue.SimpleQueue[ToScheduler] = queue.SimpleQueue()
    manager = MemoryManagerChannel(inbox, loop)
    return MemorySchedulerChannel(inbox, manager), manager


class ZmqSchedulerChannel:
    """Scheduler's end between two processes."""

    def __init__(self, port_args: PortArgs) -> None:
        self._inbox = _Socket("PULL", port_args.scheduler_input_ipc)
        self._outbox = _Socket("PUSH", port_args.tokenizer_ipc)

    def recv(self, timeout_s: float | None) -> list[ToScheduler]:
        msgs: list[ToScheduler] = []
        if timeout_s != 0:
            self._inbox.wait(timeout_s)
        while self._inbox.has_message():
            msgs.append(self._inbox.take())
        return msgs

    def send(self, msg: FromScheduler) -> None:
        self._outbox.put(msg)

    def close(self) -> None:
        """Deliver what was sent and release the sockets."""
        self._inbox.close()
        self._outbox.close()


class ZmqOutbox:
    """The sending half of ``ZmqSchedulerChannel``, of which there may be several."""

    def __init__(self, port_args: PortArgs) -> None:
        self._outbox = _Socket("PUSH", port_args.tokenizer_ipc)

    def send(self, msg: FromScheduler) -> None:
        self._outbox.put(msg)

    def close(self) -> None:
        self._outbox.close()


class ZmqManagerChannel(_ToOneScheduler):
    """Manager's end between two processes."""

    def __init__(self, port_args: PortArgs) -> None:
        self._outbox = _Socket("PUSH", port_args.scheduler_input_ipc)
        self._inbox = _Socket("PULL", port_args.tokenizer_ipc)
        self._watching: asyncio.AbstractEventLoop | None = None
        self._readable = asyncio.Event()

    def send(self, msg: ToScheduler) -> None:
        self._outbox.put(msg)

    async def recv(self) -> FromScheduler:
        if self._watching is None:
            self._watching = asyncio.get_running_loop()
            self._watching.add_reader(self._inbox.fd, self._readable.set)
        # The descriptor reports changes, not messages: sleep only after the socket itself said it has none.
        while not self._inbox.has_message():
            self._readable.clear()
            await self._readable.wait()
        msg: FromScheduler = self._inbox.take()
        return msg

    def close(self) -> None:
        if self._watching is not None:
            self._watching.remove_reader(self._inbox.fd)
            self._watching = None
        self._inbox.close()
        self._outbox.close()


# time for messages already sent to reach the other process after close
_LINGER_MS = 500

# A message on the wire is the index of its type here, one byte, and its fields in MessagePack.
_MESSAGE_TYPES = (TokenizedGenerateReqInput, AbortReq, ControlReq, BatchTokenOut, ControlReply, SchedulerReady)


class MessageCodec:
    """Messages as bytes."""

    def __init__(self) -> None:
        import msgspec  # an in-process engine of one rank runs without it

        self._encoder = msgspec.msgpack.Encoder()
        self._decoders = tuple(msgspec.msgpack.Decoder(cls) for cls in _MESSAGE_TYPES)
        self._codes = {cls: bytes([code]) for code, cls in enumerate(_MESSAGE_TYPES)}

    def encode(self, msg: ToScheduler | FromScheduler) -> bytes:
        return self._codes[type(msg)] + self._encoder.encode(msg)

    def decode(self, frame: bytes | memoryview) -> Any:
        return self._decoders[frame[0]].decode(memoryview(frame)[1:])


class _Socket:
    """One direction between two processes: a ZMQ socket that carries our messages and never drops or limits them."""

    def __init__(self, kind: Literal["PUSH", "PULL"], address: str) -> None:
        import zmq  # an in-process engine runs without it

        self._codec = MessageCodec()
        self._pollin = zmq.POLLIN
        self._socket: Any = zmq.Context.instance().socket(zmq.PUSH if kind == "PUSH" else zmq.PULL)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        # The receiver binds: a sender that connects queues its messages while the other process is not there (yet, or
        # any more), one that binds would block.
        if kind == "PULL":
            self._socket.bind(address)
        else:
            self._socket.connect(address)

    @property
    def fd(self) -> int:
        """Descriptor that becomes readable when the state of the socket changed."""
        fd: int = self._socket.fd
        return fd

    def put(self, msg: ToScheduler | FromScheduler) -> None:
        self._socket.send(self._codec.encode(msg))

    def take(self) -> Any:
        """The next message; waits when there is none."""
        return self._codec.decode(self._socket.recv())

    def has_message(self) -> bool:
        return bool(self._socket.events & self._pollin)

    def wait(self, timeout_s: float | None) -> None:
        """Block until there is a message, or the time is over."""
        self._socket.poll(None if timeout_s is None else round(timeout_s * 1000), self._pollin)

    def close(self) -> None:
        self._socket.close()
