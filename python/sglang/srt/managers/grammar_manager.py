"""Grammars of requests: compiled by threads beside the scheduler, kept for the next request that asks for the same."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang.srt.configs.registries import GRAMMAR_BACKENDS, load_entry
from sglang.srt.constrained.base_grammar import Grammar, GrammarBackend, GrammarKind
from sglang.srt.constrained.reasoner_grammar import Phase, ReasonerGrammar, ThoughtMarkers
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.server_args_slices import GrammarConfig
from sglang.srt.utils.env import SGLANG_GRAMMAR_TIMEOUT

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

_NUM_THREADS = 2
_MAX_CACHED = 256

_Key = tuple[GrammarKind, str]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request whose grammar cannot be had, and why."""

    req: Req
    message: str


@dataclass(frozen=True, slots=True)
class _Waiting:
    """``compiled`` is the grammar at its beginning, shared by all who wait for it."""

    req: Req
    compiled: Future[Grammar]
    deadline_s: float


class GrammarManager:
    """Gives requests their grammars. Lives on the scheduler's thread; a request waits here while others go on."""

    def __init__(
        self,
        backend: GrammarBackend | None = None,
        markers: ThoughtMarkers | None = None,
        stop_ids: Sequence[int] = (),
        vocab_size: int = 0,
    ) -> None:
        """``backend`` None: requests with a grammar are refused. ``markers`` None: answers have no thoughts."""
        self._backend = backend
        self._markers = markers
        self._stop_ids = tuple(stop_ids)
        self._vocab_size = vocab_size
        self._timeout_s = SGLANG_GRAMMAR_TIMEOUT.get()
        self._compiled: OrderedDict[_Key, Future[Grammar]] = OrderedDict()
        self._waiting: list[_Waiting] = []
        self._lock = threading.Lock()  # of the two below, which the threads change
        self._jobs: deque[tuple[_Key, Future[Grammar]]] = deque()
        self._num_threads = 0

    def __len__(self) -> int:
        """How many requests wait here."""
        return len(self._waiting)

    @property
    def reqs(self) -> list[Req]:
        return [waiting.req for waiting in self._waiting]

    def add(self, req: Req) -> bool:
        """Whether a new request waits here, because it has a grammar. ``ValueError`` if there is no backend for it."""
        key = req.params.grammar
        if key is None:
            return False
        if self._backend is None:
            raise ValueError(
                f"{key[0]} needs a grammar backend, and this server has none: start it with --grammar-backend xgrammar "
                "where the package xgrammar is installed"
            )
        self._waiting.append(_Waiting(req, self._compile(key), time.monotonic() + self._timeout_s))
        return True

    def forget_finished(self) -> None:
        """Drop requests that ended while they waited. Their grammars are compiled all the same, for the next ones."""
        self._waiting = [waiting for waiting in self._waiting if waiting.req.finish is None]

    def verdicts(self) -> list[str | None]:
        """Of every request that waits, in order of arrival: "" when it can run, or the reason when it never can."""
        now = time.monotonic()
        return [self._verdict(waiting, now) for waiting in self._waiting]

    def take(self, verdicts: Sequence[str | None]) -> tuple[list[Req], list[Refusal]]:
        """The requests that can run and those that never can, by ``verdicts``, which another rank may have given: what
        is not compiled here is waited for."""
        ready: list[Req] = []
        refused: list[Refusal] = []
        judged = list(zip(self._waiting, verdicts, strict=True))
        for waiting, verdict in judged:
            if verdict == "":
                waiting.req.grammar = self._start(waiting.compiled.result(), waiting.req)
                ready.append(waiting.req)
            elif verdict is not None:
                refused.append(Refusal(waiting.req, verdict))
        self._waiting = [waiting for waiting, verdict in judged if verdict is None]
        return ready, refused

    def take_ready(self) -> tuple[list[Req], list[Refusal]]:
        """``take`` by its own verdicts."""
        return self.take(self.verdicts())

    def _verdict(self, waiting: _Waiting, now: float) -> str | None:
        if waiting.compiled.done():
            error = waiting.compiled.exception()
            return "" if error is None else str(error) or repr(error)
        if now >= waiting.deadline_s:
            return f"the grammar took more than {self._timeout_s:g} s to compile: ask for a simpler one"
        return None

    def wait(self, timeout_s: float) -> None:
        """Sleep until a grammar that is waited for is ready, or for ``timeout_s``."""
        wait([waiting.compiled for waiting in self._waiting], timeout_s, FIRST_COMPLETED)

    def _start(self, compiled: Grammar, req: Req) -> Grammar:
        grammar = compiled.fork()
        phase = Phase.ANSWERING if self._markers is None else self._markers.phase(req.token_ids)
        if phase is Phase.ANSWERING or self._markers is None:
            return grammar
        return ReasonerGrammar(grammar, phase, self._markers, self._stop_ids, self._vocab_size)

    def _compile(self, key: _Key) -> Future[Grammar]:
        """The grammar of ``key``, of which at most ``_MAX_CACHED`` are kept. Errors are not kept."""
        future = self._compiled.get(key)
        if future is None or future.done() and future.exception() is not None:
            future = self._compiled[key] = Future()
            self._start_job(key, future)
        self._compiled.move_to_end(key)
        if len(self._compiled) > _MAX_CACHED:
            self._compiled.popitem(last=False)
        return future

    def _start_job(self, key: _Key, future: Future[Grammar]) -> None:
        with self._lock:
            self._jobs.append((key, future))
            if self._num_threads == _NUM_THREADS:
                return
            self._num_threads += 1
        # a daemon: a grammar that takes for ever must not keep the process alive
        threading.Thread(target=self._work, name="sglang-grammar", daemon=True).start()

    def _work(self) -> None:
        """The body of a thread, which ends when there is nothing left to compile."""
        while True:
            with self._lock:
                if not self._jobs:
                    self._num_threads -= 1
                    return
                (kind, text), future = self._jobs.popleft()
            assert self._backend is not None
            try:
                future.set_result(self._backend.compile(kind, text))
            except ValueError as error:
                future.set_exception(error)
            except Exception as error:  # a fault of the backend is the fault of one request, which hears of it
                logger.exception("compiling a grammar (%s) failed", kind)
                future.set_exception(error)


def make_grammar_manager(
    config: GrammarConfig, tokenizer: PreTrainedTokenizerFast, facts: dict[str, Any]
) -> GrammarManager:
    """``facts``: what the worker says of its model."""
    if config.backend is None:
        return GrammarManager()
    stop_ids, vocab_size = facts["eos_token_ids"], facts["vocab_size"]
    backend = load_entry(GRAMMAR_BACKENDS, config.backend)(tokenizer, vocab_size, stop_ids, config)
    return GrammarManager(backend, ThoughtMarkers.of(tokenizer), stop_ids, vocab_size)
