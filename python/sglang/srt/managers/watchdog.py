"""Notices when the scheduler's loop hangs: which stage it is in, for how long, and where its threads are."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Literal, NamedTuple

logger = logging.getLogger(__name__)

Stage = Literal["receive", "schedule", "forward", "apply", "reply"]

# exit status of a scheduler that was ended because it hung
HUNG_EXIT_STATUS = 86
_LOOKS_PER_TIMEOUT = 4
_LONGEST_PAUSE_S = 5.0


class StageEntry(NamedTuple):
    """``stage`` is None where waiting is no fault: for messages, or for work that somebody asked to be done."""

    stage: Stage | None
    since_s: float


class Stages:
    """Where the loop is. Written by its thread and read by others, one reference at a time."""

    def __init__(self) -> None:
        self.current = StageEntry(None, time.monotonic())

    def enter(self, stage: Stage | None) -> None:
        self.current = StageEntry(stage, time.monotonic())


class Watchdog:
    """A thread that calls ``on_hang`` once for every stage that lasts longer than ``timeout_s``."""

    def __init__(self, stages: Stages, timeout_s: float, on_hang: Callable[[Stage, float], None]) -> None:
        self._stages = stages
        self._timeout_s = timeout_s
        self._on_hang = on_hang
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sglang-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        told: StageEntry | None = None
        while not self._stopped.wait(min(self._timeout_s / _LOOKS_PER_TIMEOUT, _LONGEST_PAUSE_S)):
            entry = self._stages.current
            lasted_s = time.monotonic() - entry.since_s
            if entry.stage is not None and entry is not told and lasted_s > self._timeout_s:
                told = entry
                self._on_hang(entry.stage, lasted_s)


def report_hang(stage: Stage, lasted_s: float) -> None:
    """Log the stage and the stacks of all threads."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = [
        f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    ]
    logger.error("the scheduler hangs in stage %s, for %.1f s now\n%s", stage, lasted_s, "\n".join(stacks))


def report_hang_and_exit(stage: Stage, lasted_s: float) -> None:
    """The last thing a hung scheduler process does; whoever started it notices the end."""
    report_hang(stage, lasted_s)
    os._exit(HUNG_EXIT_STATUS)
