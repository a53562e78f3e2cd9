"""The door of the tokenizer manager: requests pass, wait for a reason that will end, or are turned away for good."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

PAUSED = "generation is paused: POST /continue_generation lets requests through"


class RefusedError(RuntimeError):
    """No request is taken any more, because the server is about to end."""


class Intake:
    """Closed while there is a reason for it. Used on one event loop."""

    def __init__(self) -> None:
        self._reasons: list[str] = []
        self._refusal: str | None = None
        self._changed = asyncio.Event()

    @property
    def closed_because(self) -> str | None:
        """Why a new request would not be served now; None when it would."""
        return self._refusal or next(iter(self._reasons), None)

    def close(self, reason: str) -> None:
        if reason not in self._reasons:
            self._reasons.append(reason)

    def open(self, reason: str) -> None:
        """Take one reason back. Those who waited pass first if it was the last."""
        if reason in self._reasons:
            self._reasons.remove(reason)
            self._wake()

    @contextmanager
    def closed(self, reason: str) -> Iterator[None]:
        """Closed for ``reason`` inside the block."""
        self.close(reason)
        try:
            yield
        finally:
            self.open(reason)

    def refuse(self, reason: str) -> None:
        """Turn away all that wait and all that come."""
        self._refusal = reason
        self._wake()

    async def enter(self) -> None:
        """Wait as long as there is a reason to. ``RefusedError`` when all are turned away."""
        while self._refusal is None and self._reasons:
            await self._changed.wait()
        if self._refusal is not None:
            raise RefusedError(self._refusal)

    def _wake(self) -> None:
        """Let all who wait look again."""
        self._changed.set()
        self._changed = asyncio.Event()
