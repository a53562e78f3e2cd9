"""The requests that decode, and what travels with them from step to step, row by row."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.speculative.spec_info import SpecInput


class RunningBatch:
    """Row ``i`` of ``spec_info`` belongs to ``reqs[i]``; sampling tensors are rebuilt only when the rows change."""

    def __init__(self, device: torch.device) -> None:
        self.reqs: tuple[Req, ...] = ()
        self.spec_info: SpecInput | None = None
        self._device = device
        self._sampling_info: SamplingBatchInfo | None = None

    def to_batch(self) -> ScheduleBatch:
        """The next decode step of all rows."""
        assert self.reqs, "a decode step needs a running request"
        if self._sampling_info is None:
            self._sampling_info = make_sampling_info(self.reqs, self._device)
        return ScheduleBatch(ForwardMode.DECODE, self.reqs, (), self._sampling_info, self.spec_info)

    def advance(self, batch: ScheduleBatch, spec_info: SpecInput | None) -> None:
        """After a step of ``batch``, which may still have rows that were dropped while it ran."""
        if batch.reqs is not self.reqs:
            self.reqs, self._sampling_info = batch.reqs, None
        self.spec_info = spec_info
        self.keep_open()

    def keep_open(self) -> None:
        """Drop the rows of requests that ended or lost their KV."""
        rows = open_rows(self.reqs)
        if len(rows) == len(self.reqs):
            return
        self.reqs = tuple(self.reqs[row] for row in rows)
        self.spec_info = self._pick(self.spec_info, rows) if rows else None
        self._sampling_info = None

    def add(self, batch: ScheduleBatch, rows: Sequence[int], spec_info: SpecInput | None) -> None:
        """Append ``rows`` of an extend batch; ``spec_info`` has all rows of that batch."""
        if not rows:
            return
        added = self._pick(spec_info, rows)
        self.spec_info = added if self.spec_info is None or added is None else self.spec_info.merge(added)
        self.reqs = (*self.reqs, *(batch.reqs[row] for row in rows))
        self._sampling_info = None

    def _pick(self, spec_info: SpecInput | None, rows: Sequence[int]) -> SpecInput | None:
        return None if spec_info is None else spec_info.filter(torch.tensor(rows, device=self._device))


def open_rows(reqs: Sequence[Req]) -> list[int]:
    """Rows of the requests that hold KV."""
    return [row for row, req in enumerate(reqs) if req.kv is not None]


def make_sampling_info(reqs: Sequence[Req], device: torch.device) -> SamplingBatchInfo:
    return SamplingBatchInfo.from_params([req.params for req in reqs], [req.seed for req in reqs], device)
