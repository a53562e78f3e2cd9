"""Output head fused with the choice of the best token: a row of logits is never written.

Shapes: T rows, D hidden width, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sgl_kernel.activation import softcap_
from sgl_kernel.cpu_ops import usable
from sgl_kernel.launch import triton_kernels


def head_argmax(
    hidden: torch.Tensor, weight: torch.Tensor, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Best token of each row, its logit, and the log-sum-exp over the vocabulary.

    ``hidden`` [T, D]; ``weight`` [V, D]; ``softcap``: logits become c * tanh(logits / c), or None -> ids [T] int64
    (of equal logits the lowest), max logit [T] and log-sum-exp [T] float32. Logits are compared in the weight's dtype,
    so the ids are those of an argmax over a row of logits.
    """
    if hidden.is_cuda:
        return triton_kernels("head_argmax").head_argmax(hidden, weight, softcap)
    return head_argmax_torch(hidden, weight, softcap)


def row_argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``logits`` [T, V] -> the largest of each row [T], and the lowest index that has it [T] int64."""
    ops = usable(logits)
    if ops is None:
        values, ids = logits.max(dim=-1)
        return values, ids
    rows, width = logits.shape
    best, at = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
    ops.sgl_argmax(logits.data_ptr(), best.data_ptr(), at.data_ptr(), rows, width)
    return best, at


def head_argmax_torch(
    hidden: torch.Tensor, weight: torch.Tensor, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The reference of ``head_argmax``."""
    logits = F.linear(hidden, weight)
    if softcap is not None:
        logits = softcap_(logits, softcap)
    best = logits.argmax(dim=-1)
    values = logits.float()
    return best, values.gather(1, best[:, None]).squeeze(1), values.logsumexp(dim=-1)
