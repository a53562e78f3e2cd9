"""The watchdog names the stage that hangs; waiting for work is no hang. Bounds of a running scheduler change."""

from __future__ import annotations

import logging
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fixtures.toy_worker import CONFIG, ToyEngine, ToyWorker, expected
from fixtures.waiting import wait_until
from sglang.srt.managers.channel import MemorySchedulerChannel
from sglang.srt.managers.io_struct import (
    BatchTokenOut,
    ControlReply,
    ControlReq,
    FromScheduler,
    TokenizedGenerateReqInput,
    ToScheduler,
)
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.watchdog import HUNG_EXIT_STATUS, Stages, Watchdog, report_hang
from sglang.srt.sampling.sampling_params import SamplingParams

TIMEOUT_S = 0.2


class Gate:
    """A call that does not come back before ``open``."""

    def __init__(self) -> None:
        self.reached, self._open = threading.Event(), threading.Event()

    def wait_here(self) -> None:
        self.reached.set()
        assert self._open.wait(60)

    def open(self) -> None:
        self._open.set()

    def before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def gated(*args: Any, **kwargs: Any) -> Any:
            self.wait_here()
            return call(*args, **kwargs)

        return gated


class Outbox:
    """The other end of a scheduler's channel."""

    def __init__(self) -> None:
        self.sent: list[FromScheduler] = []

    def deliver(self, msg: FromScheduler) -> None:
        self.sent.append(msg)

    def tokens(self) -> tuple[int, ...]:
        outs = [out for msg in self.sent if isinstance(msg, BatchTokenOut) for out in msg.outs]
        return sum((out.token_ids for out in outs), ())


def _scheduler() -> tuple[Scheduler, queue.SimpleQueue[ToScheduler], Outbox]:
    inbox: queue.SimpleQueue[ToScheduler] = queue.SimpleQueue()
    outbox = Outbox()
    channel = MemorySchedulerChannel(inbox, outbox)  # type: ignore[arg-type]
    made = Scheduler(ToyWorker(), CONFIG, channel, device=torch.device("cpu"), pieces=None, random_seed=1)
    return made, inbox, outbox


def _request() -> TokenizedGenerateReqInput:
    params = SamplingParams(max_new_tokens=3, temperature=0.0, sampling_seed=0)
    return TokenizedGenerateReqInput("r", (1, 2, 3), params, stream=False)


def _block(scheduler: Scheduler, stage: str, gate: Gate) -> None:
    """Make one call of this stage wait at the gate."""
    if stage == "receive":
        scheduler.submit = gate.before(scheduler.submit)  # type: ignore[method-assign]
    elif stage == "schedule":
        scheduler._next_batch = gate.before(scheduler._next_batch)  # type: ignore[method-assign]
    elif stage == "forward":
        worker: Any = scheduler.worker
        worker.begin = gate.before(worker.begin)
    elif stage == "apply":
        scheduler._output.apply = gate.before(scheduler._output.apply)  # type: ignore[method-assign]
    else:
        channel: Any = scheduler.channel
        channel.send = gate.before(channel.send)


@pytest.mark.parametrize("stage", ["receive", "schedule", "forward", "apply", "reply"])
def test_the_stage_that_hangs_is_named(stage: str) -> None:
    scheduler, inbox, outbox = _scheduler()
    gate, seen = Gate(), queue.SimpleQueue[str]()
    _block(scheduler, stage, gate)
    watchdog = Watchdog(scheduler.stages, TIMEOUT_S, lambda where, _: seen.put(where))
    loop = threading.Thread(target=scheduler.event_loop)
    loop.start()
    try:
        inbox.put(_request())
        assert gate.reached.wait(20)
        # on a busy machine another stage may have been slow before
        while seen.get(timeout=20) != stage:
            pass
        gate.open()
        # a loop that is let go goes on as if nothing had been
        wait_until(lambda: outbox.tokens() == expected((1, 2, 3), 3), "the answer")
    finally:
        gate.open()
        inbox.put(ControlReq("end", "shutdown"))
        loop.join(20)
        watchdog.stop()
    assert isinstance(outbox.sent[-1], ControlReply)


