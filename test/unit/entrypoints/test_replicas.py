"""Replicas as one: when they are ready, what happens when one ends, and how they stop. The processes are made up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from sglang.srt.entrypoints import replicas
from sglang.srt.entrypoints.replicas import Replicas
from sglang.srt.managers.io_struct import SchedulerReady
from sglang.srt.managers.tokenizer_manager import SchedulerDiedError
from sglang.srt.server_args import ServerArgs

ARGS = ServerArgs(model_path="tiny-gemma4", dp_size=3, random_seed=(1 << 31) - 2)


class Process:
    """A ``SchedulerProcess`` that runs nothing and notes what it is told."""

    def __init__(self, args: ServerArgs, replica: int) -> None:
        self.args, self.replica, self.channel, self.told = args, replica, self, list[str]()
        self.error: str | None = None
        self.on_end: Callable[[str], None] | None = None

    async def wait_ready(self) -> SchedulerReady:
        await asyncio.sleep(0 if self.error else 0.01)
        if self.error is not None:
            raise SchedulerDiedError(self.error)
        return SchedulerReady({"max_total_num_tokens": 100 - self.replica})

    def watch(self, on_end: Callable[[str], None]) -> None:
        self.on_end = on_end

    def unwatch(self) -> None:
        self.on_end = None

    def note(self, what: str) -> Callable[[], None]:
        return lambda: self.told.append(what)

    def __getattr__(self, name: str) -> Callable[[], None]:
        if name not in ("ask_to_stop", "stop", "kill", "close"):
            raise AttributeError(name)
        return self.note(name)

    def end(self, cause: str) -> None:
        assert self.on_end is not None
        self.on_end(cause)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    processes: list[Process] = []

    def make(*args: Any) -> Process:
        processes.append(Process(*args))
        return processes[-1]

    monkeypatch.setattr(replicas, "SchedulerProcess", make)
    return processes


def test_the_smallest_limits_hold_and_seeds_differ(made: list[Process]) -> None:
    ready = asyncio.run(Replicas(ARGS).wait_ready())
    assert ready.info == {"max_total_num_tokens": 98}
    assert [process.args.random_seed for process in made] == [(1 << 31) - 2, (1 << 31) - 1, 0]


def test_one_that_does_not_start_is_the_error_of_all(made: list[Process]) -> None:
    group = Replicas(ARGS)
    made[1].error = "the weights are gone"
    with pytest.raises(SchedulerDiedError, match="the weights are gone"):
        asyncio.run(group.wait_ready())


def test_the_last_one_that_ends_ends_all(made: list[Process], caplog: pytest.LogCaptureFixture) -> None:
    group, ends = Replicas(ARGS), list[str]()
    group.watch(ends.append)
    with caplog.at_level(logging.ERROR):
        made[1].end("it was ended by SIGKILL")
    assert "replica 1: it was ended by SIGKILL; its requests fail, 2 of 3 replicas go on" in caplog.text
    assert group.channel.num_replicas == 2 and made[1].told == ["kill"] and not ends
    made[2].end("it hung")
    group.unwatch()
    assert made[0].on_end is None
    group.watch(ends.append)
    made[0].end("it hung, too")
    assert ends == ["all 3 replicas have ended, the last one was replica 0: it hung, too"]
    assert dict(group.channel.lost_replicas)[2] == "replica 2: it hung"


def test_they_stop_at_once(made: list[Process]) -> None:
    group = Replicas(ARGS)
    group.stop()
    assert all(process.told == ["ask_to_stop", "stop", "close"] for process in made)
