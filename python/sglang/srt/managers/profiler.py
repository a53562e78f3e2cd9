"""Traces of scheduler steps by torch's profiler, one file each, in one folder that only the server's owner chooses."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch.profiler import ProfilerActivity

from sglang.srt.utils.device import Device

logger = logging.getLogger(__name__)

Activity = Literal["CPU", "GPU"]
_ACTIVITIES = {"CPU": ProfilerActivity.CPU, "GPU": ProfilerActivity.CUDA}


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """``num_steps`` None: until it is stopped. ``start_step``: steps to let pass before."""

    num_steps: int | None = None
    start_step: int = 0
    activities: tuple[Activity, ...] = ("CPU", "GPU")
    with_stack: bool = False
    record_shapes: bool = False


class StepProfiler:
    """Used by the thread that runs the steps. ``folder`` None: there are no profiles."""

    def __init__(self, folder: Path | None, label: str, device: Device) -> None:
        self._folder = folder
        self._label = label
        self._device = device
        self._options: ProfileOptions | None = None
        self._profile: torch.profiler.profile | None = None
        self._steps_left = 0

    def start(self, options: ProfileOptions) -> str:
        """Where the trace will be. ``ValueError`` when there is no folder for it, or a profile runs already."""
        if self._folder is None:
            raise ValueError("profiles have no folder here: start the server with SGLANG_TORCH_PROFILER_DIR=DIRECTORY")
        if self._options is not None:
            raise ValueError("a profile is running already: stop it first")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"SGLANG_TORCH_PROFILER_DIR={self._folder} cannot be used: {error.strerror}") from error
        self._options, self._steps_left = options, options.start_step
        if not options.start_step:
            self._begin()
        return str(self._folder)

    def after_step(self) -> None:
        """Called after every step: begins and ends what was asked for."""
        if self._options is None:
            return
        self._steps_left -= 1
        if self._steps_left:  # a profile without end counts below zero
            return
        if self._profile is None:
            self._begin()
        else:
            self.stop()

    def stop(self) -> str:
        """Write the trace; the path of its file. ``ValueError`` when no profile runs, or its file cannot be written."""
        profile, self._profile, self._options = self._profile, None, None
        if profile is None:
            raise ValueError("no profile is running: start one with /start_profile, or it has ended by itself")
        assert self._folder is not None
        self._device.synchronize()
        profile.stop()
        path = self._folder / f"{time.time_ns()}-{self._label}.trace.json.gz"
        try:
            profile.export_chrome_trace(str(path))
        except OSError as error:
            raise ValueError(f"the trace {path} cannot be written: {error.strerror}") from error
        logger.info("Profile: %s", path)
        return str(path)

    def _begin(self) -> None:
        options = self._options
        assert options is not None
        self._steps_left = options.num_steps or 0
        kinds = [_ACTIVITIES[name] for name in options.activities if name == "CPU" or self._device.kind == "cuda"]
        self._profile = torch.profiler.profile(
            activities=kinds, with_stack=options.with_stack, record_shapes=options.record_shapes
        )
        self._profile.start()