def test_waiting_for_work_is_no_hang() -> None:
    scheduler, inbox, _ = _scheduler()
    seen: list[str] = []
    loop = threading.Thread(target=scheduler.event_loop)
    loop.start()
    wait_until(lambda: scheduler.stages.current.stage is None, "the loop to sleep")
    watchdog = Watchdog(scheduler.stages, 0.001, lambda where, _: seen.append(where))
    looked = threading.Event()
    threading.Timer(0.2, looked.set).start()
    looked.wait()
    watchdog.stop()
    inbox.put(ControlReq("end", "shutdown"))
    loop.join(20)
    assert not seen


def test_a_hang_is_told_once() -> None:
    stages = Stages()
    seen = queue.SimpleQueue[str]()
    watchdog = Watchdog(stages, 0.01, lambda where, _: seen.put(where))
    stages.enter("forward")
    assert seen.get(timeout=20) == "forward"
    with pytest.raises(queue.Empty):
        seen.get(timeout=0.2)
    stages.enter("forward")
    assert seen.get(timeout=20) == "forward"
    watchdog.stop()


def test_the_report_shows_where_threads_are(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    thread = threading.Thread(target=gate.wait_here, name="sglang-scheduler")
    thread.start()
    assert gate.reached.wait(20)
    with caplog.at_level(logging.ERROR):
        report_hang("apply", 12.5)
    gate.open()
    thread.join()
    assert "the scheduler hangs in stage apply, for 12.5 s now" in caplog.text
    assert "Thread sglang-scheduler:" in caplog.text and "wait_here" in caplog.text


def test_a_process_that_hangs_ends_with_a_status_of_its_own() -> None:
    program = (
        "import time\nfrom sglang.srt.managers.watchdog import Stages, Watchdog, report_hang_and_exit\n"
        "stages = Stages()\nstages.enter('schedule')\nWatchdog(stages, 0.05, report_hang_and_exit)\ntime.sleep(60)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == HUNG_EXIT_STATUS
    assert "hangs in stage schedule" in ended.stderr and 'Thread MainThread:\n  File "<string>"' in ended.stderr


def test_bounds_change_while_requests_run() -> None:
    engine = ToyEngine(max_running_requests=1, stream_interval=1)

    def reconfigure(**changes: Any) -> None:
        engine.scheduler.handle(ControlReq("c", "reconfigure", changes))
        assert isinstance(reply := engine.channel.sent.pop(), ControlReply) and reply.ok

    for rid in "abc":
        engine.add(rid, [1, 2, 3], 20)
    for _ in range(3):
        engine.scheduler.step()
    assert len(engine.scheduler.running.reqs) == 1
    reconfigure(max_running_requests=3, conservativeness=0.5)
    engine.scheduler.step()
    assert len(engine.scheduler.running.reqs) == 3
    reconfigure(max_running_requests=1, max_queued_requests=1)
    engine.scheduler.step()
    assert len(engine.scheduler.running.reqs) == 3, "what runs stays"
    for rid in "de":
        engine.add(rid, [1, 2, 3], 20)
    assert [req.rid for req in engine.scheduler.waiting] == ["d"], "the queue holds one"


def test_weights_wait_for_nothing_but_what_was_aborted() -> None:
    engine = ToyEngine(ToyWorker(overlap=True))
    seen: list[tuple[str, Any]] = []
    worker: Any = engine.worker
    worker.update_weights = lambda target, draft: seen.append((str(target), draft))
    data = {"model_path": "/new", "draft_model_path": None}

    def update() -> ControlReply:
        engine.scheduler.handle(ControlReq("u", "update_weights", data))
        reply = engine.channel.sent.pop()
        assert isinstance(reply, ControlReply)
        return reply

    engine.add("a", [1, 2, 3], 50)
    for _ in range(4):
        engine.scheduler.step()
    refused = update()
    assert not refused.ok and "requests are running" in refused.message and not seen
    engine.scheduler.step()
    engine.abort("a")
    assert engine.scheduler._ahead is not None, "a step of the aborted request is under way"
    assert update().ok and seen == [("/new", None)]
    stats = engine.worker.kv_manager.stats()
    assert stats.free == stats.total, "nothing that other weights computed is kept"
