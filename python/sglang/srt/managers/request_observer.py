"""What the tokenizer manager tells whoever counts requests."""

from __future__ import annotations

from typing import Protocol

from sglang.srt.managers.generate_output import GenerateOutput


class RequestObserver(Protocol):
    """Called on the tokenizer manager's event loop, for each sequence. Must not raise and must not wait."""

    def received(self, output: GenerateOutput, since_s: float, *, stream: bool) -> None:
        """An output came, ``since_s`` seconds after the one before it, or after the arrival of the request. The last
        one of a sequence has a ``finish_reason``. Without ``stream`` there is only that one."""

    def left(self) -> None:
        """A sequence will get no further output, because its user went away."""
