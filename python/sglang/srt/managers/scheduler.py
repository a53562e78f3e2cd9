"""The engine's loop: receive, schedule, run, apply, reply. One thread, and no work that is not in a step."""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sglang.srt.distributed.lockstep import RANK_LOST_EXIT_STATUS, RankLostError
from sglang.srt.distributed.parallel_state import TpGroup, TpRank, join_group
from sglang.srt.layers.logit_controls import RequestFault
from sglang.srt.managers.admission import make_limits, make_req
from sglang.srt.managers.channel import SchedulerChannel, ZmqOutbox, ZmqSchedulerChannel
from sglang.srt.managers.detokenizer_manager import TokenPieces
from sglang.srt.managers.grammar_manager import GrammarManager, make_grammar_manager
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenOut,
    ControlReply,
    ControlReq,
    SchedulerReady,
    TokenizedGenerateReqInput,
    TokenOut,
    ToScheduler,
)
from sglang.srt.managers.metrics import Load, SchedulerMetrics
from sglang.srt.managers.model_worker import ModelWorker
from sglang.srt.managers.output_processor import OutputProcessor
from sglang.srt.managers.profiler import ProfileOptions, StepProfiler
from sglang.srt.managers.running_batch import RunningBatch, make_sampling_info, open_rows
from sglang.srt.managers.schedule_batch import GenerationBatchResult, Req, ScheduleBatch
from sglang.srt.managers.schedule_policy import PrefillPlanner, WaitingOrder, make_room_for_decode, retract
from sglang.srt.managers.self_test import run_self_test, self_test_ids
from sglang.srt.managers.tp_channel import make_tp_channel
from sglang.srt.managers.watchdog import Stages, Watchdog, report_hang, report_hang_and_exit
from sglang.srt.managers.worker_factory import create_worker
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.server_args import PortArgs, ServerArgs
from sglang.srt.server_args_slices import ScheduleConfig
from sglang.srt.utils.device import make_device, set_compute_threads
from sglang.srt.utils.env import SGLANG_CPU_THREADS, SGLANG_TORCH_PROFILER_DIR
from sglang.srt.utils.hf_transformers.tokenizer import load_tokenizer
from sglang.srt.utils.log import configure_logger

logger = logging.getLogger(__name__)

PendingResult = Callable[[], GenerationBatchResult]

_GRAMMAR_WAIT_S = 0.01  # how long an idle loop sleeps for a grammar before it looks for messages again


