"""Controls that change logits by what a request has emitted so far, row by row of a verified block.

Row j of a request sees its output plus the drafts before j, so a verified block and plain decode cannot differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang.srt.managers.schedule_batch import Req


def apply_logit_controls(logits: torch.Tensor, reqs: Sequence[Req], rows: torch.Tensor) -> None:
    """Edit ``logits`` [B * N, V] in place for the requests that ask for it.

    ``rows`` [B, N] int64: the newest token of each request, already in its ``token_ids``, then its drafts.
    Repetition (prompt and output), frequency and presence penalty (output), bias, minimum length: in this order.
    """
    width = rows.shape[1]
    for b, req in enumerate(reqs):
        if req.params.edits_logits:
            _edit(logits[b * width : (b + 1) * width], req, rows[b])


def _edit(logits: torch.Tensor, req: Req, drafts: torch.Tensor) -> None:
    """``logits`` [N, V] of one request, ``drafts`` [N]."""
    params, device, vocab = req.params, logits.device, logits.shape[1]
    output = torch.tensor(req.output_ids, dtype=torch.int64, device=device)
    counts = torch.bincount(output, minlength=vocab).to(torch.float32)
    seen = counts > 0
    seen[torch.tensor(req.token_ids[: req.prompt_len], dtype=torch.int64, device=device)] = True
    bias_ids = torch.tensor([token for token, _ in params.logit_bias], dtype=torch.int64, device=device)
    bias = torch.tensor([value for _, value in params.logit_bias], device=device)
    stops = torch.tensor(sorted(req.stop_ids), dtype=torch.int64, device=device)
    for j in range(len(drafts)):
        if j:
            counts[drafts[j]] += 1
            seen[drafts[j]] = True
        row = logits[j].float()
        scaled = torch.where(row > 0, row / params.repetition_penalty, row * params.repetition_penalty)
        row = torch.where(seen, scaled, row)
        row = row - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
        row[bias_ids] += bias
        if req.output_len + j < params.min_new_tokens:
            row[stops] = float("-inf")
        logits[j] = row
