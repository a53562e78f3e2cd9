"""One decode step of the running batch: rows to the device if they changed, the program, its result to the host.

Between two steps of the same batch nothing is sent: the program has advanced the rows itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from sglang.srt.layers.asked_outputs import KeptRows
from sglang.srt.managers.schedule_batch import GenerationBatchResult, Req, ScheduleBatch
from sglang.srt.mem_cache.kv_manager import KVCacheManager
from sglang.srt.model_executor.cuda_graph_runner import BatchSizes, Runner, Step, StepKind
from sglang.srt.model_executor.decode_programs import StepBuffers
from sglang.srt.model_executor.decode_rows import ResidentRows, draft_caps
from sglang.srt.model_executor.draft_length import DraftLength
from sglang.srt.model_executor.mixed_forward import MixedForward
from sglang.srt.sampling.logprobs import ReqOutputs
from sglang.srt.speculative.spec_info import SpecInput
from sglang.srt.utils.device import Readback


@dataclass(frozen=True, slots=True)
class _Round:
    """A round that was read. ``num_tokens``: of each request, before the round's were added; ``useful``: drafts."""

    reqs: tuple[Req, ...]
    useful: list[int]
    num_drafts: int
    accept_lens: list[int]
    num_tokens: list[int]


@dataclass(frozen=True, slots=True)
class _Timed:
    """When the last round of the same requests began and ended."""

    num_drafts: int
    begun: float
    ended: float


