"""Every draft step agrees with an assistant written independently, and that one with transformers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from fixtures.make_tiny_gemma4 import KINDS
from oracle.assistant_oracle import SLIDING, AssistantOracle, DraftStep
from oracle.hf_reference import HFReference
from sglang.srt.utils.embedded import EmbeddedModel

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-4
NUM_STEPS = 5
# within, at and past the window of 8; a prompt of 1 leaves a draft a single position to see
PROMPT_LENS = (1, 5, 8, 27)


def prompt(length: int) -> list[int]:
    rng = random.Random(length)
    return [2, *(rng.randrange(3, 300) for _ in range(length - 1))]


def assert_same_steps(got: list[DraftStep], oracle: list[DraftStep]) -> None:
    for i, (mine, want) in enumerate(zip(got, oracle, strict=True)):
        # the centroid head scores some tokens only; the others must rank below all of them
        seen = torch.isfinite(want.logits)
        logit_error = (mine.logits[seen] - want.logits[seen]).abs().max().item()
        hidden_error = (mine.hidden - want.hidden).abs().max().item()
        assert logit_error <= TOLERANCE and hidden_error <= TOLERANCE, f"step {i}: {logit_error=} {hidden_error=}"
        assert (mine.logits[~seen] < want.logits[seen].min()).all(), f"step {i}: an unseen token has a score"
        assert mine.token == want.token, f"step {i}"


class TestOracleAgainstTransformers:
    """Transformers' assistant, given exactly the KV that is visible by our definition."""

    @pytest.mark.parametrize("kind", KINDS)
    def test_random_pairs(self, kind: str, tiny_checkpoints: Path) -> None:
        check_oracle(tiny_checkpoints / kind, tiny_checkpoints / f"{kind}-assistant", PROMPT_LENS)

    def test_trained_pair(self, trained_pair: EmbeddedModel) -> None:
        check_oracle(trained_pair.target, trained_pair.assistant, (3, 64, 90))


def check_oracle(target: Path, assistant: Path, lengths: tuple[int, ...]) -> None:
    hf, oracle = HFReference(target, assistant), AssistantOracle(assistant, target)
    for length in lengths:
        result = hf.prefill(prompt(length))
        bonus = int(result.logits[-1].argmax())
        steps = oracle.draft(result.store_kv, result.hidden[-1], bonus, NUM_STEPS)
        theirs = transformers_draft(hf, oracle.window, result.store_kv, result.hidden[-1], bonus)
        assert_same_steps(theirs, steps)


@torch.inference_mode()
def transformers_draft(
    hf: HFReference,
    window: int,
    store_kv: dict[str, tuple[torch.Tensor, torch.Tensor]],
    hidden: torch.Tensor,
    token: int,
) -> list[DraftStep]:
    """Transformers shows a sliding layer more than its window; handing over only the visible KV takes that away."""
    cached_len = store_kv[SLIDING][0].shape[1]
    first = {kind: max(0, cached_len - window + 1) if kind == SLIDING else 0 for kind in store_kv}
    visible = {kind: (k[None, :, first[kind] :], v[None, :, first[kind] :]) for kind, (k, v) in store_kv.items()}
    steps = []
    for _ in range(NUM_STEPS):
        embedding = hf.model.get_input_embeddings()(torch.tensor([[token]]))
        out = hf.assistant(
            inputs_embeds=torch.cat([embedding, hidden[None, None]], dim=-1),
            position_ids=torch.tensor([[cached_len]]),
            attention_mask=torch.ones(1, cached_len + 1),
            shared_kv_states=visible,
            use_cache=False,
        )
        token, hidden = int(out.logits.argmax()), out.last_hidden_state[0, 0]
        steps.append(DraftStep(out.logits[0, 0], token, hidden))
    return steps
