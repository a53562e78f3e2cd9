"""Controls that change logits by what a request has emitted so far, row by row of a verified block.

Row j of a request sees its output plus the drafts before j, so a verified block and plain decode cannot differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor, RowRequest, run_processor
from sglang.srt.sampling.thought_budget import ThoughtBudget


class RequestFault(RuntimeError):
    """A step cannot go on because of one request, whose user is at fault; the others can run again without it."""

    def __init__(self, req: Req, message: str) -> None:
        super().__init__(message)
        self.req = req
        self.message = message


def apply_logit_controls(
    logits: torch.Tensor, reqs: Sequence[Req], rows: torch.Tensor, parents: torch.Tensor | None = None
) -> None:
    """Edit ``logits`` [B * N, V] in place for the requests that ask for it.

    ``rows`` [B, N] int64: the newest token of each request, already in its ``token_ids``, then its drafts;
    ``parents`` [B, N] int64: the row each draft follows, None when that is the one before it.
    Repetition (prompt and output), frequency and presence penalty (output), bias, minimum length, custom processor,
    thinking budget: in this order. ``RequestFault`` when a custom processor fails.
    """
    width = rows.shape[1]
    for b, req in enumerate(reqs):
        if req.edits_logits:
            above = range(-1, width - 1) if parents is None else parents[b].tolist()
            prefixes = _prefixes(rows[b].tolist(), above)
            _edit(logits[b * width : (b + 1) * width], req, prefixes)


def _prefixes(tokens: Sequence[int], parents: Sequence[int]) -> list[tuple[int, ...]]:
    """The drafts that each row sees, its own among them. The root is no draft."""
    prefixes: list[tuple[int, ...]] = [()]
    for row in range(1, len(tokens)):
        prefixes.append((*prefixes[parents[row]], tokens[row]))
    return prefixes


def _edit(logits: torch.Tensor, req: Req, prefixes: Sequence[tuple[int, ...]]) -> None:
    """``logits`` [N, V] of one request, whose row j stands behind its tokens and ``prefixes[j]``."""
    if req.params.edits_logits:
        _penalise(logits, req, prefixes)
    if req.logit_processor is not None:
        _process(logits, req, req.logit_processor, prefixes)
    if req.thought_budget is not None:
        _close_thoughts(logits, req, req.thought_budget, prefixes)


def _penalise(logits: torch.Tensor, req: Req, prefixes: Sequence[tuple[int, ...]]) -> None:
    params, device, vocab = req.params, logits.device, logits.shape[1]
    output = torch.tensor(req.output_ids, dtype=torch.int64, device=device)
    emitted = torch.bincount(output, minlength=vocab).to(torch.float32)
    known = emitted > 0
    known[torch.tensor(req.token_ids[: req.prompt_len], dtype=torch.int64, device=device)] = True
    bias_ids = torch.tensor([token for token, _ in params.logit_bias], dtype=torch.int64, device=device)
    bias = torch.tensor([value for _, value in params.logit_bias], device=device)
    stops = torch.tensor(sorted(req.stop_ids), dtype=torch.int64, device=device)
    for j, prefix in enumerate(prefixes):
        drafts = torch.tensor(prefix, dtype=torch.int64, device=device)
        counts = emitted + torch.bincount(drafts, minlength=vocab)
        seen = known | (counts > 0)
        row = logits[j].float()
        scaled = torch.where(row > 0, row / params.repetition_penalty, row * params.repetition_penalty)
        row = torch.where(seen, scaled, row)
        row = row - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
        row[bias_ids] += bias
        if req.output_len + len(prefix) < params.min_new_tokens:
            row[stops] = float("-inf")
        logits[j] = row


def _process(
    logits: torch.Tensor, req: Req, processor: CustomLogitProcessor, prefixes: Sequence[tuple[int, ...]]
) -> None:
    prompt, output = tuple(req.token_ids[: req.prompt_len]), tuple(req.output_ids)
    given = [
        {**(req.params.custom_params or {}), "__req__": RowRequest(req.rid, prompt, output + prefix, req.params)}
        for prefix in prefixes
    ]
    try:
        logits.copy_(run_processor(processor, logits.float(), given))
    except Exception as error:  # whatever a user's code raises ends the user's request and no other
        raise RequestFault(req, f"custom_logit_processor failed: {error!r:.300}") from error


def _close_thoughts(logits: torch.Tensor, req: Req, budget: ThoughtBudget, prefixes: Sequence[tuple[int, ...]]) -> None:
    now = budget.state(req.token_ids, req.prompt_len)
    for j, prefix in enumerate(prefixes):
        state = now
        for token_id in prefix:
            state = state.after(token_id, budget.tokens)
        if budget.must_close(state):
            logits[j] = float("-inf")
            logits[j, budget.tokens.close_id] = 0.0
