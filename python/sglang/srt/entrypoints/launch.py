"""The scheduler in a process of its own: started, waited for, watched, and never left behind."""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable

from sglang.srt.managers.channel import ZmqManagerChannel
from sglang.srt.managers.io_struct import ControlReq, SchedulerReady
from sglang.srt.managers.scheduler import run_scheduler_process
from sglang.srt.managers.tokenizer_manager import SchedulerDiedError
from sglang.srt.server_args import PortArgs, ServerArgs

_PR_SET_PDEATHSIG = 1
_SHUTDOWN_S = 10.0
# an error that the scheduler sent just before it ended may still be on its way
_LAST_WORDS_S = 1.0


class SchedulerProcess:
    """Starts when made. ``stop`` must be called in the end; if this process dies first, the kernel ends the other."""

    def __init__(self, server_args: ServerArgs) -> None:
        self._port_args = PortArgs.init_new()
        self.channel = ZmqManagerChannel(self._port_args)
        # a fresh interpreter: a fork would copy the threads' locks of the libraries loaded here
        self._process = multiprocessing.get_context("spawn").Process(
            target=_run, args=(server_args, self._port_args, os.getpid()), name="sglang-scheduler", daemon=True
        )
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    async def wait_ready(self) -> SchedulerReady:
        """The scheduler's first message. ``SchedulerDiedError`` with the reason when the start failed."""
        ended = asyncio.Event()
        self.watch(lambda _: ended.set())
        message = asyncio.ensure_future(self.channel.recv())
        end = asyncio.ensure_future(ended.wait())
        await asyncio.wait((message, end), return_when=asyncio.FIRST_COMPLETED)
        if not message.done():
            await asyncio.wait((message,), timeout=_LAST_WORDS_S)
        end.cancel()
        self.unwatch()
        if not message.done():
            message.cancel()
            raise SchedulerDiedError(f"the scheduler did not start: {self._how_it_ended()}")
        ready = message.result()
        assert isinstance(ready, SchedulerReady), ready
        if ready.error is not None:
            raise SchedulerDiedError(ready.error)
        return ready

    def watch(self, on_end: Callable[[str], None]) -> None:
        """Call ``on_end`` with the cause, on the running loop, when the process ends."""
        loop = asyncio.get_running_loop()

        def ended() -> None:
            loop.remove_reader(self._process.sentinel)
            on_end(self._how_it_ended())

        loop.add_reader(self._process.sentinel, ended)

    def unwatch(self) -> None:
        asyncio.get_running_loop().remove_reader(self._process.sentinel)

    def stop(self) -> None:
        """Ask the process to end, insist, and wait until it has; then remove the sockets."""
        self.channel.send(ControlReq("shutdown", "shutdown"))
        self._process.join(_SHUTDOWN_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self.channel.close()
        self._port_args.remove()

    def _how_it_ended(self) -> str:
        self._process.join(_LAST_WORDS_S)
        code = self._process.exitcode
        if code is not None and code < 0:
            return f"the scheduler process was ended by {signal.Signals(-code).name}"
        return f"the scheduler process ended with exit status {code}; its log above says why"


def _run(server_args: ServerArgs, port_args: PortArgs, parent_pid: int) -> None:
    """Body of the process. Both signals often reach all processes of a server; the parent decides what they mean."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        return  # the parent died before the kernel knew whom to watch
    run_scheduler_process(server_args, port_args)
