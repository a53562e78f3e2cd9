"""What the scheduler expects of any worker, plain or speculative."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from sglang.srt.managers.schedule_batch import GenerationBatchResult, ScheduleBatch
from sglang.srt.mem_cache.kv_manager import KVCacheManager
from sglang.srt.speculative.spec_info import SpecCapabilities


class ModelWorker(Protocol):
    """One method serves extend and decode; ``capabilities`` says how many slots a decode step needs."""

    capabilities: SpecCapabilities
    kv_manager: KVCacheManager

    def forward_batch_generation(self, batch: ScheduleBatch) -> GenerationBatchResult: ...

    def forward_mixed(
        self, prompts: ScheduleBatch, running: ScheduleBatch
    ) -> tuple[GenerationBatchResult, GenerationBatchResult]:
        """An extend step and a decode step of other requests at once; the result of each."""
        ...

    def launch(self, batch: ScheduleBatch) -> Callable[[], GenerationBatchResult]:
        """Start a decode step; calling what comes back waits for it. With ``supports_overlap`` the next step of the
        same requests may be started before, if ``can_run_ahead`` says so and they own slots for both."""
        ...

    def can_run_ahead(self, batch: ScheduleBatch) -> bool: ...

    def update_weights(self, target: Path, draft: Path | None) -> None:
        """Serve other weights of the same shape; nothing may run. ``ValueError``: the former ones still serve."""
        ...

    def describe(self) -> dict[str, object]:
        """Facts for the start-up log and ``/server_info``."""
        ...
