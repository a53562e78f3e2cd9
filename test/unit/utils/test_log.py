"""Logging set-up, in a process of its own because it replaces the handlers of the root logger."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from sglang.srt.utils.log import configure_logger


def stderr_of(program: str) -> str:
    command = [sys.executable, "-c", f"import logging\nfrom sglang.srt.utils.log import configure_logger\n{program}"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == ""
    return result.stderr


def test_level_and_format() -> None:
    text = stderr_of("configure_logger('info', 'TP0')\nlogging.info('shown')\nlogging.debug('hidden')")
    assert re.fullmatch(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d TP0\] shown\n", text)


def test_set_up_twice_writes_once() -> None:
    text = stderr_of("configure_logger('error')\nconfigure_logger('INFO')\nlogging.info('shown')")
    assert re.fullmatch(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] shown\n", text)


def test_unknown_level_is_a_sentence() -> None:
    with pytest.raises(ValueError, match="--log-level 'loud' is unknown; use one of debug, info"):
        configure_logger("loud")
