"""What a request may ask for, checked before the scheduler hears of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sglang.srt.sampling.sampling_params import SamplingParams

_INT64_SPAN, _INT64_MAX = 1 << 64, (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Facts of the running scheduler, in tokens. ``auto_truncate``: what is too long is cut instead of refused."""

    context_len: int
    max_req_input_len: int
    max_total_num_tokens: int
    vocab_size: int
    auto_truncate: bool = False

    @classmethod
    def from_info(cls, info: dict[str, Any], *, auto_truncate: bool = False) -> RequestLimits:
        return cls(
            context_len=info["context_len"],
            max_req_input_len=info["max_req_input_len"],
            max_total_num_tokens=info["max_total_num_tokens"],
            vocab_size=info["vocab_size"],
            auto_truncate=auto_truncate,
        )

    def fit_prompt(self, param: str, input_ids: tuple[int, ...]) -> tuple[int, ...]:
        """The prompt, checked; of one that is too long its beginning, if it may be cut."""
        if self.auto_truncate:
            input_ids = input_ids[: min(self.context_len - 1, self.max_req_input_len)]
        self.check_prompt(param, input_ids)
        return input_ids

    def check_prompt(self, param: str, input_ids: Sequence[int]) -> None:
        """``ValueError`` when the prompt is empty, too long, or has ids outside the vocabulary."""
        if not input_ids:
            raise ValueError(f"{param} is empty: give at least one token")
        if len(input_ids) >= self.context_len:
            raise ValueError(
                f"{param} has {len(input_ids)} tokens, but the context length is {self.context_len} tokens and one "
                "must be left for the answer: shorten the prompt"
            )
        if len(input_ids) > self.max_req_input_len:
            raise ValueError(
                f"{param} has {len(input_ids)} tokens, but the KV cache of this server holds prompts of at most "
                f"{self.max_req_input_len} tokens: shorten the prompt, or start the server with more --max-total-tokens"
            )
        self.check_vocabulary(param, input_ids)

    def check_vocabulary(self, param: str, input_ids: Sequence[int]) -> None:
        """``ValueError`` when an id is outside the vocabulary."""
        low, high = min(input_ids, default=0), max(input_ids, default=0)
        if low < 0 or high >= self.vocab_size:
            bad = low if low < 0 else high
            raise ValueError(f"{param} has the token id {bad!r:.40}: ids must be from 0 to {self.vocab_size - 1}")

    def fit_params(self, params: SamplingParams, prompt_len: int, index: int, *, clamp_length: bool) -> SamplingParams:
        """Controls of sample ``index`` of a prompt: checked against the limits, with its own seed and a length.

        ``ValueError`` when the length does not fit, unless ``clamp_length`` or the server allows to lower it.
        """
        room = self.context_len - prompt_len
        wanted = room if params.max_new_tokens is None else params.max_new_tokens
        if wanted > room and not (clamp_length or self.auto_truncate):
            raise ValueError(
                f"max_new_tokens is {params.max_new_tokens!r:.40}, but the prompt has {prompt_len} tokens and the "
                f"context length is {self.context_len} tokens: ask for at most {room}"
            )
        if params.min_new_tokens > room:
            raise ValueError(
                f"min_new_tokens is {params.min_new_tokens!r:.40}, but the context leaves {room}: lower it"
            )
        for name, texts in (("stop", params.stop), ("stop_regex", params.stop_regex)):
            for text in texts:
                check_unicode(name, text)
        if params.grammar is not None:
            check_unicode(*params.grammar)
        for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", [i for i, _ in params.logit_bias])):
            if ids and max(ids) >= self.vocab_size:
                raise ValueError(f"{name} has the token id {max(ids)!r:.40}: ids must be below {self.vocab_size}")
        seed = params.sampling_seed
        if seed is not None and index:
            seed = seed + index if seed + index <= _INT64_MAX else seed + index - _INT64_SPAN
        return replace(
            params,
            n=1,
            sampling_seed=seed,
            max_new_tokens=min(wanted, room),
            top_k=-1 if params.top_k >= self.vocab_size else params.top_k,
        )


def check_unicode(param: str, text: str) -> None:
    """``ValueError`` when a text has halves of surrogate pairs, which JSON can express and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{param} is not valid Unicode at character {error.start}: {error.reason}") from None
