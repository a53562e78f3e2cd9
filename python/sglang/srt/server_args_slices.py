"""The narrow, frozen parts of ``ServerArgs`` that the engine below the worker sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """How to load one checkpoint. ``overrides`` change its ``config.json``; ``dtype`` is the type to compute in;
    ``deterministic`` asks for products whose rows do not depend on how many rows are computed with them."""

    model_path: Path
    load_format: str
    dtype: str
    overrides: Mapping[str, Any]
    trust_remote_code: bool
    revision: str | None
    deterministic: bool


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    """What bounds the KV pool. ``max_total_tokens`` and ``max_running_requests`` are None when memory decides."""

    mem_fraction_static: float
    max_total_tokens: int | None
    max_running_requests: int | None
    page_size: int
    context_length: int
    disable_radix_cache: bool


@dataclass(frozen=True, slots=True)
class ScheduleConfig:
    """What bounds one step. ``chunked_prefill_size`` (tokens) is None when prompts are never cut into chunks;
    ``enable_mixed_chunk``: an extend step takes the running requests' decode step along."""

    chunked_prefill_size: int | None
    max_prefill_tokens: int
    enable_mixed_chunk: bool
    policy: str
    max_running_requests: int | None
    max_queued_requests: int | None
    conservativeness: float
    stream_interval: int
    decode_log_interval: int
    enable_custom_logit_processor: bool = False
    enable_return_hidden_states: bool = False


@dataclass(frozen=True, slots=True)
class GrammarConfig:
    """What constrains answers. ``backend`` None: nothing does.

    ``any_whitespace``: JSON may have white space between its parts, at most ``max_whitespace`` characters (None: any
    number) in one place; otherwise it is one line as ``json.dumps`` writes it.
    """

    backend: str | None
    any_whitespace: bool
    max_whitespace: int | None


@dataclass(frozen=True, slots=True)
class SpecConfig:
    """A speculative algorithm and its depth. ``num_draft_tokens`` counts the root: ``num_steps + 1`` at topk 1.

    ``topk`` above 1 makes trees, of which the target verifies that many tokens. ``sample_drafts``: drafts are drawn and
    accepted by min(1, p / q).

    ``adaptive``: a round drafts from 0 to ``num_steps`` tokens, whatever promises most tokens per second.
    """

    algorithm: str
    draft_model_path: Path
    num_steps: int
    topk: int
    num_draft_tokens: int
    adaptive: bool
    sample_drafts: bool = False

    @property
    def max_depth(self) -> int:
        """The most drafts a round can accept."""
        return min(self.num_steps, self.num_draft_tokens - 1)


@dataclass(frozen=True, slots=True)
class GraphConfig:
    """How steps run: which sizes they are padded to, and whether each size is captured as a graph.

    ``sizes`` None: a list up to ``max_size`` where steps are captured, no padding where they are not. Without ``pad``
    only batches of exactly a captured size run as graphs. ``overlap``: a captured step may be started before the
    result of the one before it is read. ``prefill_sizes``, ``prefill_max_size``: the same for steps of prompts, in
    tokens; they are always padded. 0: they run as they are.
    """

    capture: bool
    sizes: tuple[int, ...] | None
    max_size: int
    pad: bool
    overlap: bool
    prefill_sizes: tuple[int, ...] | None = None
    prefill_max_size: int = 0