class Scheduler:
    """Owns every request from its arrival to its final reply.

    A request is in exactly one place: ``grammars`` (until its grammar is compiled), ``waiting`` (also after a
    retraction), ``chunked`` (its prompt is being prefilled over several steps), or ``running`` (it decodes).
    """

    def __init__(
        self,
        worker: ModelWorker,
        config: ScheduleConfig,
        channel: SchedulerChannel,
        *,
        device: torch.device,
        pieces: TokenPieces | None,
        random_seed: int,
        grammars: GrammarManager | None = None,
        profiler: StepProfiler | None = None,
        group: TpGroup | None = None,
    ) -> None:
        """``group``: ranks whose schedulers get the same messages in the same turns; None for the only one."""
        self.worker = worker
        self.config = config
        self.channel = channel
        self.kv_manager = worker.kv_manager
        self.facts = worker.describe()
        self.limits = make_limits(self.facts, worker.capabilities, config, pieces)
        num_drafts = worker.capabilities.max_drafts
        self.metrics = SchedulerMetrics(num_drafts)
        self.grammars = GrammarManager() if grammars is None else grammars
        self.stages = Stages()
        self._profiler = profiler
        self._group = group or TpGroup()
        self.waiting: list[Req] = []
        self.chunked: Req | None = None
        self.running = RunningBatch(device)
        self._device = device
        self._seeds = random.Random(random_seed)
        self._order = WaitingOrder(config.policy, self.kv_manager, random_seed)
        width = worker.capabilities.max_tokens_per_step
        self._planner = PrefillPlanner(self.kv_manager, config, _max_running(self.facts, config), width)
        self._output = OutputProcessor(
            self.kv_manager, pieces, self.metrics, stream_interval=config.stream_interval, num_drafts=num_drafts
        )
        self._outs: list[TokenOut] = []
        self._extended_last = False
        self._ahead: tuple[ScheduleBatch, PendingResult] | None = None  # a decode step that runs already
        self._shutdown: ControlReq | None = None

    @property
    def has_work(self) -> bool:
        return self._can_run or len(self.grammars) > 0

    @property
    def _num_queued(self) -> int:
        return len(self.waiting) + len(self.grammars)

    @property
    def _can_run(self) -> bool:
        return bool(self.waiting or self.running.reqs) or self.chunked is not None or self._ahead is not None

    def event_loop(self) -> None:
        """Serve until a shutdown is asked for; an idle loop sleeps in ``recv``.

        Raises RuntimeError when a failed step left the KV memory out of balance.
        """
        while self._shutdown is None:
            idle = not self.has_work
            self.stages.enter(None if idle else "receive")
            messages = self.channel.recv(None if idle else 0)
            self.stages.enter("receive")
            if idle:
                self.metrics.begin_interval()
            for message in messages:
                self.handle(message)
            if self.has_work:
                self.step()
            self.stages.enter("reply")
            self._send_outputs()
        self.abort(AbortReq(None, abort_all=True))
        self._send_outputs()
        self.channel.send(ControlReply(self._shutdown.request_id, True, "", {}))

    def handle(self, message: ToScheduler) -> None:
        if isinstance(message, TokenizedGenerateReqInput):
            self.submit(message)
        elif isinstance(message, AbortReq):
            self.abort(message)
        elif message.action == "shutdown":
            self._shutdown = message
        else:
            self.stages.enter(None)  # somebody waits for this, however long it takes
            ok, text, data = self._control(message)
            self.channel.send(ControlReply(message.request_id, ok, text, data))
            self.stages.enter("receive")

    def submit(self, message: TokenizedGenerateReqInput) -> None:
        """Queue a request, or answer at once that it cannot be served."""
        self.metrics.totals.num_requests += 1
        try:
            req = make_req(message, self.limits, self._seeds, time.monotonic())
        except ValueError as error:
            self._outs.append(self._output.refuse(message, str(error), 400))
            return
        limit = self.config.max_queued_requests
        if limit is not None and self._num_queued >= limit:
            text = f"the queue is full ({limit} requests are waiting): try again later"
            self._outs.append(self._output.refuse(message, text, 503))
            return
        try:
            if not self.grammars.add(req):
                self.waiting.append(req)
        except ValueError as error:
            self._outs.append(self._output.refuse(message, str(error), 400))

    def abort(self, message: AbortReq) -> None:
        """End the requests that ``message`` names; an id that is not here has ended already."""
        chunked = () if self.chunked is None else (self.chunked,)
        here = [*self.grammars.reqs, *self.waiting, *chunked, *self.running.reqs]
        for req in here:
            if message.abort_all or req.rid == message.rid:
                self._outs.append(self._output.abort(req, "the request was aborted", None))
        self._forget_finished()

    def step(self, *, run_ahead: bool = True) -> None:
        """Run one batch and apply its result, or wait a moment for a grammar. Needs work to do.

        Where the worker can, the next decode step of the same requests is started before this one's result is read, so
        that the device does not wait for the host.
        """
        self.stages.enter("schedule")
        if len(self.grammars):
            self._take_compiled()
            if not self._can_run:
                return
        began_s = time.monotonic()
        started, self._ahead = self._ahead, None
        batch = self._next_batch() if started is None else started[0]
        beside = self._decode_beside() if batch.mode is ForwardMode.EXTEND else None
        self.stages.enter("forward")
        try:
            if beside is not None:
                result, decoded = self.worker.forward_mixed(batch, beside)
            elif batch.mode is ForwardMode.EXTEND:
                result = self.worker.forward_batch_generation(batch)
            else:
                pending = self.worker.launch(batch) if started is None else started[1]
                if run_ahead:
                    self._run_ahead(batch)
                result = pending()
        except RequestFault as fault:
            self._fail_one(_requests(batch, beside), fault)
            return
        except Exception:  # whatever a model's code raises must not end the other requests
            if self._group.size > 1:
                raise  # the other ranks wait for this one's part of the step
            reqs = _requests(batch, beside)
            logger.exception("a step of %d requests failed", len(reqs))
            self._fail(reqs)
            return
        self.stages.enter("apply")
        if beside is not None:
            self._apply(beside, decoded)
        self._apply(batch, result)
        if self._profiler is not None:
            self._profiler.after_step()
        is_decode = batch.mode is ForwardMode.DECODE
        (self.metrics.decode_step_s if is_decode else self.metrics.prefill_step_s).observe(time.monotonic() - began_s)

    def _apply(self, batch: ScheduleBatch, result: GenerationBatchResult) -> None:
        self._outs += self._output.apply(batch, result)
        if batch.mode is ForwardMode.EXTEND:
            complete = [row for row in open_rows(batch.reqs) if batch.reqs[row] is not self.chunked]
            self.running.add(batch, complete, result.next_draft_input)
            return
        self.running.advance(batch, result.next_draft_input)
        self._planner.ratio.decay()
        if self.metrics.totals.decode_steps % self.config.decode_log_interval == 0:
            self.metrics.log_decode(self.load())

    def _take_compiled(self) -> None:
        """Queue the requests whose grammars are ready; sleep for the next one if nothing can run without it."""
        if not self._can_run and self._group.leads:
            self.grammars.wait(_GRAMMAR_WAIT_S)
        verdicts = self._group.share(lambda: json.dumps(self.grammars.verdicts()).encode())
        ready, refused = self.grammars.take(json.loads(verdicts))
        self.waiting += ready
        for refusal in refused:
            self._outs.append(self._output.abort(refusal.req, refusal.message, 400))

    def _run_ahead(self, batch: ScheduleBatch) -> None:
        """Start the step after ``batch``'s, unless another batch should come first or nobody would need it."""
        width = self.worker.capabilities.max_tokens_per_step
        if not self.worker.capabilities.supports_overlap or batch.reqs is not self.running.reqs:
            return
        if self.chunked is not None or (self.waiting and self._planner.has_room(self.running.reqs, None)):
            return
        ends = all(req.output_len + 1 >= req.max_new_tokens for req in batch.reqs)
        if ends or not self.worker.can_run_ahead(batch):
            return
        # what this step commits is not known yet: slots for two whole steps
        if all(req.kv and self.kv_manager.grow(req.kv, req.committed_len + 2 * width) for req in batch.reqs):
            following = self.running.to_batch()
            self._ahead = following, self.worker.launch(following)

    def run_alone(self, message: TokenizedGenerateReqInput) -> TokenOut:
        """Run one request, not streamed, to its end without the channel; its final reply. Needs an idle scheduler."""
        self.submit(message)
        while self.has_work:
            self.step()
        (out,) = self._outs
        self._outs.clear()
        return out

    def reset(self) -> None:
        """Empty cache and counters, as if just started."""
        flushed = self.kv_manager.flush()
        assert flushed, "requests are running"
        self.metrics.reset()

    def _send_outputs(self) -> None:
        if self._outs:
            self.channel.send(BatchTokenOut(tuple(self._outs)))
            self._outs.clear()

    def _next_batch(self) -> ScheduleBatch:
        """Prefill first; but chunks of one prompt take turns with decode steps, so that streams go on."""
        decode_turn = self._extended_last and self.chunked is not None and bool(self.running.reqs)
        batch = None if decode_turn else self._next_extend()
        if batch is None and self.running.reqs:
            self._make_room()
            if self.running.reqs:
                self._extended_last = False
                return self.running.to_batch()
        batch = batch or self._next_extend()
        assert batch is not None, f"nothing can run: {len(self.waiting)} waiting, {self.kv_manager.stats()}"
        self._extended_last = True
        return batch

    def _decode_beside(self) -> ScheduleBatch | None:
        """The decode step that an extend step takes along; None when it should run alone, or memory is short."""
        width, reqs = self.worker.capabilities.max_tokens_per_step, self.running.reqs
        if not self.config.enable_mixed_chunk or not reqs:
            return None
        if not all(req.kv and self.kv_manager.grow(req.kv, req.committed_len + width) for req in reqs):
            return None
        self._extended_last = False
        return self.running.to_batch()

    def _next_extend(self) -> ScheduleBatch | None:
        can_admit = bool(self.waiting) and self._planner.has_room(self.running.reqs, self.chunked)
        if not can_admit and self.chunked is None:
            return None
        if can_admit:
            self._order.sort(self.waiting)
        plan = self._planner.plan(self.waiting, self.running.reqs, self.chunked)
        if plan is None:
            return None
        admitted = [req for req in plan.reqs if req is not self.chunked]
        # the planner takes from the beginning of the queue
        del self.waiting[: len(admitted)]
        self.chunked = plan.chunked
        for req in admitted:
            self._note_admission(req)
        num_cached = sum(req.kv.cached_len for req in admitted if req.kv is not None)
        self.metrics.log_prefill(self.load(), len(admitted), sum(plan.extend_lens), num_cached)
        info = make_sampling_info(plan.reqs, self._device)
        return ScheduleBatch(ForwardMode.EXTEND, plan.reqs, plan.extend_lens, info, None)

    def _note_admission(self, req: Req) -> None:
        if req.first_run_s is not None:
            return
        assert req.kv is not None
        req.first_run_s = time.monotonic()
        req.cached_len = req.kv.cached_len
        self.metrics.totals.prompt_tokens += req.prompt_len
        self.metrics.totals.cached_tokens += req.cached_len

    def _make_room(self) -> None:
        """Slots for the next decode step of all running requests, or of those that remain."""
        width = self.worker.capabilities.max_tokens_per_step
        retracted = make_room_for_decode(self.kv_manager, self.running.reqs, self.chunked, width)
        if not retracted:
            return
        if self.chunked in retracted:
            self.chunked = None
        self.running.keep_open()
        self.waiting[:0] = reversed(retracted)
        self.metrics.totals.num_retractions += len(retracted)
        self._planner.ratio.rise()
        logger.info("KV pool is full. #retracted-req: %d, #running-req: %d", len(retracted), len(self.running.reqs))

    def _fail(self, reqs: Sequence[Req]) -> None:
        self._ahead = None
        for req in reqs:
            self._outs.append(self._output.abort(req, "the step that ran this request failed, see the log", 500))
        self._forget_finished()
        self.kv_manager.check_integrity()

    def _fail_one(self, reqs: Sequence[Req], fault: RequestFault) -> None:
        """End the request at fault; the others of its step start again from what was committed before."""
        self._ahead = None
        self._outs.append(self._output.abort(fault.req, fault.message, 400))
        others = [req for req in reqs if req.kv is not None]
        for req in others:
            retract(req, self.kv_manager)
        if self.chunked in reqs:
            self.chunked = None
        self.waiting[:0] = others
        self._forget_finished()

    def _forget_finished(self) -> None:
        self.grammars.forget_finished()
        self.waiting = [req for req in self.waiting if req.finish is None]
        if self.chunked is not None and self.chunked.finish is not None:
            self.chunked = None
        self.running.keep_open()

    def _control(self, message: ControlReq) -> tuple[bool, str, dict[str, Any]]:
        """Whether it was done, why not, and what there is to know."""
        commands: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "ping": lambda _: {},
            "server_info": lambda _: self.server_info(),
            "flush_cache": self._flush_cache,
            "check_integrity": self._check_integrity,
            "start_profile": partial(self._profile, start=True),
            "stop_profile": partial(self._profile, start=False),
            "reconfigure": self._reconfigure,
            "update_weights": self._update_weights,
        }
        try:
            return True, "", commands[message.action](message.data)
        except ValueError as error:
            return False, str(error), {}

    def _flush_cache(self, data: dict[str, Any]) -> dict[str, Any]:
        if self.has_work or not self.kv_manager.flush():
            raise ValueError("requests are running or waiting: flush the cache when they ended")
        return {}

    def _check_integrity(self, data: dict[str, Any]) -> dict[str, Any]:
        try:
            self.kv_manager.check_integrity()
        except RuntimeError as error:
            raise ValueError(str(error)) from error
        return asdict(self.kv_manager.stats())

    def _profile(self, data: dict[str, Any], *, start: bool) -> dict[str, Any]:
        if self._profiler is None:
            raise ValueError("this scheduler was made without a profiler")
        if start:
            return {"output_dir": self._profiler.start(ProfileOptions(**data))}
        return {"output_file": self._profiler.stop()}

    def _reconfigure(self, data: dict[str, Any]) -> dict[str, Any]:
        """Bounds may change while requests run: those that run already stay."""
        self.config = replace(self.config, **data)
        self._planner.reconfigure(self.config, _max_running(self.facts, self.config))
        self._output.stream_interval = self.config.stream_interval
        return {}

    def _update_weights(self, data: dict[str, Any]) -> dict[str, Any]:
        if self._ahead is not None:
            self.step(run_ahead=False)  # its requests may all have been aborted
        if self.has_work:
            raise ValueError("requests are running or waiting: weights can change when they ended")
        draft = data["draft_model_path"]
        failure: ValueError | None = None
        try:
            self.worker.update_weights(Path(data["model_path"]), None if draft is None else Path(draft))
        except ValueError as error:
            failure = error
        if not self._group.least(failure is None) and failure is None:
            raise RuntimeError("another rank could not read the weights that this one has read")
        if failure is not None:
            raise failure
        # what is cached was computed with other weights
        flushed = self.kv_manager.flush()
        assert flushed, "nothing runs"
        return {}

    def server_info(self) -> dict[str, Any]:
        """Facts and counts as plain data."""
        load = self.load()
        return {
            **self.metrics.to_dict(),
            "num_running_reqs": load.num_running,
            "num_queue_reqs": load.num_queued,
            "num_queue_tokens": sum(req.prompt_len for req in (*self.waiting, *self.grammars.reqs)),
            "token_usage": load.token_usage,
            "kv_cache": asdict(self.kv_manager.stats()),
            "worker": self.facts,
        }

    def load(self) -> Load:
        total = self.kv_manager.total_tokens
        num_running = len(self.running.reqs) + (self.chunked is not None)
        return Load(num_running, self._num_queued, total - self.kv_manager.available_tokens, total)


