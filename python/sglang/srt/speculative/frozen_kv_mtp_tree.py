"""Draft trees: the stages of a round in which several tokens are drafted after one.

The assistant expands the K best branches at each of S steps; the N - 1 best of all drafted tokens and the root are what
the target verifies. A node's score is the assistant's probability of the whole path to it.

Shapes: B rows of the batch, padding included; N nodes per request, node 0 the root; M drafted candidates; H hidden
width of the target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sgl_kernel.spec_tree import accept_tree, select_tree, tree_visibility
from sglang.srt.mem_cache.kv_pool import KVCache
from sglang.srt.model_executor.cuda_graph_runner import Step
from sglang.srt.model_executor.decode_programs import WIDTH, TargetVerifyProgram
from sglang.srt.model_executor.decode_rows import DecodeRows
from sglang.srt.model_executor.forward_batch_info import TreeRows
from sglang.srt.model_executor.input_buffers import ROWS, buffer
from sglang.srt.model_executor.pool_configurator import KVMemory
from sglang.srt.speculative.frozen_kv_mtp_cuda_graph_runner import FrozenKVMTPInputBuffers, FrozenPrefix
from sglang.srt.speculative.frozen_kv_mtp_utils import expand_for_topk_draft, simulated_accept_lens, with_tokens


@dataclass(frozen=True, slots=True, eq=False)
class FrozenKVMTPTreeBuffers(FrozenKVMTPInputBuffers):
    """A round's buffers. ``parents`` [B, N]: the node each node follows, the root itself. A parent comes before its
    children."""

    parents: torch.Tensor = buffer(ROWS, WIDTH, dtype=torch.int64)

    @property
    def max_depth(self) -> int:
        """Of any node: an accepted path and the token after it are what ``result`` has room for."""
        return self.result.shape[1] - 2

    def of_width(self, num_rows: int, width: int) -> FrozenKVMTPTreeBuffers:
        return self.front(num_rows, width=width, result_width=min(width - 1, self.max_depth) + 2)


class _Candidates:
    """What one draft drafted so far, step by step, [B, M] each."""

    def __init__(self) -> None:
        self._tokens: list[torch.Tensor] = []
        self._scores: list[torch.Tensor] = []
        self._parents: list[torch.Tensor] = []
        self._count = 0

    def add(self, tokens: torch.Tensor, scores: torch.Tensor, parents: torch.Tensor) -> int:
        """More of them, [B, m] each; the number of the first. ``parents`` are numbers of candidates, -1 the root."""
        first = self._count
        self._tokens.append(tokens)
        self._scores.append(scores)
        self._parents.append(parents)
        self._count += tokens.shape[1]
        return first

    def select(self, num_nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``sgl_kernel.spec_tree.select_tree``."""
        tokens, scores, parents = (torch.cat(part, dim=1) for part in (self._tokens, self._scores, self._parents))
        return select_tree(tokens, scores, parents, num_nodes)


class FrozenKVMTPTreeDraftProgram:
    """S steps over the committed prefix: the first of the root, the others of a frontier of K branches."""

    name = "tree draft"
    samples = False

    def __init__(
        self,
        model: Any,
        prefix: FrozenPrefix,
        rows: DecodeRows,
        out: FrozenKVMTPTreeBuffers,
        *,
        topk: int,
        num_steps: int,
    ) -> None:
        self._model = model
        self._prefix = prefix
        self._rows = rows
        self._out = out
        self._topk = topk
        self._num_steps = num_steps

    def run(self, step: Step) -> None:
        rows, out = self._rows.first(step.size), self._out.of_width(step.size, step.width)
        out.draft_tokens[:, 0].copy_(rows.bonus_tokens)
        out.parents[:, 0].fill_(0)
        if step.width > 1:
            tokens, parents = self._draft(step, rows, out.hidden_states).select(step.width - 1)
            out.draft_tokens[:, 1:].copy_(tokens)
            out.parents[:, 1:].copy_(parents)

    def _draft(self, step: Step, rows: DecodeRows, seed: torch.Tensor) -> _Candidates:
        """``seed`` [B, H]: the target's hidden state that predicted each root."""
        k = self._topk
        view = self._prefix.geometry(rows, step)
        fb = self._prefix.forward_batch(view, rows.bonus_tokens)
        state, hidden = self._model.forward(fb, seed, self._model.rope_tables(fb.positions))
        tokens, scores = self._model.draft_topk(state, k)
        found = _Candidates()
        found.add(tokens, scores, torch.full_like(tokens, -1))
        wide = expand_for_topk_draft(view, k)
        fb = self._prefix.forward_batch(wide, tokens.view(-1))
        numbers = torch.arange(k, device=tokens.device).expand(step.size, -1)  # of the frontier among all candidates
        hidden, rope = hidden.repeat_interleave(k, dim=0), self._model.rope_tables(fb.positions)
        for _ in range(self._num_steps - 1):
            state, hidden = self._model.forward(with_tokens(fb, tokens.reshape(-1)), hidden, rope)
            children, gains = (part.view(step.size, k, k) for part in self._model.draft_topk(state, k))
            children, totals = children.flatten(1), (scores[:, :, None] + gains).flatten(1)
            first = found.add(children, totals, numbers.repeat_interleave(k, dim=1))
            scores, best = totals.topk(k, dim=1)
            tokens, numbers = children.gather(1, best), best + first
            branch = torch.div(best, k, rounding_mode="floor")
            from_rows = torch.arange(step.size, device=best.device)[:, None] * k + branch
            hidden = hidden[from_rows.view(-1)]
        return found


