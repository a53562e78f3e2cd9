"""Which speculative algorithms exist and what shared code may ask of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum

import torch


class SpeculativeAlgorithm(Enum):
    NONE = "NONE"
    FROZEN_KV_MTP = "FROZEN_KV_MTP"

    @classmethod
    def from_string(cls, name: str | None) -> SpeculativeAlgorithm:
        return cls.NONE if name is None else cls(name)

    def is_none(self) -> bool:
        return self is SpeculativeAlgorithm.NONE

    def is_frozen_kv_mtp(self) -> bool:
        return self is SpeculativeAlgorithm.FROZEN_KV_MTP


@dataclass(frozen=True, slots=True)
class SpecCapabilities:
    """What the scheduler needs to know of a worker. Shared code asks these, never which algorithm it is.

    ``max_tokens_per_step``: KV slots a running request needs in one decode step; it gains no more tokens than these.
    ``max_drafts``: the most drafts that one step can accept.
    """

    max_tokens_per_step: int
    max_drafts: int
    needs_draft_kv: bool
    supports_overlap: bool


class SpecInput(ABC):
    """State a speculative algorithm carries between steps, one row per request. Immutable."""

    @abstractmethod
    def filter(self, keep: torch.Tensor) -> SpecInput:
        """Rows ``keep`` ([B'] int64), in that order."""

    @abstractmethod
    def merge(self, other: SpecInput) -> SpecInput:
        """These rows followed by ``other``'s."""
