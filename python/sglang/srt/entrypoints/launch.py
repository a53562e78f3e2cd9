"""The scheduler in a process of its own: started, waited for, watched, and never left behind."""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from sglang.srt.distributed.lockstep import RANK_LOST_EXIT_STATUS
from sglang.srt.distributed.parallel_state import TpRank
from sglang.srt.managers.channel import ZmqManagerChannel
from sglang.srt.managers.io_struct import ControlReq, SchedulerReady
from sglang.srt.managers.scheduler import run_scheduler_process
from sglang.srt.managers.tokenizer_manager import SchedulerDiedError
from sglang.srt.managers.watchdog import HUNG_EXIT_STATUS
from sglang.srt.server_args import PortArgs, ServerArgs

_PR_SET_PDEATHSIG = 1
_SHUTDOWN_S = 10.0
# an error that the scheduler sent just before it ended may still be on its way
_LAST_WORDS_S = 1.0


class SchedulerProcess:
    """The scheduler of every rank on this machine, each in a process of its own. They start when this is made.

    ``replica``: which of ``--dp-size``. ``stop`` must be called in the end; if this process dies first, the kernel ends
    the others.
    """

    def __init__(self, server_args: ServerArgs, replica: int = 0) -> None:
        self._port_args = PortArgs.init_new()
        self.channel = ZmqManagerChannel(self._port_args)
        self._asked_to_stop = False
        # a fresh interpreter: a fork would copy the threads' locks of the libraries loaded here
        context = multiprocessing.get_context("spawn")
        self._ranks = {
            rank.rank: context.Process(
                target=_run,
                args=(server_args, self._port_args, rank, replica, os.getpid()),
                name=f"sglang-scheduler-{replica}-{rank.rank}",
                daemon=True,
            )
            for rank in _ranks_here(server_args, replica, self._port_args.folder)
        }
        for process in self._ranks.values():
            process.start()

    @property
    def pid(self) -> int:
        """Of the first rank here."""
        pid = next(iter(self._ranks.values())).pid
        assert pid is not None
        return pid

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
        """Call ``on_end`` with the cause, on the running loop, when one of the processes ends."""

        def ended() -> None:
            self.unwatch()
            on_end(self._how_it_ended())

        for process in self._ranks.values():
            asyncio.get_running_loop().add_reader(process.sentinel, ended)

    def unwatch(self) -> None:
        for process in self._ranks.values():
            asyncio.get_running_loop().remove_reader(process.sentinel)

    @property
    def has_failed(self) -> bool:
        """Whether a process has ended otherwise than it should."""
        return any(process.exitcode not in (None, 0) for process in self._ranks.values())

    @property
    def _has_ended(self) -> bool:
        return any(process.exitcode is not None for process in self._ranks.values())

    def stop(self) -> None:
        """``ask_to_stop``, insist, and wait until the processes have ended; then remove the sockets."""
        self.ask_to_stop()
        # where one has failed, the others would wait for it; and only rank 0 can be asked
        if not self.has_failed and (0 in self._ranks or self._has_ended):
            deadline = time.monotonic() + _SHUTDOWN_S
            for process in self._ranks.values():
                process.join(max(0.0, deadline - time.monotonic()))
        self.kill()
        for process in self._ranks.values():
            process.join()
        self.channel.close()
        self._port_args.remove()

    def ask_to_stop(self) -> None:
        """Begin to stop, so that several can do so at once."""
        if 0 in self._ranks and not self._asked_to_stop:
            self._asked_to_stop = True
            self.channel.send(ControlReq("shutdown", "shutdown"))

    def kill(self) -> None:
        """End the processes that have not ended."""
        for process in self._ranks.values():
            if process.is_alive():
                process.kill()

    def _how_it_ended(self) -> str:
        """Of the process that ended first, as far as can be told: one that a signal ended did not follow another."""
        ended = multiprocessing.connection.wait([process.sentinel for process in self._ranks.values()], _LAST_WORDS_S)
        for process in self._ranks.values():
            if process.sentinel in ended:
                process.join()
        codes = {rank: process.exitcode for rank, process in self._ranks.items() if process.exitcode is not None}
        followed = (0, RANK_LOST_EXIT_STATUS)
        rank, code = min(codes.items(), key=lambda item: (item[1] >= 0, item[1] in followed), default=(0, None))
        of_rank = "" if len(self._ranks) == 1 else f" of rank {rank}"
        if code is not None and code < 0:
            return f"the scheduler process{of_rank} was ended by {signal.Signals(-code).name}"
        if code == RANK_LOST_EXIT_STATUS:
            return "a rank of another machine has ended or is out of reach; the log above names it"
        if code == HUNG_EXIT_STATUS:
            fate = "hung for longer than --watchdog-timeout and was ended; its log above names the stage"
            return f"the scheduler{of_rank} {fate}"
        return f"the scheduler process{of_rank} ended with exit status {code}; its log above says why"


def compute_only(server_args: ServerArgs) -> None:
    """Run the ranks of a machine that does not serve, until those of machine 0 end, or SIGINT or SIGTERM comes.

    ``SystemExit`` with status 1 and one sentence on stderr when one of them ends otherwise.
    """
    cause = asyncio.run(_compute_only(server_args))
    if cause is not None:
        print(f"error: {cause}", file=sys.stderr, flush=True)
        raise SystemExit(1)


async def _compute_only(server_args: ServerArgs) -> str | None:
    causes: asyncio.Queue[str | None] = asyncio.Queue()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, causes.put_nowait, None)
    scheduler = SchedulerProcess(server_args)
    try:
        scheduler.watch(causes.put_nowait)
        cause = await causes.get()
        return cause if scheduler.has_failed else None
    finally:
        scheduler.stop()


def _ranks_here(args: ServerArgs, replica: int, folder: Path) -> list[TpRank]:
    """``folder``: where the ranks of a single machine meet. Replicas take devices one after the other."""
    num = args.tp_size // args.nnodes
    rendezvous = f"file://{folder}/rendezvous" if args.dist_init_addr is None else f"tcp://{args.dist_init_addr}"
    first = args.node_rank * num
    return [
        TpRank(
            first + i,
            args.tp_size,
            replica * num + i,
            args.dp_size * num,
            rendezvous,
            args.dist_timeout,
            not args.disable_custom_all_reduce,
        )
        for i in range(num)
    ]


def _run(server_args: ServerArgs, port_args: PortArgs, rank: TpRank, replica: int, parent_pid: int) -> None:
    """Body of the process. Both signals often reach all processes of a server; the parent decides what they mean."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        return  # the parent died before the kernel knew whom to watch
    run_scheduler_process(server_args, port_args, rank, replica)
