"""A request, a step's batch, and a step's result.

Two definitions the whole engine uses:

``seq_lens``: tokens whose KV is committed in the pool (``req.kv.committed_len``).
*bonus token*: the newest token of a running request. It is sampled, but its KV is not in the pool yet. A running
request with L tokens (prompt + output) therefore has L - 1 committed, and its bonus token stands at position L - 1.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import torch

from sglang.srt.managers.io_struct import FinishReason
from sglang.srt.mem_cache.kv_manager import RequestKV
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpecInput


@dataclass(slots=True, eq=False)  # mutable: scheduler and output processor edit it between steps
class Req:
    """One sequence from arrival to its final reply.

    ``token_ids``: prompt then output. ``seed``: what its draws are keyed by. ``stop_ids``: ids that end it (empty with
    ``ignore_eos`` unless the user gave some). ``max_new_tokens`` is already limited by the context.
    """

    rid: str
    token_ids: array[int]
    prompt_len: int
    params: SamplingParams
    max_new_tokens: int
    stop_ids: frozenset[int]
    seed: int
    stream: bool
    arrival_s: float
    kv: RequestKV | None = None
    finish: FinishReason | None = None
    cached_len: int | None = None  # prompt tokens found in the cache at first admission
    first_run_s: float | None = None
    sent_len: int = 0  # output tokens already sent to the user
    verify_ct: int = 0
    accepted_by_position: list[int] = field(default_factory=list)

    @property
    def output_len(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def committed_len(self) -> int:
        return 0 if self.kv is None else self.kv.committed_len

    @property
    def output_ids(self) -> array[int]:
        return self.token_ids[self.prompt_len :]


@dataclass(frozen=True, slots=True)
class ScheduleBatch:
    """What one step runs. Workers never assign to it.

    EXTEND: request ``i`` computes positions ``committed_len .. committed_len + extend_lens[i]``, for which it owns
    slots. DECODE: each request owns slots for ``committed_len + max_tokens_per_step`` positions; ``extend_lens`` is
    empty and ``spec_info`` (None without speculation) is row-aligned with ``reqs``.
    """

    mode: ForwardMode
    reqs: tuple[Req, ...]
    extend_lens: tuple[int, ...]
    sampling_info: SamplingBatchInfo
    spec_info: SpecInput | None


@dataclass(frozen=True, slots=True)
class GenerationBatchResult:
    """A run of one or more tokens per request: row ``b`` gains ``next_token_ids[b, :accept_lens[b]]``.

    ``next_token_ids`` [B, N] int64, ``accept_lens`` [B] int64 in 1..N. For an extend, rows of requests whose prompt is
    not complete yet carry a token that means nothing. ``next_draft_input`` is row-aligned with the batch; None without
    speculation. ``num_drafts``: drafts verified per request (0 in an extend and without speculation).
    """

    next_token_ids: torch.Tensor
    accept_lens: torch.Tensor
    next_draft_input: SpecInput | None
    num_drafts: int