class FrozenKVMTPTreeVerifyProgram(TargetVerifyProgram):
    """The target over all nodes: its own choice after each, and the hidden states there.

    Node i lies in the i-th slot behind the committed tokens, stands at the position of its depth, and sees the
    committed tokens, its ancestors and itself.
    """

    def tree(self, out: Any) -> TreeRows | None:
        assert isinstance(out, FrozenKVMTPTreeBuffers)
        if out.parents.shape[1] == 1:
            return None
        mask, depths = tree_visibility(out.parents, out.max_depth)
        return TreeRows(out.parents, depths, mask)


class FrozenKVMTPTreeAcceptProgram:
    """Which path of each tree the target agrees with; its KV to the front, and from there the next round's rows.

    ``simulated_len``: as in ``FrozenKVMTPAcceptProgram``.
    """

    name = "tree accept"
    samples = False

    def __init__(
        self,
        memory: KVMemory,
        rows: DecodeRows,
        out: FrozenKVMTPTreeBuffers,
        simulated_len: float | None,
    ) -> None:
        self._memory = memory
        self._rows = rows
        self._out = out
        self._simulated_len = simulated_len

    def run(self, step: Step) -> None:
        rows, out = self._rows.first(step.size), self._out.of_width(step.size, step.width)
        accept_lens, path = accept_tree(out.draft_tokens, out.target_tokens, out.parents, out.max_depth)
        if self._simulated_len is not None:
            lens = simulated_accept_lens(self._simulated_len, rows.seeds, rows.committed_lens)
            accept_lens = lens.clamp(1, out.max_depth + 1)
        accept_lens = torch.minimum(accept_lens, rows.max_drafts + 1)
        self._move_kv(rows, accept_lens, path)
        tokens, last = out.target_tokens.gather(1, path), accept_lens[:, None] - 1
        torch.cat((tokens, accept_lens[:, None]), dim=1, out=out.result)
        rows.bonus_tokens.copy_(tokens.gather(1, last)[:, 0])
        nodes = torch.arange(step.size, device=path.device) * step.width + path.gather(1, last)[:, 0]
        out.hidden_states.copy_(out.verify_hidden.flatten(0, 1)[nodes])
        rows.committed_lens.addcmul_(accept_lens, rows.live)

    def _move_kv(self, rows: DecodeRows, accept_lens: torch.Tensor, path: torch.Tensor) -> None:
        """Accepted nodes into the slots of consecutive positions; a slot behind them keeps what it has."""
        order = torch.arange(1, path.shape[1], device=path.device)
        source = torch.where(order < accept_lens[:, None], path[:, 1:], order)
        table, req_rows, start = self._memory.req_to_token, rows.req_pool_indices[:, None], rows.committed_lens[:, None]
        slots = (table[req_rows, start + node].to(torch.int64).view(-1) for node in (source, order))
        pool = self._memory.pool
        assert isinstance(pool, KVCache), "accepted nodes are moved by the owner of the KV"
        pool.move_slots(*slots)