class DecodeLoop:
    """Drives one runner. Remembers what stands in its rows, and sends them anew only if a batch is another."""

    def __init__(
        self,
        rows: ResidentRows,
        out: StepBuffers,
        runner: Runner,
        sizes: BatchSizes,
        kv_manager: KVCacheManager,
        length: DraftLength,
        clock: Callable[[], float],
    ) -> None:
        """``length`` decides how many drafts a round makes; without speculation it is always 0."""
        self._clock = clock
        self.runner = runner
        self.sizes = sizes
        self._rows = rows
        self._out = out
        self._kv_manager = kv_manager
        self._length = length
        self._caps: tuple[int, ...] = ()
        self._rids: tuple[str, ...] = ()
        self._unjudged: _Round | None = None
        self._last: _Timed | None = None
        self._readback = Readback(out.result)
        self._reqs: tuple[Req, ...] = ()
        self._seed: SpecInput | None = None
        self._committed: list[int] = []
        self._size = 0
        self._kind = StepKind.GREEDY

    def launch(self, batch: ScheduleBatch) -> Callable[[], GenerationBatchResult]:
        """Start a step of ``batch``, whose requests own slots for it; the result waits for it."""
        step = self.prepare(batch)
        if step.kind is StepKind.EDITED:  # takes what its requests ask for, whatever its length
            self._last = None
            self.runner.run(step)
        else:
            self._run_timed(step)
        return self.read(batch, step)

    def run_mixed(self, batch: ScheduleBatch, mixed: MixedForward) -> GenerationBatchResult:
        """A step of ``batch`` in one pass with prompts. It is no step of fixed shape, so it runs eagerly."""
        step = replace(self.prepare(batch, exact=True), mixed=mixed)
        self._last = None
        self.runner.program.run(step)
        return self.read(batch, step)()

    def can_run_ahead(self, batch: ScheduleBatch) -> bool:
        """Whether ``launch(batch)`` may come before the result of its last step: when nothing has to be sent."""
        return self._size > 0 and batch.reqs is self._reqs

    def prepare(self, batch: ScheduleBatch, *, exact: bool = False, width: int | None = None) -> Step:
        """Everything on the device as the program expects it. ``exact`` asks for a step without padding, ``width`` for
        so many rows per request, whatever the drafts are worth."""
        committed = [req.kv.committed_len for req in batch.reqs if req.kv is not None]
        same = batch.reqs is self._reqs and batch.spec_info is self._seed and committed == self._committed
        if not same:
            self._kind, size = _kind(batch), self.sizes.fit(len(batch.reqs))
            # a step that edits logits asks the host, as does one without a size to be padded to
            self._size = 0 if self._kind is StepKind.EDITED or size is None else size
            sampling = self._size > 0 and self._kind is StepKind.SAMPLED
            self._rows.load(batch.reqs, self._size or len(batch.reqs), sampling=sampling)
            if batch.spec_info is not self._seed:  # the seed that the last step left is where it should be
                self._out.load_seed(batch.spec_info)
            self._reqs, self._seed, self._committed = batch.reqs, batch.spec_info, committed
            self._caps, self._last = draft_caps(batch.reqs), None
            self._rids = tuple(req.rid for req in batch.reqs)
        self._kv_manager.show_device()
        width = self._length.choose(self._rids, self._useful(batch)) + 1 if width is None else width
        if self._size and not exact:
            return Step(self._size, self._kind, None, width)
        asked = any(req.asked is not None for req in batch.reqs)
        return Step(len(batch.reqs), self._kind, batch, width, KeptRows() if asked else None)

    def read(self, batch: ScheduleBatch, step: Step) -> Callable[[], GenerationBatchResult]:
        """What the program left. Calling the result is the one time in a step that the host waits."""
        num, useful, width, kept = len(batch.reqs), self._useful(batch), step.width, step.kept
        wait = self._readback.start(self._out.of_width(num, width).result)

        def finish() -> GenerationBatchResult:
            result = wait()
            tokens, accept_lens = result[:, :-1], result[:, -1]
            gained = accept_lens.tolist()
            self._judge(_Round(batch.reqs, useful, width - 1, gained, [len(req.token_ids) for req in batch.reqs]))
            self._committed = [n + more for n, more in zip(self._committed, gained, strict=True)]
            outputs: tuple[ReqOutputs | None, ...] = ()
            with torch.inference_mode():
                self._seed = self._out.next_seed(self._rows.device, num)
                if kept is not None:
                    runs = [row[:n] for row, n in zip(tokens.tolist(), gained, strict=True)]
                    outputs = kept.outputs(batch.reqs, runs)
            return GenerationBatchResult(tokens, accept_lens, self._seed, num_drafts=width - 1, outputs=outputs)

        return finish

    def _useful(self, batch: ScheduleBatch) -> list[int]:
        """The most drafts that can be of use to each request in a round: the token after them is one more."""
        lefts = [req.max_new_tokens - req.output_len - 1 for req in batch.reqs]
        return [max(0, min(cap, left)) for cap, left in zip(self._caps, lefts, strict=True)]

    def _judge(self, following: _Round) -> None:
        """What the round before ``following`` gained is known by now: not the tokens behind the end of an answer."""
        last, self._unjudged = self._unjudged, following
        if last is not None:
            kept = [len(req.token_ids) - num for req, num in zip(last.reqs, last.num_tokens, strict=True)]
            gained = [min(accepted, more) for accepted, more in zip(last.accept_lens, kept, strict=True)]
            self._length.observe(last.num_drafts, [req.rid for req in last.reqs], gained, last.useful)

    def _run_timed(self, step: Step) -> None:
        """Where running waits for the end of a round, what the host does comes on top. Elsewhere a round lasts until
        the next one of the same requests starts."""
        begun = self._clock()
        self.runner.run(step)
        num_rows, num_drafts, last = len(self._reqs), step.width - 1, self._last
        if self._out.result.is_cuda:
            if last is not None:
                self._length.observe_time(num_rows, last.num_drafts, begun - last.begun, None)
            ended = begun
        else:
            ended = self._clock()
            self._length.observe_time(num_rows, num_drafts, ended - begun, None if last is None else begun - last.ended)
        self._last = _Timed(num_drafts, begun, ended)

    def capture(self) -> None:
        """Before the first step: the rows must hold nothing but padding."""
        with torch.inference_mode():
            self.runner.capture()


def _kind(batch: ScheduleBatch) -> StepKind:
    if any(req.needs_host for req in batch.reqs):
        return StepKind.EDITED
    return StepKind.GREEDY if batch.sampling_info.all_greedy else StepKind.SAMPLED
