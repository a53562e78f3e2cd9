"""Messages between the tokenizer manager and the scheduler. Plain picklable data; nothing here behaves.

Every ``TokenizedGenerateReqInput`` is answered by one or more ``TokenOut`` with its ``rid``; exactly one of them has a
``finish_reason``. Every ``ControlReq`` is answered by exactly one ``ControlReply`` with the same ``request_id``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from sglang.srt.sampling.logprobs import HiddenRows, LogprobOptions, OutputOptions, TokenLogprobs
from sglang.srt.sampling.sampling_params import SamplingParams

# kinds of FinishReason, as they appear in meta_info["finish_reason"]["type"]
FinishType = Literal["stop", "length", "abort"]
ControlAction = Literal[
    "flush_cache",
    "server_info",
    "check_integrity",
    "ping",
    "shutdown",
    "start_profile",
    "stop_profile",
    "reconfigure",
    "update_weights",
]


@dataclass(frozen=True, slots=True)
class FinishReason:
    """Why a request ended. ``matched`` is the stop token id or string; ``status`` is the HTTP status of an abort."""

    type: FinishType
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None
    status: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """The shape users see in ``meta_info["finish_reason"]``."""
        if self.type == "stop":
            return {"type": "stop", "matched": self.matched}
        if self.type == "length":
            return {"type": "length", "length": self.length}
        return {"type": "abort", "message": self.message, "status_code": self.status}


@dataclass(frozen=True, slots=True)
class GenerateReqInput:
    """One user request before tokenizing: a prompt (text or token ids) with its sampling controls per sequence wanted.

    ``output_options``: what is wanted beside text, one for each prompt, or None for nothing.
    ``rids`` has one id per prompt, or is None to have them made. ``is_single`` remembers that the user sent one prompt
    and not a list. ``clamp_length`` allows to lower ``max_new_tokens``, which the user did not choose, to what the
    context leaves. ``param`` names the field that held the prompts, for error messages. ``shown_tokens``: the special
    tokens that texts show, and they show no others; None leaves that to ``skip_special_tokens``.
    """

    prompts: tuple[str | tuple[int, ...], ...]
    sampling_params: tuple[SamplingParams, ...]
    stream: bool
    rids: tuple[str, ...] | None = None
    is_single: bool = True
    clamp_length: bool = False
    param: str = "text"
    output_options: tuple[OutputOptions, ...] | None = None
    shown_tokens: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class TokenizedGenerateReqInput:
    """One sequence to generate (``n > 1`` is fanned out by the tokenizer manager before this point)."""

    rid: str
    input_ids: tuple[int, ...]
    sampling_params: SamplingParams
    stream: bool
    logprobs: LogprobOptions | None = None
    return_hidden_states: bool = False
    custom_logit_processor: str | None = None
    return_accept_lens: bool = False


@dataclass(frozen=True, slots=True)
class AbortReq:
    """Abort one request by id, or all of them. Aborted requests get their final ``TokenOut`` (finish type "abort")."""

    rid: str | None
    abort_all: bool = False


@dataclass(frozen=True, slots=True)
class ControlReq:
    """A question or command outside generation. ``data``: for ``start_profile`` the fields of ``ProfileOptions``, for
    ``reconfigure`` those of ``ScheduleConfig`` that change, for ``update_weights`` ``model_path`` and
    ``draft_model_path`` (None where the assistant stays)."""

    request_id: str
    action: ControlAction
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ControlReply:
    """``replica``: whose reply it is, where there are several; ``lost`` when it ended before it could reply."""

    request_id: str
    ok: bool
    message: str
    data: dict[str, Any]
    replica: int = 0
    lost: bool = False


@dataclass(frozen=True, slots=True)
class SpecStats:
    """Counts of one request's speculative rounds. Position j (from 0) of ``accepted_by_position`` counts rounds that
    accepted draft j, of ``drafted_by_position`` those that had one."""

    verify_ct: int
    accepted_tokens: int
    draft_tokens: int
    accepted_by_position: tuple[int, ...]
    drafted_by_position: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TokenOut:
    """New tokens of one request. Counters are totals so far; times are seconds of the scheduler's monotonic clock.

    ``token_ids`` holds only tokens the user gets: a run is already cut at its earliest end event. A matched stop token
    is included as the last id (its text is not shown); ``finish_reason.matched`` as a string says where text is cut.
    ``logprobs`` and ``hidden_states`` have an entry for each of ``token_ids``, where they were asked for: of hidden
    states those rows that were computed for this token, the first time the whole prompt's. ``prompt_logprobs`` come
    with the first reply. ``accept_lens``: lengths of the runs that ``token_ids`` came in, where they were asked for.
    """

    rid: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    spec: SpecStats | None
    queue_time_s: float
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    hidden_states: tuple[HiddenRows, ...] = ()
    accept_lens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class BatchTokenOut:
    """All replies of one scheduler step."""

    outs: tuple[TokenOut, ...]


@dataclass(frozen=True, slots=True)
class SchedulerReady:
    """First message of a scheduler. ``info`` holds facts for ``/server_info`` and ``/get_model_info``; an ``error``
    ends the start-up with that sentence. Keys of ``info`` that others rely on: ``max_req_input_len`` (tokens),
    ``context_len``, ``max_total_num_tokens``, ``vocab_size``."""

    info: dict[str, Any]
    error: str | None = None


ToScheduler = TokenizedGenerateReqInput | AbortReq | ControlReq
FromScheduler = BatchTokenOut | ControlReply | SchedulerReady
