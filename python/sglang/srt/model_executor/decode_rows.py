"""The rows of the running batch as they live on the device from step to step.

Shapes: B rows, padding included; N rows per request in a verified block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sgl_kernel.sampling import TOP_K_ALL
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.model_executor.input_buffers import ROWS, InputBuffers, StagedBuffers, buffer
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

NO_CAP = 1 << 30


@dataclass(frozen=True, slots=True, eq=False)
class DecodeRows(InputBuffers):
    """What a decode step knows of each request, [B] each. ``max_drafts``: drafts beyond these are not accepted.

    A step advances ``committed_lens`` and ``bonus_tokens`` in place, so the next step of the same batch needs nothing
    from the host. A padding row writes the pool's dummy page and stays where it is (``live`` 0); it has one committed
    token, so that its draft sees something to attend to.
    """

    req_pool_indices: torch.Tensor = buffer(ROWS, dtype=torch.int64, pad="dummy_row")
    committed_lens: torch.Tensor = buffer(ROWS, dtype=torch.int64, pad=1)
    bonus_tokens: torch.Tensor = buffer(ROWS, dtype=torch.int64)
    live: torch.Tensor = buffer(ROWS, dtype=torch.int64)
    max_drafts: torch.Tensor = buffer(ROWS, dtype=torch.int64)
    seeds: torch.Tensor = buffer(ROWS, dtype=torch.int64)
    greedy: torch.Tensor = buffer(ROWS, dtype=torch.bool, pad=True)
    temperatures: torch.Tensor = buffer(ROWS, dtype=torch.float32, pad=1.0)
    top_ks: torch.Tensor = buffer(ROWS, dtype=torch.int64, pad=TOP_K_ALL)
    top_ps: torch.Tensor = buffer(ROWS, dtype=torch.float32, pad=1.0)
    min_ps: torch.Tensor = buffer(ROWS, dtype=torch.float32)

    def sampling_info(self) -> SamplingBatchInfo:
        """Every control of every row: which of them are in use is not known on the host."""
        return SamplingBatchInfo(
            False, self.greedy, self.temperatures, self.seeds, self.top_ks, self.top_ps, self.min_ps
        )


def draft_caps(reqs: Sequence[Req]) -> tuple[int, ...]:
    """The most drafts of a round that each request lets count."""
    caps = [req.params.speculative_num_steps for req in reqs]
    return tuple(NO_CAP if cap is None else min(cap, NO_CAP) for cap in caps)


class ResidentRows:
    """``DecodeRows`` on the device, and the host memory they are filled from by one copy."""

    def __init__(self, max_rows: int, dummy_row: int, device: torch.device) -> None:
        self._buffers = StagedBuffers(DecodeRows, {ROWS: max_rows, "dummy_row": dummy_row}, device)
        self.device = self._buffers.device

    def load(self, reqs: Sequence[Req], size: int, *, sampling: bool) -> None:
        """The state of ``reqs`` in the first rows, padding up to ``size``. ``sampling``: their controls too."""
        host, num = self._buffers.fill(), len(reqs)
        host.first(size).pad(0)
        kvs = [req.kv for req in reqs]
        host.req_pool_indices[:num] = torch.tensor([kv.req_pool_idx for kv in kvs if kv is not None])
        host.committed_lens[:num] = torch.tensor([kv.committed_len for kv in kvs if kv is not None])
        host.bonus_tokens[:num] = torch.tensor([req.token_ids[-1] for req in reqs])
        host.live[:num] = 1
        host.max_drafts[:num] = torch.tensor(draft_caps(reqs))
        host.seeds[:num] = torch.tensor([req.seed for req in reqs])
        if sampling:
            _load_sampling(host.first(num), reqs)
        self._buffers.send()


def _load_sampling(host: DecodeRows, reqs: Sequence[Req]) -> None:
    params, seeds = [req.params for req in reqs], [req.seed for req in reqs]
    info = SamplingBatchInfo.from_params(params, seeds, host.seeds.device)
    host.greedy.copy_(info.greedy)
    host.temperatures.copy_(info.temperatures)
    for control, values in ((host.top_ks, info.top_ks), (host.top_ps, info.top_ps), (host.min_ps, info.min_ps)):
        if values is not None:
            control.copy_(values)
