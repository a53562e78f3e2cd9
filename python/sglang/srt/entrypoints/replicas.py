"""Several schedulers that serve the same model, as one: started, watched and stopped together, lost one by one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from sglang.srt.entrypoints.launch import SchedulerProcess
from sglang.srt.managers.io_struct import SchedulerReady
from sglang.srt.managers.load_balancer import LoadBalancer
from sglang.srt.managers.replica_channel import ReplicaChannel
from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

_NUM_SEEDS = 1 << 31


class Replicas:
    """``--dp-size`` times what ``SchedulerProcess`` is, with its methods. They start when this is made."""

    def __init__(self, server_args: ServerArgs) -> None:
        if server_args.device == "cpu":
            logger.info("%d replicas share the memory and the cores of this machine equally", server_args.dp_size)
        assert server_args.random_seed is not None, "arguments are not resolved"
        # requests without seeds must not draw the same numbers everywhere
        seeds = [(server_args.random_seed + replica) % _NUM_SEEDS for replica in range(server_args.dp_size)]
        self._replicas = [
            SchedulerProcess(server_args.derive(random_seed=seed), replica) for replica, seed in enumerate(seeds)
        ]
        balancer = LoadBalancer(server_args.dp_size, server_args.load_balance_method)
        self.channel = ReplicaChannel([scheduler.channel for scheduler in self._replicas], balancer)
        self._living = set(range(server_args.dp_size))

    async def wait_ready(self) -> SchedulerReady:
        """Until all are ready; the first message of the one with the least memory, whose limits all can keep.

        ``SchedulerDiedError`` with the reason when the start of one failed.
        """
        waiting = [asyncio.ensure_future(scheduler.wait_ready()) for scheduler in self._replicas]
        try:
            ready = await asyncio.gather(*waiting)
        finally:
            for task in waiting:
                task.cancel()
        return min(ready, key=lambda message: int(message.info["max_total_num_tokens"]))

    def watch(self, on_end: Callable[[str], None]) -> None:
        """Call ``on_end`` with the cause, on the running loop, when the last replica ends."""
        for replica, scheduler in enumerate(self._replicas):
            scheduler.watch(partial(self._replica_ended, replica, on_end))

    def unwatch(self) -> None:
        for replica in self._living:
            self._replicas[replica].unwatch()

    def stop(self) -> None:
        """As ``SchedulerProcess.stop``, all at once."""
        for scheduler in self._replicas:
            scheduler.ask_to_stop()
        for scheduler in self._replicas:
            scheduler.stop()
        self.channel.close()

    def _replica_ended(self, replica: int, on_end: Callable[[str], None], cause: str) -> None:
        text = f"replica {replica}: {cause}"
        self._living.discard(replica)
        self._replicas[replica].kill()  # a rank without the others is of no use
        self.channel.lose(replica, text)
        if self._living:
            logger.error("%s; its requests fail, %d of %d replicas go on", text, len(self._living), len(self._replicas))
        else:
            on_end(f"all {len(self._replicas)} replicas have ended, the last one was {text}")


Schedulers = SchedulerProcess | Replicas


def start_schedulers(server_args: ServerArgs) -> Schedulers:
    """In processes of their own, as many as the resolved arguments ask for."""
    return Replicas(server_args) if server_args.dp_size > 1 else SchedulerProcess(server_args)
