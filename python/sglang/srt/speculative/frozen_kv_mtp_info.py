"""Data of FROZEN_KV_MTP: the borrowed context, the seed of a draft, and what the target verifies.

Shapes: B requests, N draft tokens per request in verify (root included), H hidden width of the target.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang.srt.mem_cache.kv_pool import KVReader
from sglang.srt.speculative.spec_info import SpecInput


@dataclass(frozen=True, slots=True)
class FrozenKVMTPContext:
    """What an assistant borrows from its target, bound once.

    ``target_token_to_kv_pool`` can only be read. ``target_layer_ids[i]`` is the physical target layer whose KV
    assistant layer ``i`` attends to.
    """

    target_token_to_kv_pool: KVReader
    target_layer_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FrozenKVMTPDraftInput(SpecInput):
    """The seed of the next draft.

    ``bonus_tokens`` [B] int64: newest token of each request, whose KV is not in the pool yet.
    ``hidden_states`` [B, H]: target hidden state after its final norm, at the position that predicted that token.
    """

    bonus_tokens: torch.Tensor
    hidden_states: torch.Tensor

    def filter(self, keep: torch.Tensor) -> FrozenKVMTPDraftInput:
        return FrozenKVMTPDraftInput(self.bonus_tokens[keep], self.hidden_states[keep])

    def merge(self, other: SpecInput) -> FrozenKVMTPDraftInput:
        assert isinstance(other, FrozenKVMTPDraftInput), f"cannot merge a draft seed with {type(other).__name__}"
        return FrozenKVMTPDraftInput(
            torch.cat([self.bonus_tokens, other.bonus_tokens]),
            torch.cat([self.hidden_states, other.hidden_states]),
        )


@dataclass(frozen=True, slots=True)
class FrozenKVMTPVerifyInput(SpecInput):
    """A chain or tree of drafts as the target verifies it. Row 0 of each request is its bonus token (the root).

    ``draft_tokens``, ``positions`` [B, N] int64; ``parents`` [B, N] int64: the row that each row follows, the root
    itself.
    """

    draft_tokens: torch.Tensor
    positions: torch.Tensor
    parents: torch.Tensor

    @property
    def num_draft_tokens(self) -> int:
        return self.draft_tokens.shape[1]

    def filter(self, keep: torch.Tensor) -> FrozenKVMTPVerifyInput:
        return FrozenKVMTPVerifyInput(self.draft_tokens[keep], self.positions[keep], self.parents[keep])

    def merge(self, other: SpecInput) -> FrozenKVMTPVerifyInput:
        assert isinstance(other, FrozenKVMTPVerifyInput), f"cannot merge a verify input with {type(other).__name__}"
        return FrozenKVMTPVerifyInput(
            torch.cat([self.draft_tokens, other.draft_tokens]),
            torch.cat([self.positions, other.positions]),
            torch.cat([self.parents, other.parents]),
        )
