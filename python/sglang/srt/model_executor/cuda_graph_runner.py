"""The one capture engine: programs of fixed shape, run eagerly or as CUDA graphs.

A *program* reads and writes buffers that never move. What it does depends on nothing but their contents, so the same
object can be run on a CPU, run eagerly, or captured once per batch size and replayed.
"""

from __future__ import annotations

import bisect
import gc
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from itertools import product
from typing import Any, Protocol

import torch

from sglang.srt.layers.asked_outputs import KeptRows
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.mixed_forward import MixedForward
from sglang.srt.server_args_slices import GraphConfig

logger = logging.getLogger(__name__)


class GraphCaptureError(ValueError):
    """A batch size could not be captured; the text names it and the flag to change."""


class StepKind(Enum):
    """How tokens are chosen. EDITED steps change logits by what requests have emitted, which only the host knows."""

    GREEDY = "greedy"
    SAMPLED = "sampled"
    EDITED = "edited"


@dataclass(frozen=True, slots=True)
class Step:
    """One run of a program over the first ``size`` rows of its buffers, rows of padding included.

    ``width``: rows of the target per request, 1 and the drafts; at most what the buffers were made for.
    ``batch``: what the host knows of these rows, for a run that is not captured and has no padding. It changes no
    result; it saves reading lengths back, and work for controls that nobody uses. ``kept``: takes what requests of an
    EDITED step want beside tokens, None when they want nothing. ``mixed``: prompts whose pass is also the step's.
    """

    size: int
    kind: StepKind
    batch: ScheduleBatch | None
    width: int
    kept: KeptRows | None = None
    mixed: MixedForward | None = None


@dataclass(frozen=True, slots=True)
class GraphFlags:
    """How a user changes what is captured; ``unit``: what sizes count."""

    unit: str
    largest: str
    sizes: str
    off: str


_DECODE_FLAGS = GraphFlags("batch size", "--cuda-graph-max-bs", "--cuda-graph-bs", "--disable-cuda-graph")


class GraphProgram(Protocol):
    """``samples``: whether its work differs between GREEDY and SAMPLED."""

    name: str
    samples: bool

    def run(self, step: Step) -> None:
        """Without a host read, unless ``step.batch`` is given."""
        ...


class Runner(Protocol):
    """Runs one program."""

    program: GraphProgram

    def can_run(self, step: Step) -> bool: ...

    def capture(self) -> None:
        """Once, when the buffers hold nothing but padding."""
        ...

    def run(self, step: Step) -> None: ...


class EagerRunner:
    """Calls the program."""

    def __init__(self, program: GraphProgram) -> None:
        self.program = program

    def can_run(self, step: Step) -> bool:
        return True

    def capture(self) -> None:
        """Nothing to capture."""

    def run(self, step: Step) -> None:
        self.program.run(step)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A capture ends in an error when, in the midst of it, memory or a graph of a dead object is freed."""
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@dataclass(frozen=True, slots=True, eq=False)
class GraphPool:
    """Memory that graphs share, so no two of them may run at once, and none leaves results outside its program's
    buffers. The allocator gives memory again to work of the same stream only, so all are captured on one."""

    handle: Any
    stream: torch.cuda.Stream

    @classmethod
    def open(cls) -> GraphPool:
        return cls(torch.cuda.graph_pool_handle(), torch.cuda.Stream())


class CudaGraphRunner:
    """Replays what it captured, and calls the program for any other step."""

    def __init__(
        self,
        program: GraphProgram,
        sizes: Sequence[int],
        widths: Sequence[int] = (1,),
        pool: GraphPool | None = None,
        flags: GraphFlags = _DECODE_FLAGS,
    ) -> None:
        """``pool``: to share; by default one of its own."""
        self.program = program
        self._sizes = tuple(sizes)
        self._widths = tuple(widths)
        self._flags = flags
        self._pool = GraphPool.open() if pool is None else pool
        self._graphs: dict[tuple[int, StepKind, int], torch.cuda.CUDAGraph] = {}

    def can_run(self, step: Step) -> bool:
        return self._key(step) in self._graphs

    def capture(self) -> None:
        """Largest first, so that smaller graphs find the memory they need in the pool."""
        start, free = time.perf_counter(), torch.cuda.mem_get_info()[0]
        kinds = (StepKind.SAMPLED, StepKind.GREEDY) if self.program.samples else (StepKind.GREEDY,)
        with _no_garbage_collection():
            for size, width in product(sorted(self._sizes, reverse=True), sorted(self._widths, reverse=True)):
                for kind in kinds:
                    step = Step(size, kind, None, width)
                    self._graphs[self._key(step)] = self._capture(step)
        logger.info(
            "Captured %s: %d graphs, %s up to %d, in %.1f s, %.0f MB",
            self.program.name,
            len(self._graphs),
            self._flags.unit,
            max(self._sizes),
            time.perf_counter() - start,
            (free - torch.cuda.mem_get_info()[0]) / 1e6,
        )

    def run(self, step: Step) -> None:
        graph = self._graphs.get(self._key(step))
        if graph is None:
            self.program.run(step)
        else:
            graph.replay()

    def _key(self, step: Step) -> tuple[int, StepKind, int]:
        greedy = step.kind is StepKind.GREEDY or not self.program.samples
        return step.size, StepKind.GREEDY if greedy else step.kind, step.width

    def _capture(self, step: Step) -> torch.cuda.CUDAGraph:
        flags, pool, stream = self._flags, self._pool.handle, self._pool.stream
        what = f"capturing {self.program.name} ({step.kind.value}) for {flags.unit} {step.size}"
        graph = torch.cuda.CUDAGraph()
        try:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                # compiles kernels and gives libraries their workspaces, neither of which a capture may do
                self.program.run(step)
            # other threads of the process may use CUDA meanwhile
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                self.program.run(step)
        except torch.OutOfMemoryError as error:
            raise GraphCaptureError(
                f"{what} ran out of memory: lower --mem-fraction-static or {flags.largest}, or give {flags.off} "
                f"({error})"
            ) from error
        except Exception as error:  # whatever a kernel raises, the size that met it has to be named
            raise GraphCaptureError(
                f"{what} failed ({type(error).__name__}: {error}): leave the size out with {flags.sizes}, or give "
                f"{flags.off}"
            ) from error
        return graph


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """The sizes that batches are padded to, ascending; none: batches run as they are."""

    sizes: tuple[int, ...]
    pad: bool

    def fit(self, num_rows: int) -> int | None:
        """The least size that holds ``num_rows``, None when there is none (or none without padding)."""
        at = bisect.bisect_left(self.sizes, num_rows)
        if at == len(self.sizes) or not self.pad and self.sizes[at] != num_rows:
            return None
        return self.sizes[at]


def batch_sizes(config: GraphConfig, max_requests: int) -> BatchSizes:
    """Sizes up to ``max_requests``. ``ValueError`` when sizes were asked for and none of them can occur."""
    if config.sizes is None:
        largest = min(config.max_size, max_requests)
        wanted = [*range(1, 8), *range(8, 64, 8), *range(64, largest + 1, 16), largest] if config.capture else []
    else:
        largest, wanted = max_requests, list(config.sizes)
    sizes = tuple(sorted({size for size in wanted if size <= largest}))
    if wanted and not sizes:
        raise ValueError(
            f"--cuda-graph-bs {' '.join(map(str, wanted))} are all above the {max_requests} requests that can run: "
            "give smaller sizes or raise --max-running-requests"
        )
    return BatchSizes(sizes, config.pad)
