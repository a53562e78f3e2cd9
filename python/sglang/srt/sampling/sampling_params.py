"""One request's sampling controls, checked when made."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from sglang.srt.constrained.base_grammar import GRAMMAR_KINDS, GrammarKind
from sglang.srt.sampling.stop_regex import StopRegex

TOP_K_ALL = 1 << 30
_MAX_STOP_STRINGS = 64
_MAX_STOP_REGEXES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling controls of one request; names and defaults are sglang's.

    ``temperature == 0`` means greedy. ``top_k <= 0`` (or ``TOP_K_ALL``) keeps the whole vocabulary.
    ``max_new_tokens`` None means up to the context end. ``speculative_num_steps``: the most drafts of a round that are
    accepted for this request, 0 for plain decode, None for what the server does; it changes no answer.
    Raises ``ValueError`` naming the field, its value and the fix.
    """

    max_new_tokens: int | None = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    sampling_seed: int | None = None
    speculative_num_steps: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    max_thinking_tokens: int | None = None
    custom_params: Mapping[str, Any] | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, None)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 2.0, open_low=True)
        _integer("top_k", self.top_k, -1, None)
        _integer("min_new_tokens", self.min_new_tokens, 0, None)
        _integer("n", self.n, 1, 128)
        if self.max_new_tokens is not None:
            _integer("max_new_tokens", self.max_new_tokens, 0, None)
            if self.min_new_tokens > self.max_new_tokens:
                raise ValueError(
                    "min_new_tokens must not exceed max_new_tokens, "
                    f"got {self.min_new_tokens} and {self.max_new_tokens}"
                )
        if self.speculative_num_steps is not None:
            _integer("speculative_num_steps", self.speculative_num_steps, 0, None)
        if self.sampling_seed is not None:
            _integer("sampling_seed", self.sampling_seed, -(1 << 63), (1 << 63) - 1)
        if len(self.stop) > _MAX_STOP_STRINGS or not all(isinstance(s, str) and s for s in self.stop):
            raise ValueError(f"stop must be at most {_MAX_STOP_STRINGS} non-empty strings, got {self.stop!r:.200}")
        if len(self.stop_regex) > _MAX_STOP_REGEXES or not all(isinstance(s, str) and s for s in self.stop_regex):
            raise ValueError(
                f"stop_regex must be at most {_MAX_STOP_REGEXES} non-empty patterns, got {self.stop_regex!r:.200}"
            )
        for pattern in self.stop_regex:
            StopRegex.compile(pattern)
        if self.max_thinking_tokens is not None:
            _integer("max_thinking_tokens", self.max_thinking_tokens, 0, None)
        if self.custom_params is not None and not isinstance(self.custom_params, Mapping):
            raise ValueError(f"custom_params must be an object, got {self.custom_params!r:.200}")
        _check_grammar(self)
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, None)
        for token, bias in self.logit_bias:
            _integer("logit_bias", token, 0, None)
            _number("logit_bias", bias, -100.0, 100.0)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def grammar(self) -> tuple[GrammarKind, str] | None:
        """The grammar that the answer has to follow, None for any text."""
        given = ((kind, getattr(self, kind)) for kind in GRAMMAR_KINDS)
        return next(((kind, text) for kind, text in given if text is not None), None)

    @property
    def edits_logits(self) -> bool:
        """Whether logits change by what the request has emitted, or by a bias."""
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
            or self.min_new_tokens > 0
            or bool(self.logit_bias)
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from a request's ``sampling_params`` object; unknown names are an error that lists the known ones.

        ``"speculative": false`` is another way to say ``"speculative_num_steps": 0``.
        """
        values = _without_switch(values)
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(
                f"sampling_params has an unknown field {unknown[0]!r}: known fields are {', '.join(sorted(known))}"
            )
        given = {name: value for name, value in values.items() if name in known and value is not None}
        if "max_new_tokens" in values and values["max_new_tokens"] is None:
            given["max_new_tokens"] = None
        for name in ("stop", "stop_regex"):
            if isinstance(given.get(name), str):
                given[name] = (given[name],)
        if isinstance(given.get("stop_token_ids"), int):
            given["stop_token_ids"] = (given["stop_token_ids"],)
        for name in ("json_schema", "structural_tag"):
            if isinstance(given.get(name), (Mapping, bool)):
                given[name] = json.dumps(given[name])
        for name in ("stop", "stop_regex", "stop_token_ids"):
            if name in given:
                given[name] = _sequence(name, given[name])
        if "logit_bias" in given:
            given["logit_bias"] = parse_logit_bias(given["logit_bias"])
        for name in ("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"):
            if not isinstance(given.get(name, False), bool):
                raise ValueError(f"{name} must be true or false, got {given[name]!r:.200}")
        return cls(**given)


def _check_grammar(params: SamplingParams) -> None:
    given = [kind for kind in GRAMMAR_KINDS if getattr(params, kind) is not None]
    if len(given) > 1:
        raise ValueError(f"{given[0]} and {given[1]} exclude each other: give one of {', '.join(GRAMMAR_KINDS)}")
    for kind in given:
        text = getattr(params, kind)
        if not isinstance(text, str) or not text:
            raise ValueError(f"{kind} must be a text that is not empty, got {text!r:.200}")


def _without_switch(values: Mapping[str, Any]) -> dict[str, Any]:
    """``speculative`` as the length it stands for."""
    rest = dict(values)
    wanted = rest.pop("speculative", None)
    if wanted is not None and not isinstance(wanted, bool):
        raise ValueError(f"speculative must be true or false, got {wanted!r:.200}")
    if wanted is False:
        rest["speculative_num_steps"] = 0
    return rest


def parse_logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """``{"token id": bias}`` as in OpenAI's API -> sorted pairs."""
    if not isinstance(value, Mapping):
        raise ValueError(f"logit_bias must be an object of token id to bias, got {value!r:.200}")
    try:
        return tuple(sorted((int(token), float(bias)) for token, bias in value.items()))
    except (TypeError, ValueError):
        raise ValueError(f"logit_bias must map token ids to numbers, got {value!r:.200}") from None


def _sequence(name: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, (list, tuple)):
        return tuple(value)
    raise ValueError(f"{name} must be a list, got {value!r:.200}")


def _number(name: str, value: Any, low: float, high: float | None, *, open_low: bool = False) -> None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if good and (value > low if open_low else value >= low) and (high is None or value <= high):
        return
    left = f"greater than {low:g}" if open_low else f"at least {low:g}"
    right = "" if high is None else f" and at most {high:g}"
    raise ValueError(f"{name} must be a finite number {left}{right}, got {value!r:.200}")


def _integer(name: str, value: Any, low: int, high: int | None) -> None:
    good = isinstance(value, int) and not isinstance(value, bool)
    if good and value >= low and (high is None or value <= high):
        return
    right = "" if high is None else f" and at most {high}"
    raise ValueError(f"{name} must be an integer of at least {low}{right}, got {value!r:.200}")
