"""From a user's prompt to a stream of text: validates, tokenizes, sends to the scheduler, turns replies into text.

Lives on one event loop. Several sequences (a list of prompts, ``n`` samples) are one call and one stream of outputs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.channel import ManagerChannel
from sglang.srt.managers.detokenizer_manager import IncrementalDetokenizer, TokenPieces
from sglang.srt.managers.generate_output import GenerateOutput, Logprobs, TokenRuns, join_outputs
from sglang.srt.managers.intake import PAUSED, Intake, RefusedError
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenOut,
    ControlAction,
    ControlReply,
    ControlReq,
    FromScheduler,
    GenerateReqInput,
    SchedulerReady,
    TokenizedGenerateReqInput,
    TokenOut,
)
from sglang.srt.managers.request_limits import RequestLimits, check_unicode
from sglang.srt.managers.request_logger import RequestLogger
from sglang.srt.managers.request_observer import RequestObserver
from sglang.srt.sampling.logprobs import OutputOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

# longer texts are tokenized in a thread, so that the streams of others go on
_INLINE_TEXT_CHARS = 20_000
# a large checkpoint on a slow disk
_UPDATE_S = 3600.0


class SchedulerDiedError(RuntimeError):
    """The scheduler ended although nobody asked it to; the message names the cause."""


class _Outbox:
    """Outputs of one user request that nobody took yet, joined per sequence: a slow reader delays nobody."""

    __slots__ = ("_waiting", "_error", "_changed")

    def __init__(self) -> None:
        self._waiting: dict[int, GenerateOutput] = {}
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    def put(self, output: GenerateOutput) -> None:
        earlier = self._waiting.get(output.index)
        self._waiting[output.index] = output if earlier is None else output.after(earlier)
        self._changed.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._changed.set()

    async def take(self) -> list[GenerateOutput]:
        """Wait for outputs; at most one for each sequence. Raises the error given to ``fail``."""
        await self._changed.wait()
        self._changed.clear()
        if self._error is not None:
            raise self._error
        outputs, self._waiting = list(self._waiting.values()), {}
        return outputs


@dataclass(slots=True)
class _ReqState:
    """One sequence on its way; the receive loop notes when, in seconds, its first token and its newest output came.

    ``last_output_at`` is the time of the request's arrival before the first output.
    """

    req: TokenizedGenerateReqInput
    prompt: str | tuple[int, ...]
    index: int
    outbox: _Outbox
    detokenizer: IncrementalDetokenizer
    created_at: float
    last_output_at: float
    first_token_at: float | None = None
    text_of: Callable[[int], str] | None = None  # for log-probabilities
    num_tokens: int = 0  # for the log, as are the texts
    texts: list[str] = field(default_factory=list)

    def output(self, out: TokenOut, now: float) -> GenerateOutput:
        if self.first_token_at is None and out.token_ids:
            self.first_token_at = now
        texts = self._texts(out)
        return GenerateOutput(
            index=self.index,
            rid=out.rid,
            text="".join(texts),
            output_ids=out.token_ids,
            finish_reason=out.finish_reason,
            prompt_tokens=out.prompt_tokens,
            completion_tokens=out.completion_tokens,
            cached_tokens=out.cached_tokens,
            spec=out.spec,
            e2e_latency_s=now - self.created_at,
            ttft_s=(now if self.first_token_at is None else self.first_token_at) - self.created_at,
            queue_time_s=out.queue_time_s,
            logprobs=self._logprobs(out),
            hidden_states=out.hidden_states if self.req.return_hidden_states else None,
            runs=TokenRuns(out.accept_lens, texts) if self.req.return_accept_lens else None,
        )

    def _texts(self, out: TokenOut) -> tuple[str, ...]:
        """What is new of the text: in one piece, or by token where runs were asked for."""
        if not self.req.return_accept_lens or not out.token_ids:
            return (self.detokenizer.feed(out.token_ids, out.finish_reason),)
        before = [self.detokenizer.feed((token_id,)) for token_id in out.token_ids[:-1]]
        return (*before, self.detokenizer.feed(out.token_ids[-1:], out.finish_reason))

    def _logprobs(self, out: TokenOut) -> Logprobs | None:
        options = self.req.logprobs
        if options is None:
            return None
        has_top, has_asked = options.top_num > 0, bool(options.token_ids)
        return Logprobs(out.prompt_logprobs, out.logprobs, has_top, has_asked, self.text_of)


@dataclass(slots=True)
class _Question:
    """A ``ControlReq`` on its way to ``num_asked`` schedulers; ``answered`` when all of them replied."""

    num_asked: int
    answered: asyncio.Future[list[ControlReply]]
    replies: list[ControlReply] = field(default_factory=list)

    def take(self, reply: ControlReply) -> None:
        self.replies.append(reply)
        if len(self.replies) == self.num_asked and not self.answered.done():
            self.answered.set_result(self.replies)

    def fail(self, error: Exception) -> None:
        if not self.answered.done():
            self.answered.set_exception(error)


def first_refusal(replies: Sequence[ControlReply]) -> str:
    """Why not all schedulers did what they were told, by the first that did not; "" when all did."""
    return next((reply.message for reply in replies if not reply.ok), "")


class TokenizerManager:
    """Front of a scheduler, or of several replicas. ``start`` it on the event loop that uses it.

    ``ready`` is a scheduler's first message.
    """

    def __init__(
        self,
        channel: ManagerChannel,
        tokenizer: PreTrainedTokenizerFast,
        ready: SchedulerReady,
        *,
        allow_auto_truncate: bool = False,
        request_logger: RequestLogger | None = None,
        observer: RequestObserver | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.limits = RequestLimits.from_info(ready.info, auto_truncate=allow_auto_truncate)
        self.scheduler_info = ready.info
        self._channel = channel
        self.request_logger = request_logger
        self._observer = observer
        self._intake = Intake()
        self._updating = asyncio.Lock()
        self._idle = asyncio.Event()
        self._idle.set()
        self._pieces = TokenPieces(tokenizer)
        self._states: dict[str, _ReqState] = {}
        self._questions: dict[str, _Question] = {}
        self._died: str | None = None
        self._receiver: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to receive replies on the running event loop."""
        self._receiver = asyncio.get_running_loop().create_task(self._receive())

    async def close(self) -> None:
        """Stop receiving; requests that still wait fail. The channel stays open for whoever made it."""
        self.scheduler_died("the engine is shutting down")
        if self._receiver is not None:
            self._receiver.cancel()
            await asyncio.wait([self._receiver])

    @property
    def died(self) -> str | None:
        """Why no request can be served any more; None while all is well."""
        return self._died

    @property
    def num_replicas(self) -> int:
        """Schedulers that serve."""
        return self._channel.num_replicas

    @property
    def lost_replicas(self) -> Mapping[int, str]:
        """Schedulers that ended while others go on, each with the cause."""
        return self._channel.lost_replicas

    @property
    def pieces(self) -> TokenPieces:
        """What each token adds to a text."""
        return self._pieces

    @property
    def num_pending(self) -> int:
        """Sequences that were sent to the scheduler and have not ended."""
        return len(self._states)

    @property
    def closed_because(self) -> str | None:
        """Why a new request would not be served now; None when it would."""
        return self._died or self._intake.closed_because

    def pause_generation(self) -> int:
        """Abort all requests and keep new ones waiting; returns how many sequences were running."""
        self._intake.close(PAUSED)
        return self.abort_request(abort_all=True)

    def continue_generation(self) -> None:
        """Let requests through again, first those that waited."""
        self._intake.open(PAUSED)

    def refuse_requests(self, reason: str) -> None:
        """From now on serve only what runs already."""
        self._intake.refuse(reason)

    async def wait_idle(self) -> None:
        """Until nothing that was sent to the scheduler is unfinished."""
        await self._idle.wait()

    async def update_weights(self, model_path: str, draft_model_path: str | None, *, abort: bool) -> tuple[int, str]:
        """Serve other weights, between the end of what runs (or ``abort`` it) and the beginning of what arrives.

        Returns how many sequences ran, and why it was not done ("" when it was).
        """
        async with self._updating:
            with self._intake.closed("weights are being updated"):
                running = self.abort_request(abort_all=True) if abort else self.num_pending
                await self.wait_idle()
                paths = {"model_path": model_path, "draft_model_path": draft_model_path}
                replies = await self.control("update_weights", timeout_s=_UPDATE_S, data=paths)
        message = first_refusal(replies)
        if message and any(reply.ok for reply in replies):
            done = ", ".join(str(reply.replica) for reply in replies if reply.ok)
            message += f" (replicas that have the new weights: {done}; until an update succeeds replicas differ)"
        return running, message

    def scheduler_died(self, cause: str) -> None:
        """Tell every caller, now and later, that there is no scheduler. The first cause is the one that is told."""
        self._died = self._died or cause
        self._intake.refuse(self._died)  # those who wait hear of it too
        for state in self._states.values():
            state.outbox.fail(SchedulerDiedError(self._died))
        self._states.clear()
        self._idle.set()
        for question in self._questions.values():
            question.fail(SchedulerDiedError(self._died))

    async def generate_request(self, req: GenerateReqInput) -> AsyncGenerator[GenerateOutput, None]:
        """Run all sequences of a request; yields outputs as they arrive, the last of each with a ``finish_reason``.

        Closing the iterator aborts what is unfinished. Raises ``ValueError`` for a bad request before anything is sent,
        ``RequestFailedError`` when the scheduler refuses a sequence, ``RefusedError`` when the server is about to end,
        ``SchedulerDiedError`` when there is no scheduler.
        """
        states = await self._make_states(req)
        try:
            await self._intake.enter()
        except RefusedError:
            if self._died is not None:
                raise SchedulerDiedError(self._died) from None
            raise
        try:
            for state in states:
                if state.req.rid in self._states:
                    raise ValueError(f"rid {state.req.rid!r:.200} is in use: give each running request its own")
                self._states[state.req.rid] = state
                self._idle.clear()
                self._channel.send(state.req)
                if self.request_logger is not None:
                    self.request_logger.received(state.req, state.prompt)
            unfinished = len(states)
            while unfinished:
                for output in await states[0].outbox.take():
                    output.raise_if_failed()
                    unfinished -= output.finish_reason is not None
                    yield output
        finally:
            for state in states:
                if self._states.get(state.req.rid) is state:
                    self._forget(state.req.rid)
                    self._send_abort(state.req.rid)
                    self._note_left(state)

    async def generate_whole(self, req: GenerateReqInput) -> list[GenerateOutput]:
        """Run all sequences to their end; one output for each, in order. Cancelling aborts them."""
        parts: dict[int, list[GenerateOutput]] = {}
        async with contextlib.aclosing(self.generate_request(req)) as outputs:
            async for output in outputs:
                parts.setdefault(output.index, []).append(output)
        return [join_outputs(parts[index]) for index in sorted(parts)]

    def abort_request(self, rid: str | None = None, *, abort_all: bool = False) -> int:
        """Abort the request ``rid`` with all its samples, or all requests; returns how many sequences were running."""
        mine = list(self._states) if abort_all else [r for r in self._states if r == rid or r.startswith(f"{rid}_")]
        for running in mine:
            self._send_abort(running)
        return len(mine)

    async def control(
        self, action: ControlAction, timeout_s: float = 60.0, data: dict[str, Any] | None = None
    ) -> list[ControlReply]:
        """Ask every scheduler; one reply of each that lives, in order of replicas.

        ``SchedulerDiedError`` when there is none, ``asyncio.TimeoutError`` when one is silent.
        """
        if self._died is not None:
            raise SchedulerDiedError(self._died)
        request_id = uuid.uuid4().hex
        question = _Question(self._channel.num_replicas, asyncio.get_running_loop().create_future())
        self._questions[request_id] = question
        try:
            self._channel.send(ControlReq(request_id, action, data or {}))
            replies = await asyncio.wait_for(question.answered, timeout_s)
        finally:
            del self._questions[request_id]
        return sorted((reply for reply in replies if not reply.lost), key=lambda reply: reply.replica)

    async def _make_states(self, req: GenerateReqInput) -> list[_ReqState]:
        created_at = time.monotonic()
        outbox = _Outbox()
        states: list[_ReqState] = []
        for position, (prompt, params) in enumerate(zip(req.prompts, req.sampling_params, strict=True)):
            given_ids = prompt if isinstance(prompt, tuple) else await self.tokenize(prompt, req.param)
            input_ids = self.limits.fit_prompt(req.param, given_ids)
            if len(input_ids) < len(given_ids):
                logger.warning("A prompt of %d tokens was cut to its first %d", len(given_ids), len(input_ids))
            rid = req.rids[position] if req.rids is not None else uuid.uuid4().hex
            check_unicode("rid", rid)
            options = OutputOptions() if req.output_options is None else req.output_options[position]
            for sample in range(params.n):
                fitted = self.limits.fit_params(params, len(input_ids), sample, clamp_length=req.clamp_length)
                tokenized = TokenizedGenerateReqInput(
                    rid=rid if params.n == 1 else f"{rid}_{sample}",
                    input_ids=input_ids,
                    sampling_params=fitted,
                    stream=req.stream,
                    logprobs=options.logprobs,
                    return_hidden_states=options.hidden_states,
                    custom_logit_processor=options.custom_logit_processor,
                    return_accept_lens=options.accept_lens,
                )
                detokenizer = IncrementalDetokenizer(self._pieces, fitted, req.shown_tokens)
                text_of = self._text_of if options.text_in_logprobs else None
                states.append(
                    _ReqState(
                        tokenized, prompt, len(states), outbox, detokenizer, created_at, created_at, text_of=text_of
                    )
                )
        return states

    def _forget(self, rid: str) -> None:
        del self._states[rid]
        if not self._states:
            self._idle.set()

    def _note_left(self, state: _ReqState) -> None:
        if self._observer is not None:
            self._observer.left()
        if self.request_logger is not None:
            self.request_logger.left(state.req.rid, state.num_tokens, time.monotonic() - state.created_at)

    async def tokenize(self, text: str, param: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of a text, with one bos if the tokenizer adds it, also when the text brings its own.

        ``ValueError`` naming ``param`` when the text is not Unicode.
        """
        check_unicode(param, text)
        if len(text) > _INLINE_TEXT_CHARS:
            ids = await asyncio.to_thread(self._encode, text, add_special_tokens)
        else:
            ids = self._encode(text, add_special_tokens)
        bos = self.tokenizer.bos_token_id
        return tuple(ids[1:] if add_special_tokens and ids[:2] == [bos, bos] else ids)

    def _text_of(self, token_id: int) -> str:
        """A token's text by itself; part of a character becomes U+FFFD."""
        return self._pieces.piece(token_id).decode(errors="replace")

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        return ids

    def _send_abort(self, rid: str) -> None:
        if self._died is None:
            self._channel.send(AbortReq(rid))

    async def _receive(self) -> None:
        try:
            while True:
                self._handle(await self._channel.recv())
        except Exception as error:  # nobody awaits this task: whatever broke it must reach those who wait for replies
            logger.exception("receiving from the scheduler failed")
            self.scheduler_died(f"receiving from the scheduler failed: {error!r}")

    def _handle(self, msg: FromScheduler) -> None:
        if isinstance(msg, BatchTokenOut):
            self._deliver(msg)
            return
        if isinstance(msg, SchedulerReady):
            # the first message was taken by whoever started the scheduler; a later one is its last word
            self.scheduler_died(msg.error or "the scheduler started anew")
            return
        question = self._questions.get(msg.request_id)
        if question is not None:
            question.take(msg)

    def _deliver(self, batch: BatchTokenOut) -> None:
        now = time.monotonic()
        for out in batch.outs:
            # a request that its user left is no longer here, and its last replies mean nothing
            state = self._states.get(out.rid)
            if state is None:
                continue
            if out.finish_reason is not None:
                self._forget(out.rid)
            output = state.output(out, now)
            state.outbox.put(output)
            if self._observer is not None:
                self._observer.received(output, now - state.last_output_at, stream=state.req.stream)
            state.last_output_at = now
            if self.request_logger is not None:
                self._log(self.request_logger, state, output)

    def _log(self, request_logger: RequestLogger, state: _ReqState, output: GenerateOutput) -> None:
        state.num_tokens = output.completion_tokens
        if request_logger.keeps_texts:
            state.texts.append(output.text)
        if output.finish_reason is not None:
            request_logger.finished(output, "".join(state.texts))