def _requests(batch: ScheduleBatch, beside: ScheduleBatch | None) -> tuple[Req, ...]:
    """All requests of a step."""
    return (*batch.reqs, *(() if beside is None else beside.reqs))


def _max_running(facts: dict[str, Any], config: ScheduleConfig) -> int:
    rows: int = facts["max_running_requests"]
    return rows if config.max_running_requests is None else min(rows, config.max_running_requests)


def run_scheduler(
    server_args: ServerArgs, channel: SchedulerChannel, *, may_exit: bool = False, group: TpGroup | None = None
) -> None:
    """Build the engine from resolved arguments, say that it is ready (or why not), and serve until shutdown.

    ``may_exit``: the process is this scheduler's own, and ends when it hangs. ``group``: see ``Scheduler``; all of its
    ranks are ready, or none is.
    """
    group = group or TpGroup()
    try:
        scheduler, info = _start(server_args, channel, group)
    except ValueError as error:
        channel.send(SchedulerReady({}, error=str(error)))
        return
    group.least(group.rank)
    channel.send(SchedulerReady(info))
    watchdogs = _watchdogs(server_args, scheduler.stages, may_exit)
    try:
        scheduler.event_loop()
    finally:
        for watchdog in watchdogs:
            watchdog.stop()


def _watchdogs(server_args: ServerArgs, stages: Stages, may_exit: bool) -> list[Watchdog]:
    bounds = (
        (server_args.watchdog_timeout, report_hang_and_exit if may_exit else report_hang),
        (server_args.soft_watchdog_timeout, report_hang),
    )
    return [Watchdog(stages, timeout_s, on_hang) for timeout_s, on_hang in bounds if timeout_s is not None]


