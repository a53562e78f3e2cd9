"""Grammars over logits: what a request's grammar forbids after each row of a block cannot be chosen.

Shapes: B requests, N rows each (the newest token, then drafts), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang.srt.constrained.base_grammar import allocate_masks, fill_block
from sglang.srt.managers.schedule_batch import Req


def apply_grammar_masks(
    logits: torch.Tensor, reqs: Sequence[Req], rows: torch.Tensor, parents: torch.Tensor | None = None
) -> None:
    """Edit ``logits`` [B * N, V] in place for the requests that have a grammar. The last of all edits.

    ``rows`` [B, N] int64: the newest token of each request, which its grammar has accepted, then its drafts;
    ``parents`` [B, N] int64: the row each one follows, an earlier one; None for a chain.
    A draft that the grammar forbids cannot be chosen at its parent, so neither it nor rows behind it are ever accepted.
    Where earlier edits left no token that the grammar allows, all that it allows are equal: the grammar comes first.
    """
    constrained = [b for b, req in enumerate(reqs) if req.grammar is not None]
    if not constrained:
        return
    width, vocab_size = rows.shape[1], logits.shape[1]
    tokens = rows[constrained].tolist()
    before = [list(range(-1, width - 1))] * len(tokens) if parents is None else parents[constrained].tolist()
    masks = allocate_masks(len(constrained) * width, vocab_size)
    for i, b in enumerate(constrained):
        grammar = reqs[b].grammar
        assert grammar is not None
        fill_block(grammar, tokens[i], before[i], masks[i * width : (i + 1) * width])
    index = torch.tensor(constrained)[:, None] * width + torch.arange(width)
    _mask_rows(logits, index.view(-1).to(logits.device), masks.to(logits.device))


class GrammarDrafts:
    """The grammars of a batch while it is drafted for, so that drafts are such as they allow.

    ``mask`` before each draft is chosen, ``accept`` when it is, and ``close`` at the end, which leaves every grammar
    where it was.
    """

    def __init__(self, reqs: Sequence[Req]) -> None:
        self._grammars = {b: req.grammar for b, req in enumerate(reqs) if req.grammar is not None}
        self._taken = dict.fromkeys(self._grammars, 0)
        self._open = list(self._grammars)  # rows whose drafts are legal so far, and not at their end

    @classmethod
    def of(cls, reqs: Sequence[Req]) -> GrammarDrafts | None:
        """None if no request has a grammar."""
        return cls(reqs) if any(req.grammar is not None for req in reqs) else None

    def mask(self, logits: torch.Tensor) -> None:
        """Edit ``logits`` [B, V] of the next draft in place."""
        if not self._open:
            return
        masks = allocate_masks(len(self._open), logits.shape[1])
        for row, b in enumerate(self._open):
            self._grammars[b].fill_mask(masks, row)
        _mask_rows(logits, torch.tensor(self._open, device=logits.device), masks.to(logits.device))

    def accept(self, tokens: torch.Tensor) -> None:
        """``tokens`` [B] int64: the drafts that were chosen."""
        chosen = tokens.tolist()
        for b in tuple(self._open):
            accepted = self._grammars[b].accept(chosen[b])
            self._taken[b] += accepted
            if not accepted or self._grammars[b].is_terminated:
                self._open.remove(b)

    def close(self) -> None:
        for b, num_tokens in self._taken.items():
            if num_tokens:
                self._grammars[b].rollback(num_tokens)


def _mask_rows(logits: torch.Tensor, index: torch.Tensor, masks: torch.Tensor) -> None:
    """Rows ``index`` of ``logits`` by ``masks`` [len(index), W] int32, on the same device."""
    bits = torch.arange(8, dtype=torch.uint8, device=masks.device)
    allowed = ((masks.view(torch.uint8)[:, :, None] >> bits) & 1).view(len(index), -1)[:, : logits.shape[1]].bool()
    forbidden = float("-inf")
    masked = logits[index].masked_fill_(~allowed, forbidden)
    is_dead = (masked == forbidden).all(dim=1, keepdim=True)
    logits[index] = masked.masked_fill_(is_dead & allowed, 0.0)
