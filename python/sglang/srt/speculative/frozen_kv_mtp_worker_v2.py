"""FROZEN_KV_MTP in the overlapped order: the next round starts before the result of the last one is read.

The order is the scheduler's (``Scheduler._run_ahead``). A round leaves all that the next one needs (bonus token, seed,
lengths) in the resident rows on the device, so the same three functions serve both orders; this worker says that they
may be used so, and ``can_run_ahead`` for which batches.
"""

from __future__ import annotations

from typing import ClassVar

from sglang.srt.speculative.frozen_kv_mtp_worker import FrozenKVMTPWorker


class FrozenKVMTPWorkerV2(FrozenKVMTPWorker):
    """Results are consumed one step late."""

    supports_overlap: ClassVar[bool] = True