def run_scheduler_process(server_args: ServerArgs, port_args: PortArgs, rank: TpRank, replica: int = 0) -> None:
    """``run_scheduler`` as the body of a process, over ZMQ. Of the ranks only the first one logs what all of them do.

    Ends with ``SystemExit`` when another rank has ended.
    """
    leads = rank.rank == 0
    level = server_args.log_level if leads or server_args.log_level == "debug" else "warning"
    names = ((server_args.dp_size, f" DP{replica}"), (rank.size, f" TP{rank.rank}"))
    configure_logger(level, prefix="scheduler" + "".join(name for size, name in names if size > 1))
    outside = ZmqSchedulerChannel(port_args) if leads else ZmqOutbox(port_args)
    try:
        device = make_device(server_args.device, rank.local_rank).torch_device
        group = join_group(rank, device)
        channel = make_tp_channel(outside, group)
        run_scheduler(server_args, channel, may_exit=True, group=group)
        group.close()
    except RankLostError as error:
        logger.error("%s: this rank ends, too", error)
        raise SystemExit(RANK_LOST_EXIT_STATUS) from error
    except ValueError as error:
        outside.send(SchedulerReady({}, error=str(error)))
    finally:
        outside.close()


def _start(server_args: ServerArgs, channel: SchedulerChannel, group: TpGroup) -> tuple[Scheduler, dict[str, Any]]:
    assert server_args.tokenizer_path is not None and server_args.random_seed is not None, "arguments are not resolved"
    if server_args.device == "cpu":
        threads = set_compute_threads(SGLANG_CPU_THREADS.get(), group.ranks_here)
        logger.info("Computing with %d CPU threads", threads)
    tokenizer = load_tokenizer(Path(server_args.tokenizer_path), trust_remote_code=server_args.trust_remote_code)
    worker = create_worker(server_args, group)
    device = make_device(server_args.device, group.local_rank)
    scheduler = Scheduler(
        worker,
        server_args.schedule_config(),
        channel,
        device=device.torch_device,
        pieces=TokenPieces(tokenizer),
        random_seed=server_args.random_seed,
        grammars=make_grammar_manager(server_args.grammar_config(), tokenizer, worker.describe()),
        profiler=StepProfiler(SGLANG_TORCH_PROFILER_DIR.get(), f"TP-{group.rank}", device),
        group=group,
    )
    info = {**scheduler.facts, "max_req_input_len": scheduler.limits.max_req_input_len}
    logger.info("Engine: %s", ", ".join(f"{name}: {value}" for name, value in info.items()))
    if scheduler.worker.capabilities.max_tokens_per_step > 1:
        prompt = self_test_ids(tokenizer)[: scheduler.limits.max_req_input_len]
        info["spec_self_test"] = run_self_test(scheduler.run_alone, prompt)
        scheduler.reset()
    return scheduler, info
