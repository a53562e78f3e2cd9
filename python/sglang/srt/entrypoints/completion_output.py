"""How a text completion looks: echoed prompts, texts and log-probabilities, whole or as they grow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.entrypoints.openai_logprobs import TextLogprobs, joined_logprobs
from sglang.srt.entrypoints.openai_replies import end_fields, hidden_fields
from sglang.srt.managers.detokenizer_manager import TokenPieces
from sglang.srt.managers.generate_output import GenerateOutput


@dataclass(frozen=True, slots=True)
class TextFormat:
    """How the choices of one request look. ``echoes``: what each prompt adds before its answers, None to add nothing.

    ``hidden_ids``: tokens that texts do not show.
    """

    num_samples: int
    echoes: tuple[str, ...] | None
    hidden_ids: frozenset[int]


def echo_of(prompt: str | Sequence[int], pieces: TokenPieces, hidden_ids: frozenset[int]) -> str:
    """A prompt as text: as it was given, or what its tokens say."""
    if isinstance(prompt, str):
        return prompt
    return b"".join(pieces.piece(i) for i in prompt if i not in hidden_ids).decode(errors="replace")


class TextShape:
    """See ``openai_serving``: one for each request, since answers are read piece by piece."""

    id_prefix, whole, piece = "cmpl", "text_completion", "text_completion"
    reasoning_tokens = 0

    def __init__(self, text_format: TextFormat, pieces: TokenPieces) -> None:
        self._format = text_format
        self._pieces = pieces
        self._answers: dict[int, _TextAnswer] = {}

    def choice(self, out: GenerateOutput) -> dict[str, Any]:
        return self._answer(out.index).choice(out)

    def pieces(self, out: GenerateOutput, is_first: bool) -> list[dict[str, Any]]:
        """Tokens that show nothing yet wait for the next piece."""
        answer = self._answer(out.index)
        if out.text or out.finish_reason is not None or is_first and answer.echo:
            return [answer.choice(out)]
        answer.wait(out)
        return []

    def _answer(self, index: int) -> _TextAnswer:
        if index not in self._answers:
            echoes = self._format.echoes
            echo = "" if echoes is None else echoes[index // self._format.num_samples]
            logprobs = TextLogprobs(self._pieces, self._format.hidden_ids)
            self._answers[index] = _TextAnswer(echo, logprobs)
        return self._answers[index]


class _TextAnswer:
    """One answer as it is read. ``echo`` is what still has to be shown before it."""

    def __init__(self, echo: str, logprobs: TextLogprobs) -> None:
        self.echo = echo
        self._logprobs = logprobs
        self._waiting: list[dict[str, Any]] = []

    def wait(self, out: GenerateOutput) -> None:
        """Keep what belongs to tokens whose text comes later."""
        if out.logprobs is None:
            return
        if out.logprobs.prompt:
            self._waiting.append(self._logprobs.of_prompt(out.logprobs.prompt, self.echo))
        self._waiting.append(self._logprobs.of_answer(out.logprobs.output))

    def choice(self, out: GenerateOutput) -> dict[str, Any]:
        self.wait(out)
        text, self.echo = self.echo + out.text, ""
        logprobs, self._waiting = joined_logprobs(self._waiting), []
        return {
            "index": out.index,
            "text": text,
            "logprobs": logprobs,
            **end_fields(out.finish_reason),
            **hidden_fields(out),
        }
