"""Log-probabilities and hidden states for the requests that ask for them, from rows a forward has computed.

Shapes: B requests, N rows each in a decode step, R rows, V vocabulary, H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.logprobs import LogprobOptions, ReqOutputs, TokenLogprobs

# rows of float32 log-probabilities that exist at once
_ROWS_AT_ONCE = 64
# what JSON can say of a token that cannot follow
_LOWEST = torch.finfo(torch.float32).min


class KeptRows:
    """What a step computed, kept until it is known which of its rows count. Filled by the step's program.

    ``logits`` [B * N, V] are those that tokens were chosen from, ``hidden`` [B * N, H] or None; ``tokens`` and
    ``parents`` [B, N] as in ``apply_logit_controls``.
    """

    __slots__ = ("_logits", "_hidden", "_tokens", "_parents")

    def __init__(self) -> None:
        self._logits: torch.Tensor | None = None
        self._hidden: torch.Tensor | None = None
        self._tokens: torch.Tensor | None = None
        self._parents: torch.Tensor | None = None

    def keep(
        self, logits: torch.Tensor, hidden: torch.Tensor | None, tokens: torch.Tensor, parents: torch.Tensor | None
    ) -> None:
        self._logits, self._hidden, self._tokens, self._parents = logits, hidden, tokens, parents

    def outputs(self, reqs: Sequence[Req], runs: Sequence[Sequence[int]]) -> tuple[ReqOutputs | None, ...]:
        """``runs``: the tokens that each request gained."""
        assert self._logits is not None and self._tokens is not None, "the step kept nothing"
        width = self._tokens.shape[1]
        found: list[ReqOutputs | None] = []
        for b, (req, run) in enumerate(zip(reqs, runs, strict=True)):
            if req.asked is None:
                found.append(None)
                continue
            rows = torch.tensor(self._path(b, run), device=self._logits.device) + b * width
            found.append(
                outputs_of_run(req, run, self._logits[rows], None if self._hidden is None else self._hidden[rows])
            )
        return tuple(found)

    def _path(self, b: int, run: Sequence[int]) -> list[int]:
        """The row that chose each token of a run: the root, then the draft that is the token before."""
        if self._parents is None:
            return list(range(len(run)))
        assert self._tokens is not None
        tokens, parents = self._tokens[b].tolist(), self._parents[b].tolist()
        path = [0]
        for token in run[:-1]:
            path.append(next(i for i in range(1, len(tokens)) if parents[i] == path[-1] and tokens[i] == token))
        return path


def kept_rows(reqs: Sequence[Req], extend_lens: Sequence[int]) -> tuple[int, ...] | None:
    """How many of each request's last rows in an extend are wanted, at least one; None when nobody asked for any."""
    if all(req.asked is None for req in reqs):
        return None
    return tuple(
        1 if req.asked is None else min(n, max(1, req.asked.rows_of(req.committed_len + n)))
        for req, n in zip(reqs, extend_lens, strict=True)
    )


@dataclass(frozen=True, slots=True)
class ExtendedRows:
    """What an extend computed, per request: the position behind its rows, and the hidden states of those that are kept,
    [kept, H]; ``logits`` [B, V], which chose ``tokens`` [B]."""

    ends: Sequence[int]
    hidden: Sequence[torch.Tensor]
    logits: torch.Tensor
    tokens: torch.Tensor

    def outputs(
        self, reqs: Sequence[Req], head: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[ReqOutputs | None, ...]:
        """``head`` makes logits of hidden states."""
        return tuple(None if req.asked is None else self._outputs(b, req, head) for b, req in enumerate(reqs))

    def _outputs(self, b: int, req: Req, head: Callable[[torch.Tensor], torch.Tensor]) -> ReqOutputs:
        assert req.asked is not None
        end, hidden, outputs = self.ends[b], self.hidden[b], ReqOutputs()
        if req.asked.rows_of(end):
            outputs = outputs_of_prompt(req, end - len(hidden), hidden, head)
        if end < len(req.token_ids):
            return outputs
        run = outputs_of_run(req, self.tokens[b : b + 1].tolist(), self.logits[b : b + 1], hidden[-1:])
        return replace(outputs, logprobs=run.logprobs, hidden_states=run.hidden_states)


def outputs_of_run(req: Req, run: Sequence[int], logits: torch.Tensor, hidden: torch.Tensor | None) -> ReqOutputs:
    """``logits`` [R, V] and ``hidden`` [R, H] of the rows that chose the R tokens of a request's run."""
    assert req.asked is not None
    logprobs: tuple[TokenLogprobs, ...] = ()
    if req.asked.logprobs is not None:
        temperature = 1.0 if req.params.is_greedy else req.params.temperature
        logprobs = token_logprobs(logits, run, req.asked.logprobs, temperature)
    states: tuple[tuple[float, ...], ...] = ()
    if req.asked.hidden_states:
        assert hidden is not None, "hidden states were asked for and not kept"
        states = hidden_rows(hidden)
    return ReqOutputs(logprobs, states)


def outputs_of_prompt(
    req: Req, start: int, hidden: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]
) -> ReqOutputs:
    """``hidden`` [R, H] after the final norm at the prompt's positions ``start .. start + R``; ``head`` makes logits.

    What the last position of a prompt predicts is the answer's, and so is its hidden state: neither is in the result.
    """
    assert req.asked is not None
    options, num = req.asked.logprobs, min(len(hidden), req.prompt_len - 1 - start)
    found: list[TokenLogprobs] = []
    if options is not None:
        for first in range(max(start, options.start_len), start + num, _ROWS_AT_ONCE):
            last = min(start + num, first + _ROWS_AT_ONCE)
            logits = head(hidden[first - start : last - start])
            found += token_logprobs(logits, req.token_ids[first + 1 : last + 1], options, 1.0)
    states = hidden_rows(hidden[:num]) if req.asked.hidden_states else ()
    return ReqOutputs(prompt_logprobs=tuple(found), prompt_hidden=states)


def token_logprobs(
    logits: torch.Tensor, tokens: Sequence[int], options: LogprobOptions, temperature: float
) -> tuple[TokenLogprobs, ...]:
    """Of the distribution softmax(``logits`` / ``temperature``), [R, V], at R ``tokens``."""
    found: list[TokenLogprobs] = []
    for first in range(0, len(tokens), _ROWS_AT_ONCE):
        part = tokens[first : first + _ROWS_AT_ONCE]
        table = torch.log_softmax(logits[first : first + len(part)].float() / temperature, dim=-1).clamp_(min=_LOWEST)
        picked = table.gather(1, torch.tensor(part, device=table.device)[:, None])[:, 0].tolist()
        top, top_ids = (t.tolist() for t in table.topk(min(options.top_num, table.shape[1]), dim=-1))
        asked = table[:, list(options.token_ids)].tolist()
        for i, token in enumerate(part):
            pairs = tuple(zip(top[i], top_ids[i], strict=True))
            found.append(TokenLogprobs(token, picked[i], pairs, tuple(zip(asked[i], options.token_ids, strict=True))))
    return tuple(found)


def hidden_rows(hidden: torch.Tensor) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in hidden.float().tolist())
