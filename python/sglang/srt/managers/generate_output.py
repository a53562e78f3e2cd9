"""What comes back of a sequence: new text and ids, why it ended, and the counters that users see."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from sglang.srt.managers.io_struct import FinishReason, SpecStats
from sglang.srt.sampling.logprobs import HiddenRows, TokenLogprob, TokenLogprobs


class RequestFailedError(RuntimeError):
    """The scheduler refused or failed one request; ``status`` is the HTTP status that says how (503: queue full)."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of a prompt and of what is new of an answer. ``has_top`` and ``has_asked``: whether the most
    likely tokens, or chosen ones, were asked for; ``text_of``: gives a token's text, where entries should have it."""

    prompt: tuple[TokenLogprobs, ...]
    output: tuple[TokenLogprobs, ...]
    has_top: bool
    has_asked: bool
    text_of: Callable[[int], str] | None

    def joined(self, parts: Sequence[Logprobs]) -> Logprobs:
        prompt = tuple(entry for part in parts for entry in part.prompt)
        return replace(self, prompt=prompt, output=tuple(entry for part in parts for entry in part.output))

    def of_token(self, i: int) -> Logprobs:
        """Those of one new token; the prompt's come with the first."""
        return replace(self, prompt=() if i else self.prompt, output=self.output[i : i + 1])

    def to_dict(self) -> dict[str, Any]:
        """The fields of ``meta_info``: every entry is [log-probability, token id, text or None]."""
        info: dict[str, Any] = {}
        for side, entries in (("input", self.prompt), ("output", self.output)):
            info[f"{side}_token_logprobs"] = [self._entry(e.logprob, e.token_id) for e in entries]
            if self.has_top:
                info[f"{side}_top_logprobs"] = [self._entries(e, e.top) for e in entries]
            if self.has_asked:
                info[f"{side}_token_ids_logprobs"] = [self._entries(e, e.asked) for e in entries]
        return info

    def _entries(self, at: TokenLogprobs, pairs: Sequence[TokenLogprob]) -> list[list[Any]] | None:
        return None if at.logprob is None else [self._entry(*pair) for pair in pairs]

    def _entry(self, logprob: float | None, token_id: int) -> list[Any]:
        return [logprob, token_id, None if self.text_of is None else self.text_of(token_id)]


@dataclass(frozen=True, slots=True)
class TokenRuns:
    """How tokens came: the lengths of their runs, one for each round, and the text that was shown with each token.

    A reply without tokens has one text, the rest that its end released.
    """

    accept_lens: tuple[int, ...]
    texts: tuple[str, ...]

    def joined(self, parts: Sequence[TokenRuns]) -> TokenRuns:
        lens = tuple(length for part in parts for length in part.accept_lens)
        return TokenRuns(lens, tuple(text for part in parts for text in part.texts))

    @property
    def positions(self) -> list[int]:
        """Place of each token in its run, from 0."""
        return [place for length in self.accept_lens for place in range(length)]


@dataclass(frozen=True, slots=True)
class GenerateOutput:
    """What is new in one sequence since its previous output. Counters are totals; times are seconds.

    ``index`` counts the sequences of a request: prompt by prompt, and within a prompt sample by sample.
    """

    index: int
    rid: str
    text: str
    output_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    spec: SpecStats | None
    e2e_latency_s: float
    ttft_s: float
    queue_time_s: float
    logprobs: Logprobs | None = None
    hidden_states: tuple[HiddenRows, ...] | None = None
    runs: TokenRuns | None = None

    def after(self, earlier: GenerateOutput) -> GenerateOutput:
        """Both outputs of a sequence as one."""
        return join_outputs((earlier, self))

    def by_token(self) -> Iterator[tuple[GenerateOutput, int | None]]:
        """An output for each token, with its place in its run, of an output with ``runs``.

        What the end released comes with the last token, or behind the tokens without a place.
        """
        assert self.runs is not None, self.rid
        texts, places = self.runs.texts, self.runs.positions
        for i, text in enumerate(texts):
            is_last, token = i == len(texts) - 1, slice(i, i + 1)
            part = replace(
                self,
                text=text,
                output_ids=self.output_ids[token],
                finish_reason=self.finish_reason if is_last else None,
                completion_tokens=self.completion_tokens - max(len(self.output_ids) - 1 - i, 0),
                logprobs=None if self.logprobs is None else self.logprobs.of_token(i),
                hidden_states=None if self.hidden_states is None else self.hidden_states[token],
                runs=None,
            )
            yield part, places[i] if i < len(places) else None

    def raise_if_failed(self) -> None:
        """``ValueError`` when the scheduler found the request at fault, ``RequestFailedError`` when it failed it.

        An abort that a user asked for is no failure.
        """
        reason = self.finish_reason
        if reason is None or reason.type != "abort" or reason.status is None:
            return
        message = reason.message or "the request was aborted"
        if reason.status == 400:
            raise ValueError(message)
        raise RequestFailedError(message, reason.status)

    def meta_info(self) -> dict[str, Any]:
        """The ``meta_info`` object of the native API; ``spec_*`` only when speculation ran."""
        info: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": None if self.finish_reason is None else self.finish_reason.to_dict(),
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens,
            "e2e_latency": self.e2e_latency_s,
            "ttft": self.ttft_s,
            "queue_time": self.queue_time_s,
        }
        if self.logprobs is not None:
            info |= self.logprobs.to_dict()
        if self.hidden_states is not None:
            # a token's state is a vector; the first one brings those of the whole prompt, which is always a matrix
            info["hidden_states"] = [
                [list(row) for row in rows] if i == 0 else list(rows[0]) for i, rows in enumerate(self.hidden_states)
            ]
        if self.runs is not None:
            info["accept_lens"] = list(self.runs.accept_lens)
        return info if self.spec is None else info | _spec_info(self.spec)


def join_outputs(parts: Sequence[GenerateOutput]) -> GenerateOutput:
    """All outputs of a sequence, in order, as one."""
    last = parts[-1]
    ids = tuple(token_id for part in parts for token_id in part.output_ids)
    logprobs = hidden = runs = None
    if last.logprobs is not None:
        logprobs = last.logprobs.joined([part.logprobs for part in parts if part.logprobs is not None])
    if last.hidden_states is not None:
        hidden = tuple(rows for part in parts for rows in part.hidden_states or ())
    if last.runs is not None:
        runs = last.runs.joined([part.runs for part in parts if part.runs is not None])
    text = "".join(part.text for part in parts)
    return replace(last, text=text, output_ids=ids, logprobs=logprobs, hidden_states=hidden, runs=runs)


def _spec_info(spec: SpecStats) -> dict[str, Any]:
    # position j is reached only through position j - 1, so differences count the rounds that accepted exactly j drafts
    reached = (spec.verify_ct, *spec.accepted_by_position, 0)
    rounds, drafts = max(spec.verify_ct, 1), max(spec.draft_tokens, 1)
    return {
        "spec_verify_ct": spec.verify_ct,
        "spec_accept_token_num": spec.accepted_tokens,
        "spec_draft_token_num": spec.draft_tokens,
        "spec_accept_length": (spec.accepted_tokens + spec.verify_ct) / rounds,
        "spec_accept_rate": spec.accepted_tokens / drafts,
        "spec_accept_histogram": [more - less for more, less in pairwise(reached)],
        "spec_accept_by_position": [
            accepted / max(drafted, 1)
            for accepted, drafted in zip(spec.accepted_by_position, spec.drafted_by_position, strict=True)
        ],
    }
