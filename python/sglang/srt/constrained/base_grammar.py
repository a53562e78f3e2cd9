"""What a grammar is to the engine, and the masks of a block of drafts.

Shapes: N nodes of a block (the newest token of a request, then its drafts); V vocabulary; W = ceil(V / 32) words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import torch

GrammarKind = Literal["json_schema", "regex", "ebnf", "structural_tag"]
GRAMMAR_KINDS: tuple[GrammarKind, ...] = ("json_schema", "regex", "ebnf", "structural_tag")


class Grammar(Protocol):
    """Where one answer stands in its grammar. A mask is a row of W int32 words; bit ``t % 32`` of word ``t // 32``
    says whether token ``t`` may come next."""

    def accept(self, token_id: int) -> bool:
        """Go on by one token; False, and nothing has changed, if the grammar has no place for it."""
        ...

    def fill_mask(self, masks: torch.Tensor, row: int) -> None:
        """Write the mask of the next token to ``masks[row]``. Not allowed once the grammar is terminated."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Undo the last tokens that were accepted."""
        ...

    @property
    def is_terminated(self) -> bool:
        """Whether the end was accepted: nothing may follow."""
        ...

    def fork(self) -> Grammar:
        """The same state once more; the two do not influence each other."""
        ...


class GrammarBackend(Protocol):
    """Makes grammars for one tokenizer."""

    def compile(self, kind: GrammarKind, text: str) -> Grammar:
        """A grammar at its beginning. ``ValueError`` says in one sentence why ``text`` is none. Called by threads."""
        ...


def allocate_masks(num_rows: int, vocab_size: int) -> torch.Tensor:
    """[num_rows, W] int32 on the CPU that allow every token."""
    return torch.full((num_rows, -(-vocab_size // 32)), -1, dtype=torch.int32)


def fill_block(grammar: Grammar, tokens: Sequence[int], parents: Sequence[int], masks: torch.Tensor) -> None:
    """The masks behind all nodes of a block, into ``masks`` [N, W], which allow everything before.

    ``tokens[0]`` is accepted already; node ``i`` follows node ``parents[i] < i`` (``parents[0]`` is not read). A node
    that the grammar has no place for can never be chosen at its parent, so its row, and the rows behind it, may stay
    as they are. The grammar is where it was afterwards.
    """
    grammar.fill_mask(masks, 0)
    path, legal = [0], {0}
    for node in range(1, len(tokens)):
        parent = parents[node]
        if parent not in legal:
            continue
        if path[-1] != parent:
            path = _move(grammar, tokens, path, _branch(parent, parents))
        if grammar.is_terminated or not grammar.accept(tokens[node]):
            continue
        path.append(node)
        legal.add(node)
        if not grammar.is_terminated:
            grammar.fill_mask(masks, node)
    if len(path) > 1:
        grammar.rollback(len(path) - 1)


def _branch(node: int, parents: Sequence[int]) -> list[int]:
    """The nodes from the root to ``node``."""
    branch = [node]
    while branch[-1]:
        branch.append(parents[branch[-1]])
    return branch[::-1]


def _move(grammar: Grammar, tokens: Sequence[int], path: list[int], branch: list[int]) -> list[int]:
    """From the end of ``path`` to the end of ``branch``, whose tokens are all legal; both begin at the root."""
    shared = next(
        (i for i, (a, b) in enumerate(zip(path, branch, strict=False)) if a != b), min(len(path), len(branch))
    )
    if len(path) > shared:
        grammar.rollback(len(path) - shared)
    for node in branch[shared:]:
        accepted = grammar.accept(tokens[node])
        assert accepted, f"node {node} was legal before"
    return branch
