"""Every environment variable the engine reads, in one table. No other module looks at ``os.environ``."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EnvVar(Generic[T]):
    """One variable. ``get`` reads it when called, so a test or a parent process may set it after import."""

    name: str
    default: T
    parse: Callable[[str], T]
    help: str

    def get(self) -> T:
        """Value, or the default when unset or empty. ValueError names the variable when the text does not parse."""
        text = os.environ.get(self.name, "")
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError as err:
            raise ValueError(f"environment variable {self.name}={text!r}: {err}") from err


def parse_bool(text: str) -> bool:
    """1/0, true/false, yes/no or on/off in any case; ValueError otherwise."""
    value = text.strip().lower()
    if value in ("1", "true", "yes", "on"):
        return True
    if value in ("0", "false", "no", "off"):
        return False
    raise ValueError("use 1 or 0")


SGLANG_DEBUG_KV_DIGEST = EnvVar(
    name="SGLANG_DEBUG_KV_DIGEST",
    default=False,
    parse=parse_bool,
    help="digest every target KV buffer before and after a draft, and fail if it changed",
)

SGLANG_DEBUG_TP_CONSISTENCY = EnvVar(
    name="SGLANG_DEBUG_TP_CONSISTENCY",
    default=False,
    parse=parse_bool,
    help="compare drafted and accepted tokens of all ranks in every step, and fail if they differ",
)

SGLANG_SPEC_SEPARATE_GRAPHS = EnvVar(
    name="SGLANG_SPEC_SEPARATE_GRAPHS",
    default=False,
    parse=parse_bool,
    help="capture draft loop, verification and acceptance of a round as graphs of their own",
)

SGLANG_SIMULATE_ACC_LEN = EnvVar(
    name="SGLANG_SIMULATE_ACC_LEN",
    default=0.0,
    parse=float,
    help="tokens that each round accepts on average, whatever the target says; for measurements, answers are wrong",
)

SGLANG_CPU_THREADS = EnvVar(
    name="SGLANG_CPU_THREADS",
    default=0,
    parse=int,
    help="threads an engine on a CPU computes with; 0: all cores but one, which tokenizing and HTTP need",
)

SGLANG_GRAMMAR_TIMEOUT = EnvVar(
    name="SGLANG_GRAMMAR_TIMEOUT",
    default=60.0,
    parse=float,
    help="seconds a request waits for its grammar to be compiled before it is refused",
)

SGLANG_TORCH_PROFILER_DIR: EnvVar[Path | None] = EnvVar(
    name="SGLANG_TORCH_PROFILER_DIR",
    default=None,
    parse=Path,
    help="folder that /start_profile writes traces to; without it there are no profiles",
)

ENVIRONMENT: tuple[EnvVar, ...] = (
    SGLANG_DEBUG_KV_DIGEST,
    SGLANG_DEBUG_TP_CONSISTENCY,
    SGLANG_SPEC_SEPARATE_GRAPHS,
    SGLANG_SIMULATE_ACC_LEN,
    SGLANG_CPU_THREADS,
    SGLANG_GRAMMAR_TIMEOUT,
    SGLANG_TORCH_PROFILER_DIR,
)


def disable_multicast() -> None:
    """GPU memory that processes share through PyTorch is not made multicast as well, unless the user wants it: nothing
    here uses that, and the hardware has few such objects for all who share a machine."""
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
