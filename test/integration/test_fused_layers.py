"""All layers in one compiled call give what they give one by one, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sglang
from sgl_kernel.decoder_layers import DecoderLayers
from sgl_kernel.draft_chain import DraftChain
from sglang.srt.models import gemma4_causal
from sglang.srt.models.gemma4_mtp import Gemma4AssistantForCausalLM

pytestmark = pytest.mark.usefixtures("need_compiler")

TEXTS = [
    f"<bos><|turn>user\n{question}<turn|>\n<|turn>model\n"
    for question in ("Count from 3 to 20.", "Tell me a story about a fox.", "What is 17 + 25?")
]
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chain": {"speculative_algorithm": "FROZEN_KV_MTP", "speculative_num_steps": 4},
    "tree, pages": {
        "speculative_algorithm": "FROZEN_KV_MTP",
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 2,
        "speculative_num_draft_tokens": 8,
        "page_size": 16,
    },
}


def answers(options: dict[str, Any]) -> list[Any]:
    params = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}
    with sglang.Engine(model_path="tiny-gemma4", device="cpu", dtype="float32", log_level="error", **options) as engine:
        replies = engine.generate(TEXTS, params, return_logprob=True)
    return [(reply["output_ids"], reply["meta_info"]["output_token_logprobs"]) for reply in replies]


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_one_call_or_many(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[DecoderLayers | None] = []
    fuse = gemma4_causal.fuse_layers

    def watched(*args: Any) -> DecoderLayers | None:
        made.append(fuse(*args))
        return made[-1]

    monkeypatch.setattr(gemma4_causal, "fuse_layers", watched)
    fused = answers(options)
    assert len(made) == (1 if options.get("speculative_algorithm") is None else 2) and None not in made
    monkeypatch.setattr(gemma4_causal, "fuse_layers", lambda *_: None)
    assert answers(options) == fused


def test_a_chain_in_one_call_or_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rounds, so the same drafts: lengths of accepted runs show every one of them."""
    calls: list[int] = []
    chain = DraftChain.__call__

    def watched(self: DraftChain, tokens: torch.Tensor, *args: Any) -> torch.Tensor:
        calls.append(len(tokens))
        return chain(self, tokens, *args)

    def runs() -> list[Any]:
        params = {"temperature": 0, "max_new_tokens": 80, "ignore_eos": True}
        spec = {"speculative_algorithm": "FROZEN_KV_MTP", "speculative_num_steps": 4}
        with sglang.Engine(model_path="tiny-gemma4", device="cpu", log_level="error", **spec) as engine:
            replies = engine.generate(TEXTS, params, return_accept_lens=True)
        return [(reply["output_ids"], reply["meta_info"]["accept_lens"]) for reply in replies]

    monkeypatch.setattr(DraftChain, "__call__", watched)
    whole = runs()
    assert calls and max(calls) == len(TEXTS)
    monkeypatch.setattr(Gemma4AssistantForCausalLM, "draft_chain", lambda *_: None)
    calls.clear()
    assert runs() == whole and not calls
