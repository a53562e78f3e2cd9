"""Logit processors that users bring: a class of theirs, run on the rows of requests that name it.

Loading one runs the user's code in the server, which is why a server does it only when told to
(``--enable-custom-logit-processor``).
"""

from __future__ import annotations

import importlib
import json
import pickle
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang.srt.sampling.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class RowRequest:
    """What a processor may know of the request a row belongs to. ``output_ids``: the answer up to that row."""

    rid: str
    origin_input_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    sampling_params: SamplingParams


class CustomLogitProcessor(ABC):
    """Base of users' classes. One object serves one request; it should keep no state from call to call, because a row
    may be computed for a draft that is thrown away."""

    @abstractmethod
    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]]) -> torch.Tensor:
        """``logits`` [R, V] float32, which may be edited in place -> the logits to use, [R, V].

        ``custom_param_list`` [R]: the request's ``custom_params``, and under ``__req__`` the ``RowRequest``.
        """

    @classmethod
    def to_str(cls) -> str:
        """How a request names this class, when the server can import it from where it is defined."""
        return json.dumps({"callable": pickle.dumps(cls).hex()})


def load_processor(text: str) -> CustomLogitProcessor:
    """From ``module:Class``, or from the JSON ``{"callable": HEX}`` with a pickled class.

    ``ValueError`` in one sentence when there is no such class, or it is not a processor.
    """
    try:
        found = _unpickle(text) if text.lstrip().startswith("{") else _import(text)
        processor = found() if isinstance(found, type) and issubclass(found, CustomLogitProcessor) else None
    except Exception as error:  # user code, and whatever its modules raise when they are imported
        raise ValueError(f"custom_logit_processor cannot be loaded: {error!r:.300}") from error
    if processor is None:
        raise ValueError(f"custom_logit_processor is no subclass of CustomLogitProcessor: {found!r:.200}")
    return processor


def _import(text: str) -> Any:
    module, _, name = text.partition(":")
    if not name:
        raise ValueError('expected "module:Class" or {"callable": "..."}')
    return getattr(importlib.import_module(module), name)


def _unpickle(text: str) -> Any:
    return pickle.loads(bytes.fromhex(json.loads(text)["callable"]))  # what the flag allows


def run_processor(
    processor: CustomLogitProcessor, logits: torch.Tensor, custom_param_list: Sequence[dict[str, Any]]
) -> torch.Tensor:
    """``processor`` on ``logits`` [R, V]. ``ValueError`` when it returns something else, or forbids every token."""
    result = processor(logits, list(custom_param_list))
    if not isinstance(result, torch.Tensor) or result.shape != logits.shape:
        shape = tuple(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
        raise ValueError(f"it must return logits of shape {tuple(logits.shape)}, got {shape}")
    if not bool(torch.isfinite(result.max(dim=-1).values).all()):
        raise ValueError("it must leave each row a finite largest logit")
    return result.to(logits)
