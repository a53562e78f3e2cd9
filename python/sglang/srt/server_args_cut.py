"""How ``ServerArgs`` are cut into the slices of ``server_args_slices``."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from sglang.srt.server_args_grammar import make_grammar_config
from sglang.srt.server_args_slices import (
    GrammarConfig,
    GraphConfig,
    LoadConfig,
    MemoryConfig,
    ScheduleConfig,
    SpecConfig,
)


class ServerArgsCut:
    """The part of ``ServerArgs`` that makes slices. Its fields are described there; these are read here."""

    __slots__ = ()

    model_path: str
    load_format: str
    json_model_override_args: str
    dtype: str
    context_length: int | None
    revision: str | None
    trust_remote_code: bool
    mem_fraction_static: float | None
    max_total_tokens: int | None
    max_running_requests: int | None
    max_queued_requests: int | None
    chunked_prefill_size: int | None
    enable_mixed_chunk: bool
    max_prefill_tokens: int
    schedule_policy: str
    schedule_conservativeness: float
    page_size: int
    disable_radix_cache: bool
    disable_cuda_graph: bool
    cuda_graph_max_bs: int | None
    cuda_graph_bs: tuple[int, ...] | None
    disable_cuda_graph_padding: bool
    disable_piecewise_cuda_graph: bool
    piecewise_cuda_graph_max_tokens: int | None
    piecewise_cuda_graph_tokens: tuple[int, ...] | None
    disable_overlap_schedule: bool
    enable_deterministic_inference: bool
    stream_interval: int
    decode_log_interval: int
    enable_custom_logit_processor: bool
    enable_return_hidden_states: bool
    grammar_backend: str | None
    constrained_json_whitespace_pattern: str | None
    constrained_json_disable_any_whitespace: bool
    speculative_algorithm: str | None
    speculative_draft_model_path: str | None
    speculative_draft_model_revision: str | None
    speculative_adaptive: bool | None
    speculative_num_steps: int | None
    speculative_eagle_topk: int | None
    speculative_use_rejection_sampling: bool
    speculative_num_draft_tokens: int | None

    @property
    def model_overrides(self) -> dict[str, Any]:
        """``json_model_override_args`` as an object."""
        return parse_overrides(self.json_model_override_args)

    def load_config(self) -> LoadConfig:
        """How to load the target. Needs resolved arguments, like every slice."""
        return LoadConfig(
            model_path=Path(self.model_path),
            load_format=self.load_format,
            dtype=self.dtype,
            overrides=self.model_overrides,
            trust_remote_code=self.trust_remote_code,
            revision=self.revision,
            deterministic=self.enable_deterministic_inference,
        )

    def draft_load_config(self) -> LoadConfig:
        """How to load the assistant: like the target, with its own files and without the overrides."""
        assert self.speculative_draft_model_path is not None, (
            "resolve_server_args has not run, or there is no speculation"
        )
        return dataclasses.replace(
            self.load_config(),
            model_path=Path(self.speculative_draft_model_path),
            overrides={},
            revision=self.speculative_draft_model_revision,
        )

    def memory_config(self) -> MemoryConfig:
        assert self.mem_fraction_static is not None and self.context_length is not None, (
            "resolve_server_args has not run"
        )
        return MemoryConfig(
            mem_fraction_static=self.mem_fraction_static,
            max_total_tokens=self.max_total_tokens,
            max_running_requests=self.max_running_requests,
            page_size=self.page_size,
            context_length=self.context_length,
            disable_radix_cache=self.disable_radix_cache,
        )

    def schedule_config(self) -> ScheduleConfig:
        assert self.chunked_prefill_size is not None, "resolve_server_args has not run"
        return ScheduleConfig(
            chunked_prefill_size=None if self.chunked_prefill_size == -1 else self.chunked_prefill_size,
            max_prefill_tokens=self.max_prefill_tokens,
            enable_mixed_chunk=self.enable_mixed_chunk,
            policy=self.schedule_policy,
            max_running_requests=self.max_running_requests,
            max_queued_requests=self.max_queued_requests,
            conservativeness=self.schedule_conservativeness,
            stream_interval=self.stream_interval,
            decode_log_interval=self.decode_log_interval,
            enable_custom_logit_processor=self.enable_custom_logit_processor,
            enable_return_hidden_states=self.enable_return_hidden_states,
        )

    def graph_config(self) -> GraphConfig:
        max_tokens = self.piecewise_cuda_graph_max_tokens
        assert self.cuda_graph_max_bs is not None and max_tokens is not None, "resolve_server_args has not run"
        off = self.disable_piecewise_cuda_graph
        return GraphConfig(
            capture=not self.disable_cuda_graph,
            sizes=self.cuda_graph_bs,
            max_size=self.cuda_graph_max_bs,
            pad=not self.disable_cuda_graph_padding,
            overlap=not self.disable_overlap_schedule,
            prefill_sizes=() if off else self.piecewise_cuda_graph_tokens,
            prefill_max_size=0 if off else max_tokens,
        )

    def grammar_config(self) -> GrammarConfig:
        return make_grammar_config(
            self.grammar_backend,
            self.constrained_json_whitespace_pattern,
            disable_any=self.constrained_json_disable_any_whitespace,
        )

    def spec_config(self) -> SpecConfig | None:
        """The speculation asked for, None when there is none."""
        if self.speculative_algorithm is None:
            return None
        steps, topk, tokens = self.speculative_num_steps, self.speculative_eagle_topk, self.speculative_num_draft_tokens
        assert self.speculative_draft_model_path is not None, "resolve_server_args has not run"
        assert steps is not None and topk is not None and tokens is not None, "resolve_server_args has not run"
        return SpecConfig(
            algorithm=self.speculative_algorithm,
            draft_model_path=Path(self.speculative_draft_model_path),
            num_steps=steps,
            topk=topk,
            num_draft_tokens=tokens,
            adaptive=bool(self.speculative_adaptive),
            sample_drafts=self.speculative_use_rejection_sampling,
        )


def parse_overrides(text: str) -> dict[str, Any]:
    """``--json-model-override-args`` as an object."""
    flag = "--json-model-override-args"
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as err:
        raise ValueError(f"{flag} must be a JSON object, got {text!r:.200} ({str(err) or type(err).__name__})") from err
    if not isinstance(value, dict):
        raise ValueError(f"{flag} must be a JSON object, got {text!r:.200}")
    return value
