"""Logging set-up: one handler on the root logger, one line format for every process."""

from __future__ import annotations

import logging
import sys

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


def configure_logger(log_level: str, prefix: str = "") -> None:
    """Send log records of ``log_level`` and above to stderr as ``[2026-01-31 12:00:00 PREFIX] message``.

    ``prefix`` names the process when there are several. Calling again replaces the earlier set-up.
    ValueError when the level is unknown.
    """
    if log_level.lower() not in LOG_LEVELS:
        raise ValueError(f"--log-level {log_level!r} is unknown; use one of {', '.join(LOG_LEVELS)}")
    label = f" {prefix}" if prefix else ""
    logging.basicConfig(
        level=log_level.upper(),
        format=f"[%(asctime)s{label}] %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
        stream=sys.stderr,
        force=True,
    )


def bare_logger(name: str) -> logging.Logger:
    """A logger whose lines on stderr are its messages and nothing else, for records that programs read."""
    logger = logging.getLogger(name)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.handlers, logger.propagate = [handler], False
    return logger
