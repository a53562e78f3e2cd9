"""Log-probabilities and hidden states as requests ask for them and get them.

Every number is one of the model's own distribution after a prefix: see docs/sampling_parameters.md for which.
"""

from __future__ import annotations

from dataclasses import dataclass

TokenLogprob = tuple[float, int]  # log-probability, token id
HiddenRows = tuple[tuple[float, ...], ...]  # [rows][H]


@dataclass(frozen=True, slots=True)
class LogprobOptions:
    """``start_len``: the first prompt token that is reported; -1 reports none. ``top_num``: how many of the most likely
    tokens to report at each place. ``token_ids``: tokens to report at each place, likely or not."""

    start_len: int = -1
    top_num: int = 0
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What one prompt's reply holds beside text and ids, and the processor its logits go through.

    ``text_in_logprobs``: each entry names its token's text. ``custom_logit_processor`` as the user sent it.
    ``accept_lens``: how many tokens each round brought.
    """

    logprobs: LogprobOptions | None = None
    text_in_logprobs: bool = False
    hidden_states: bool = False
    custom_logit_processor: str | None = None
    accept_lens: bool = False


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One token of a prompt or an answer. ``logprob`` is None for the first one reported of a prompt; ``top`` and
    ``asked`` are empty there too."""

    token_id: int
    logprob: float | None
    top: tuple[TokenLogprob, ...] = ()
    asked: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ReqOutputs:
    """What a step computed for one request beside tokens.

    ``logprobs`` and ``hidden_states`` have an entry per token of the request's run; ``prompt_logprobs`` and
    ``prompt_hidden`` are those of prompt rows that an extend computed, before the row that chose a token.
    """

    logprobs: tuple[TokenLogprobs, ...] = ()
    hidden_states: tuple[tuple[float, ...], ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_hidden: HiddenRows = ()
