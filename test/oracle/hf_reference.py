"""Gemma 4 checkpoints run by transformers in float32 with eager attention: what the engine must agree with.

Shape letters: ``T`` tokens of one sequence, ``V`` vocabulary, ``D`` hidden width, ``K`` KV heads, ``d`` head width.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedModel,
)

PAD_TOKEN_ID = 0
_COMPOSITE = {"gemma4", "gemma4_unified"}


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """One forward over a whole sequence.

    ``logits`` [T, V] after the soft cap; ``hidden`` [T, D] after the final norm; ``store_kv`` per layer kind the
    (K, V) [K, T, d] of the layer an assistant reads: K normed and rotated, V normed.
    """

    logits: torch.Tensor
    hidden: torch.Tensor
    store_kv: dict[str, tuple[torch.Tensor, torch.Tensor]]


def load_hf_model(path: str | Path, attn_implementation: str = "eager", device: str = "cpu") -> PreTrainedModel:
    """The checkpoint in float32. Composite ones need their own class: the text-only one would keep random weights."""
    config = AutoConfig.from_pretrained(path)
    auto = AutoModelForImageTextToText if config.model_type in _COMPOSITE else AutoModelForCausalLM
    model, report = auto.from_pretrained(
        path, dtype=torch.float32, attn_implementation=attn_implementation, output_loading_info=True
    )
    wrong = {name: keys for name, keys in report.items() if keys}
    assert not wrong, f"transformers did not load {path} completely: {wrong}"
    # generate() falls back to this for anything unset, and the released defaults sample
    model.generation_config = GenerationConfig(pad_token_id=PAD_TOKEN_ID, bos_token_id=2, do_sample=False)
    return model.eval().to(device)


def stop_token_ids(path: str | Path) -> list[int]:
    """Every stop id a checkpoint names, in ``config.json`` or ``generation_config.json``."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        file = Path(path) / name
        ids = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
        found.update([ids] if isinstance(ids, int) else ids or [])
    return sorted(found)


class HFReference:
    """A target, and its assistant when one is given."""

    def __init__(
        self,
        path: str | Path,
        assistant_path: str | Path | None = None,
        attn_implementation: str = "eager",
        device: str = "cpu",
    ):
        self.stop_token_ids = stop_token_ids(path)
        self.model = load_hf_model(path, attn_implementation, device)
        self.assistant = None if assistant_path is None else load_hf_model(assistant_path, attn_implementation, device)

    @torch.inference_mode()
    def prefill(self, input_ids: Sequence[int]) -> PrefillResult:
        """One uncached forward over ``input_ids``."""
        out = self.model(
            input_ids=self._ids([list(input_ids)]),
            use_cache=False,
            output_hidden_states=True,
            return_shared_kv_states=True,
        )
        store_kv = {kind: (k[0], v[0]) for kind, (k, v) in out.shared_kv_states.items()}
        return PrefillResult(out.logits[0], out.hidden_states[-1][0], store_kv)

    @torch.inference_mode()
    def decode(self, prompt_ids: Sequence[int], next_ids: Sequence[int]) -> torch.Tensor:
        """Cached decode, one forced token a step -> logits [len(next_ids), V]; row i is after ``next_ids[i]``."""
        out = self.model(input_ids=self._ids([list(prompt_ids)]), use_cache=True)
        rows = []
        for token in next_ids:
            out = self.model(input_ids=self._ids([[token]]), past_key_values=out.past_key_values, use_cache=True)
            rows.append(out.logits[0, -1])
        return torch.stack(rows)

    @torch.inference_mode()
    def greedy(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, eos_token_ids: Sequence[int] = ()
    ) -> list[list[int]]:
        """Greedy continuations of a batch. Without ``eos_token_ids`` every row has ``num_tokens`` tokens, otherwise a
        row ends with its first stop token. Rows are padded on the left and masked, which leaves their values alone."""
        width = max(map(len, prompts))
        ids = self._ids([[PAD_TOKEN_ID] * (width - len(p)) + list(p) for p in prompts])
        mask = self._ids([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        out = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=num_tokens,
            eos_token_id=list(eos_token_ids) or None,
            do_sample=False,
        )
        return [_through_first(row, eos_token_ids) for row in out[:, width:].tolist()]

    @torch.inference_mode()
    def assisted(
        self,
        prompt_ids: Sequence[int],
        num_tokens: int,
        num_assistant_tokens: int = 4,
        eos_token_ids: Sequence[int] = (),
    ) -> list[int]:
        """Tokens of assisted generation (one sequence: transformers refuses batches)."""
        assert self.assistant is not None, "no assistant was given"
        self.assistant.generation_config = GenerationConfig(
            num_assistant_tokens=num_assistant_tokens, num_assistant_tokens_schedule="constant"
        )
        ids = self._ids([list(prompt_ids)])
        out = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=self.assistant,
            max_new_tokens=num_tokens,
            eos_token_id=list(eos_token_ids) or None,
            do_sample=False,
        )
        return _through_first(out[0, len(prompt_ids) :].tolist(), eos_token_ids)

    def _ids(self, rows: list[list[int]]) -> torch.Tensor:
        return torch.tensor(rows, device=self.model.device)


def _through_first(tokens: list[int], stops: Sequence[int]) -> list[int]:
    """``tokens`` up to and including the first of ``stops``."""
    for i, token in enumerate(tokens):
        if token in stops:
            return tokens[: i + 1]
    return tokens
