"""Runs the engine's models forward by forward, without scheduler or worker, so that a test can look at every number.

KV slots are handed out in a shuffled order, so that code which takes neighbouring positions for neighbouring slots
fails.
Shape letters: ``V`` vocabulary, ``D`` target width.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open

from oracle.assistant_oracle import DraftStep
from sgl_kernel.centroid_head import centroid_candidates
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.registries import ATTENTION_BACKENDS, MODELS, load_entry
from sglang.srt.mem_cache.kv_pool import KVReader, MHATokenToKVPool
from sglang.srt.mem_cache.kv_view import ReadOnlyKVPool
from sglang.srt.model_executor.forward_batch_info import (
    AttnGeometry,
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    HostLens,
    TailBatch,
)
from sglang.srt.models.gemma4_mtp import CentroidHead, Gemma4AssistantForCausalLM, build_frozen_kv_mtp_context
from sglang.srt.models.interfaces import LoadableModel
from sglang.srt.utils.hf_transformers.config import load_model_config

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Rows:
    """Result of one request in one forward: ``logits`` [rows, V] and ``hidden`` [rows, D]."""

    logits: torch.Tensor
    hidden: torch.Tensor


class EngineProbe:
    """A target, and an assistant when one is given, with room for ``max_requests`` sequences of ``max_len`` tokens."""

    def __init__(
        self, path: Path, assistant_path: Path | None = None, *, max_requests: int = 4, max_len: int = 128
    ) -> None:
        self.config, self.model = load_model(path)
        size = max_requests * max_len
        self.pool = MHATokenToKVPool(self.model.kv_layout, size, 1, torch.float32, CPU)
        slots = list(range(1, size + 1))
        random.Random(0).shuffle(slots)
        self.req_to_token = torch.tensor(slots, dtype=torch.int32).view(max_requests, max_len)
        self.kv_lens = [0] * max_requests
        self.backend = load_entry(ATTENTION_BACKENDS, "torch_native")(self.req_to_token)
        if assistant_path is not None:
            assistant_config, self.assistant = load_model(assistant_path)
            assert isinstance(self.assistant, Gemma4AssistantForCausalLM)
            self.reader = ReadOnlyKVPool(self.pool)
            context = build_frozen_kv_mtp_context(self.config, assistant_config, self.reader)
            self.assistant.bind_frozen_kv_context(context, self.model.get_embed_and_head()[0])

    @torch.inference_mode()
    def run(
        self, inputs: Mapping[int, Sequence[int]], mode: ForwardMode = ForwardMode.EXTEND, *, last_only: bool = False
    ) -> dict[int, Rows]:
        """Append tokens to sequences and return what follows each of them.

        ``inputs``: sequence -> token ids, after what it holds already. ``last_only`` asks for the last row of each, the
        way a prefill does: layers that share KV then compute no other row.
        """
        requests = list(inputs)
        starts = [self.kv_lens[r] for r in requests]
        for request in requests:
            self.kv_lens[request] += len(inputs[request])
        q_lens = [len(inputs[r]) for r in requests]
        fb = self._target_batch(requests, starts, [list(inputs[r]) for r in requests], mode)
        if last_only:
            ends = torch.tensor(q_lens).cumsum(0) - 1
            tail = self._tail(fb, requests, ends)
            fb = replace(fb, capture_hidden_mode=CaptureHiddenMode.LAST, logits_rows=ends, tail=tail)
            q_lens = [1] * len(requests)
        out = self.model.forward(fb)
        assert out.hidden_states is not None
        parts = zip(out.next_token_logits.split(q_lens), out.hidden_states.split(q_lens), strict=True)
        return {request: Rows(*part) for request, part in zip(requests, parts, strict=True)}

    def rewind(self, request: int, kv_len: int) -> None:
        """Forget the KV of positions from ``kv_len`` on; their slots keep stale values, as after a rejection."""
        assert kv_len <= self.kv_lens[request]
        self.kv_lens[request] = kv_len

    @torch.inference_mode()
    def draft(self, seeds: Mapping[int, tuple[int, torch.Tensor]], num_steps: int) -> dict[int, list[DraftStep]]:
        """Draft for several sequences at once. ``seeds``: sequence -> (bonus token, target hidden [D])."""
        requests = list(seeds)
        tokens = torch.tensor([seeds[r][0] for r in requests])
        hidden = torch.stack([seeds[r][1] for r in requests])
        # the bonus token stands at position kv_len: its own KV does not exist yet
        positions = torch.tensor([self.kv_lens[r] for r in requests])
        plan = self.backend.init_forward_metadata(self._geometry(requests, positions.tolist(), [1] * len(requests)))
        steps: dict[int, list[DraftStep]] = {r: [] for r in requests}
        for _ in range(num_steps):
            fb = _batch(ForwardMode.DRAFT, tokens, positions, self.reader, plan, None)
            state, hidden = self.assistant.forward(fb, hidden, self.assistant.rope_tables(fb.positions))
            tokens = self.assistant.draft_argmax(state)
            for row, request in enumerate(requests):
                steps[request].append(DraftStep(self._draft_logits(state[row]), int(tokens[row]), hidden[row]))
        return steps

    def _draft_logits(self, state: torch.Tensor) -> torch.Tensor:
        """All logits of the assistant's head for ``state``; -inf where a centroid head does not look."""
        head = self.assistant.head
        if not isinstance(head, CentroidHead):
            return F.linear(state, head.weight)
        scores, clusters = centroid_candidates(state[None], head.centroids, head.clustered, head.top_k)
        ids = head.token_ordering.view(head.centroids.shape[0], -1)[clusters[0]].flatten()
        return torch.full((head.weight.shape[0],), -torch.inf).index_copy(0, ids, scores[0])

    def _target_batch(
        self, requests: list[int], starts: list[int], ids: list[list[int]], mode: ForwardMode
    ) -> ForwardBatch:
        lens = [len(row) for row in ids]
        geometry = self._geometry(requests, starts, lens)
        spans = zip(requests, starts, lens, strict=True)
        loc = torch.cat([self.req_to_token[r, start : start + n] for r, start, n in spans]).long()
        tokens = torch.tensor([token for row in ids for token in row])
        plan = self.backend.init_forward_metadata(geometry)
        return _batch(mode, tokens, geometry.positions, self.pool, plan, loc)

    def _tail(self, fb: ForwardBatch, requests: list[int], rows: torch.Tensor) -> TailBatch | None:
        if self.config.text.first_kv_shared_layer == self.config.text.num_layers:
            return None
        positions = fb.positions[rows]
        geometry = self._geometry(requests, positions.tolist(), [1] * len(requests))
        plan = self.backend.init_forward_metadata(geometry)
        batch = _batch(fb.mode, fb.input_ids[rows], positions, ReadOnlyKVPool(self.pool), plan, None)
        return TailBatch(rows, replace(batch, capture_hidden_mode=CaptureHiddenMode.LAST))

    def _geometry(self, requests: list[int], starts: list[int], q_lens: list[int]) -> AttnGeometry:
        spans = zip(starts, q_lens, strict=True)
        return AttnGeometry.from_host(
            torch.tensor(requests),
            torch.cat([torch.arange(start, start + n) for start, n in spans]),
            tuple(q_lens),
            HostLens(tuple(self.kv_lens[r] for r in requests), tuple(starts)),
        )


def _batch(mode, ids, positions, pool: KVReader, plan, loc: torch.Tensor | None) -> ForwardBatch:
    return ForwardBatch(
        mode=mode,
        input_ids=ids,
        positions=positions,
        token_to_kv_pool=pool,
        out_cache_loc=loc,
        attn=plan,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        logits_rows=None,
        tail=None,
    )


def load_model(path: Path) -> tuple[ModelConfig, LoadableModel]:
    """The engine's model of a checkpoint in float32; its tensors must be exactly those of the files."""
    config = load_model_config(path, overrides={}, trust_remote_code=False)
    model = load_entry(MODELS, config.architecture)(config, torch.float32, CPU)
    tensors = {}
    for shard in sorted(path.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as f:
            tensors |= {name: f.get_tensor(name) for name in f.keys()}
    plan = model.weight_plan(tensors.keys())
    assert set(plan.slots) == set(tensors) - plan.ignored, "the model's tensors are not those of the checkpoint"
    for name, slot in plan.slots.items():
        assert slot.shape == tensors[name].shape, name
        slot.copy_(tensors[name])
    model.finish_loading()
    return config, model
