"""The engine inside a Python program: the same scheduler and tokenizer manager as the server, over memory."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import logging
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TypeVar

from transformers import PreTrainedTokenizerFast

from sglang.srt.entrypoints.native_protocol import generate_events, generate_reply, parse_generate_request
from sglang.srt.entrypoints.profile_request import parse_profile
from sglang.srt.entrypoints.replicas import Schedulers, start_schedulers
from sglang.srt.entrypoints.server_state import ServerState, load_server_tokenizer
from sglang.srt.managers.channel import ManagerChannel, MemorySchedulerChannel, make_memory_channel
from sglang.srt.managers.io_struct import ControlReq, GenerateReqInput, SchedulerReady
from sglang.srt.managers.request_logger import make_request_logger
from sglang.srt.managers.scheduler import run_scheduler
from sglang.srt.managers.tokenizer_manager import SchedulerDiedError, TokenizerManager, first_refusal
from sglang.srt.server_args import ServerArgs
from sglang.srt.server_args_resolution import resolve_server_args

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Engine:
    """Generates text in this process: ``Engine(model_path="tiny-gemma4")``, with the keywords of ``ServerArgs``.

    Usable from any thread and from any event loop. A context manager; ``shutdown`` otherwise. ``ValueError`` for bad
    arguments, ``SchedulerDiedError`` when the model cannot be loaded. With ``tp_size`` or ``dp_size`` above 1 the
    schedulers run in processes of their own, which import the program again: it must start engines under
    ``if __name__ == "__main__"``.
    """

    def __init__(self, *, server_args: ServerArgs | None = None, **kwargs: Any) -> None:
        if server_args is not None and kwargs:
            raise ValueError(f"server_args and {next(iter(kwargs))} cannot both be given: set it in server_args")
        self.server_args = resolve_server_args(server_args or ServerArgs.from_kwargs(kwargs))
        self._loop = asyncio.new_event_loop()
        self._loop_thread = threading.Thread(target=self._loop.run_forever, name="sglang-tokenizer", daemon=True)
        self._channel: ManagerChannel
        self._scheduler: threading.Thread | Schedulers
        if self.server_args.tp_size == self.server_args.dp_size == 1:
            scheduler_channel, self._channel = make_memory_channel(self._loop)
            self._scheduler = threading.Thread(
                target=self._run_scheduler, args=(scheduler_channel,), name="sglang-scheduler", daemon=True
            )
            self._scheduler.start()
        else:
            self._scheduler = start_schedulers(self.server_args)
            self._channel = self._scheduler.channel
        self._loop_thread.start()
        try:
            tokenizer = load_server_tokenizer(self.server_args)
            self._manager = self._wait(self._start(tokenizer))
            self._state = ServerState(self.server_args, self._manager)
        except BaseException:
            self._stop_threads()
            raise
        atexit.register(self.shutdown)

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: Mapping[str, Any] | list[Mapping[str, Any]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        stream: bool = False,
        rid: str | list[str] | None = None,
        return_logprob: bool | list[bool] = False,
        logprob_start_len: int | list[int] | None = None,
        top_logprobs_num: int | list[int] | None = None,
        token_ids_logprob: list[int] | list[list[int]] | None = None,
        return_text_in_logprobs: bool = False,
        return_hidden_states: bool | list[bool] = False,
        return_accept_lens: bool | list[bool] = False,
        custom_logit_processor: str | list[str] | None = None,
    ) -> Any:
        """Reply of ``/generate``: an object for one sequence, a list for several; with ``stream`` an iterator over
        objects that each hold the text so far. Closing the iterator aborts the request."""
        req = parse_generate_request(
            {
                "text": prompt,
                "input_ids": input_ids,
                "sampling_params": sampling_params,
                "stream": stream,
                "rid": rid,
                "return_logprob": return_logprob,
                "logprob_start_len": logprob_start_len,
                "top_logprobs_num": top_logprobs_num,
                "token_ids_logprob": token_ids_logprob,
                "return_text_in_logprobs": return_text_in_logprobs,
                "return_hidden_states": return_hidden_states,
                "return_accept_lens": return_accept_lens,
                "custom_logit_processor": custom_logit_processor,
            }
        )
        if stream:
            return self._iterate(req)
        return generate_reply(req, self._wait(self._manager.generate_whole(req)))

    async def async_generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: Mapping[str, Any] | list[Mapping[str, Any]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        stream: bool = False,
        rid: str | list[str] | None = None,
        return_logprob: bool | list[bool] = False,
        logprob_start_len: int | list[int] | None = None,
        top_logprobs_num: int | list[int] | None = None,
        token_ids_logprob: list[int] | list[list[int]] | None = None,
        return_text_in_logprobs: bool = False,
        return_hidden_states: bool | list[bool] = False,
        return_accept_lens: bool | list[bool] = False,
        custom_logit_processor: str | list[str] | None = None,
    ) -> Any:
        """Like ``generate``, without blocking the caller's event loop; with ``stream`` an async iterator."""
        req = parse_generate_request(
            {
                "text": prompt,
                "input_ids": input_ids,
                "sampling_params": sampling_params,
                "stream": stream,
                "rid": rid,
                "return_logprob": return_logprob,
                "logprob_start_len": logprob_start_len,
                "top_logprobs_num": top_logprobs_num,
                "token_ids_logprob": token_ids_logprob,
                "return_text_in_logprobs": return_text_in_logprobs,
                "return_hidden_states": return_hidden_states,
                "return_accept_lens": return_accept_lens,
                "custom_logit_processor": custom_logit_processor,
            }
        )
        if stream:
            return self._iterate_async(req)
        outputs = await asyncio.wrap_future(self._hand_over(self._manager.generate_whole(req)))
        return generate_reply(req, outputs)

    def get_server_info(self) -> dict[str, Any]:
        """What ``/server_info`` replies."""
        return self._wait(self._state.info())

    def update_weights_from_disk(
        self, model_path: str, draft_model_path: str | None = None, abort_all_requests: bool = False
    ) -> tuple[bool, str]:
        """Serve weights of the same shape from other directories, once what runs has ended, or after its abort.

        Whether it was done, and why not; then the former weights still serve.
        """
        draft = None if draft_model_path is None else Path(draft_model_path)
        update = self._wait(self._state.update_weights(Path(model_path), draft, abort=abort_all_requests))
        return not update.message, update.message

    def start_profile(self, **options: Any) -> str:
        """Trace scheduler steps, with the fields of ``/start_profile``; the folder that the trace will be in."""
        return self._wait(self._state.start_profile(parse_profile(options)))

    def stop_profile(self) -> str:
        """End the trace; its file, with ``dp_size`` above 1 that of the first replica."""
        return self._wait(self._state.stop_profile())[0]

    def encode(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: ``ValueError``."""
        raise ValueError("Engine.encode is not supported: this engine generates text, its models give no embeddings")

    def flush_cache(self) -> bool:
        """Forget all cached prefixes; False when requests are running."""
        return not first_refusal(self._wait(self._manager.control("flush_cache")))

    def abort_request(self, rid: str | None = None, abort_all: bool = False) -> int:
        """Abort one request by its ``rid``, or all; returns how many sequences were running."""
        if not abort_all and not rid:
            raise ValueError("rid must name a request, or abort_all must be true")

        async def abort() -> int:
            return self._manager.abort_request(rid, abort_all=abort_all)

        return self._wait(abort())

    def shutdown(self) -> None:
        """End the engine and release its memory. Calling it again does nothing."""
        if self._loop.is_closed():
            return
        atexit.unregister(self.shutdown)
        self._wait(self._manager.close())
        self._stop_threads()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _run_scheduler(self, channel: MemorySchedulerChannel) -> None:
        try:
            run_scheduler(self.server_args, channel)
        except Exception as error:  # the end of a thread is silent: those who wait for replies must hear of it
            logger.exception("the scheduler failed")
            channel.send(SchedulerReady({}, error=f"the scheduler failed: {error!r}"))

    async def _start(self, tokenizer: PreTrainedTokenizerFast) -> TokenizerManager:
        if isinstance(self._scheduler, threading.Thread):
            ready = await _recv_ready(self._channel)
        else:
            ready = await self._scheduler.wait_ready()
        manager = TokenizerManager(
            self._channel,
            tokenizer,
            ready,
            allow_auto_truncate=self.server_args.allow_auto_truncate,
            request_logger=make_request_logger(self.server_args),
        )
        manager.start()
        if not isinstance(self._scheduler, threading.Thread):
            self._scheduler.watch(manager.scheduler_died)
        return manager

    def _stop_threads(self) -> None:
        if isinstance(self._scheduler, threading.Thread):
            self._channel.send(ControlReq("shutdown", "shutdown"))
            self._scheduler.join()
        else:
            self._wait(_stop(self._scheduler))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._loop_thread.join()
        self._loop.close()

    def _hand_over(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run on the engine's loop, from any thread."""
        if self._loop.is_closed():
            work.close()
            raise SchedulerDiedError("the engine has been shut down: make a new one")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future = self._hand_over(work)
        try:
            return future.result()
        finally:
            future.cancel()  # an interrupt of the caller (Ctrl-C) must not leave the work running

    def _iterate(self, req: GenerateReqInput) -> Iterator[dict[str, Any]]:
        events = generate_events(self._manager, req)
        try:
            while (event := self._wait(_next(events))) is not None:
                yield event
        finally:
            if not self._loop.is_closed():
                self._wait(_close(events))

    async def _iterate_async(self, req: GenerateReqInput) -> AsyncGenerator[dict[str, Any], None]:
        events = generate_events(self._manager, req)
        try:
            while (event := await asyncio.wrap_future(self._hand_over(_next(events)))) is not None:
                yield event
        finally:
            if not self._loop.is_closed():
                await asyncio.wrap_future(self._hand_over(_close(events)))


async def _recv_ready(channel: ManagerChannel) -> SchedulerReady:
    ready = await channel.recv()
    assert isinstance(ready, SchedulerReady), ready
    if ready.error is not None:
        raise SchedulerDiedError(ready.error)
    return ready


async def _stop(scheduler: Schedulers) -> None:
    """On the loop that watches it."""
    scheduler.unwatch()
    scheduler.stop()


async def _next(events: AsyncGenerator[dict[str, Any], None]) -> dict[str, Any] | None:
    return await anext(events, None)


async def _close(events: AsyncGenerator[dict[str, Any], None]) -> None:
    await events.aclose()
