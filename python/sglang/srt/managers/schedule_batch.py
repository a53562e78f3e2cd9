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

from sglang.srt.constrained.base_grammar import Grammar
from sglang.srt.managers.io_struct import FinishReason
from sglang.srt.mem_cache.kv_manager import RequestKV
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from sglang.srt.sampling.logprobs import HiddenRows, LogprobOptions, ReqOutputs, TokenLogprobs
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.sampling.stop_regex import RegexStops
from sglang.srt.sampling.thought_budget import ThoughtBudget
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
    num_drafted: int = 0  # drafts verified in these rounds
    accepted_by_position: list[int] = field(default_factory=list)
    drafted_by_position: list[int] = field(default_factory=list)
    regex_stops: RegexStops | None = None  # has read the text so far
    logit_processor: CustomLogitProcessor | None = None
    thought_budget: ThoughtBudget | None = None
    asked: AskedOutputs | None = None
    grammar: Grammar | None = None  # has accepted the output so far
    unsent_accept_lens: list[int] | None = None  # lengths of runs not yet sent; None when nobody asked

    @property
    def edits_logits(self) -> bool:
        """Whether its logits change by what only the host knows."""
        return self.params.edits_logits or self.logit_processor is not None or self.thought_budget is not None

    @property
    def needs_host(self) -> bool:
        """Whether its steps cannot be replayed blindly: the host has to change logits, or to keep them."""
        return self.edits_logits or self.grammar is not None or self.asked is not None

    @property
    def prefix_limit(self) -> int | None:
        """Tokens of its prompt that may come from the prefix cache: rows that are asked for have to be computed."""
        return None if self.asked is None else self.asked.prefix_limit

    @property
    def output_len(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def committed_len(self) -> int:
        return 0 if self.kv is None else self.kv.committed_len

    @property
    def output_ids(self) -> array[int]:
        return self.token_ids[self.prompt_len :]


@dataclass(slots=True, eq=False)  # mutable: the output processor adds what steps computed
class AskedOutputs:
    """What a request wants beside tokens, and what there is of it. Entries of its answer stand beside its tokens.

    ``logprobs`` has ``start_len`` resolved: from 0 to the prompt's length, which reports nothing of the prompt.
    ``next_row``: prompt positions before it have been asked of the model already.
    """

    prompt_len: int
    logprobs: LogprobOptions | None
    hidden_states: bool
    next_row: int
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_hidden: list[tuple[float, ...]] = field(default_factory=list)
    output_logprobs: list[TokenLogprobs] = field(default_factory=list)
    output_hidden: list[HiddenRows] = field(default_factory=list)

    @property
    def prefix_limit(self) -> int | None:
        # the last row chooses the first token and is always computed
        return self.next_row if self.next_row < self.prompt_len - 1 else None

    def rows_of(self, end: int) -> int:
        """How many of the prompt rows before ``end`` are to be kept."""
        return max(0, min(end, self.prompt_len) - self.next_row)

    def take_prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Those that were not taken before."""
        taken, self.prompt_logprobs = tuple(self.prompt_logprobs), []
        return taken

    def add(self, outputs: ReqOutputs, end: int, num_tokens: int) -> None:
        """Take what a step computed up to position ``end``, and for the ``num_tokens`` tokens that the request got."""
        if self.next_row < self.prompt_len:
            self.prompt_logprobs += outputs.prompt_logprobs
            self.prompt_hidden += outputs.prompt_hidden
            self.next_row = max(self.next_row, end)
        self.output_logprobs += outputs.logprobs[:num_tokens]
        for row in outputs.hidden_states[:num_tokens]:
            before = () if self.output_hidden else tuple(self.prompt_hidden)
            self.output_hidden.append((*before, row))


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
    speculation. ``num_drafts``: drafts verified per request (0 in an extend and without speculation). ``outputs``: what
    requests asked for beside tokens, row-aligned, or empty when none did.
    """

    next_token_ids: torch.Tensor
    accept_lens: torch.Tensor
    next_draft_input: SpecInput | None
    num_drafts: int
    outputs: tuple[ReqOutputs | None, ...] = ()
