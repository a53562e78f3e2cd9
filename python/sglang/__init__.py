"""A compact serving engine for Gemma 4 with frozen-KV multi-token prediction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.version import __version__

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine

__all__ = ["Engine", "__version__"]


def __getattr__(name: str) -> Any:
    # loaded when asked for: every import of a module below this package passes through here
    if name == "Engine":
        from sglang.srt.entrypoints.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
