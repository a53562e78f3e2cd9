"""Every draft step agrees with an assistant written independently, and that one with transformers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from fixtures.make_tiny_gemma4 import KINDS
from oracle.assistant_oracle import SLIDING, AssistantOracle, DraftStep
from oracle.engine_probe import EngineProbe
from oracle.hf_reference import HFReference
from sglang.srt.model_executor.forward_batch_info import ForwardMode
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


class Pair:
    """The engine's pair beside the oracle and transformers' target."""

    def __init__(self, target: Path, assistant: Path) -> None:
        self.probe = EngineProbe(target, assistant, max_len=192)
        self.hf = HFReference(target)
        self.oracle = AssistantOracle(assistant, target)

    def expected(self, committed: list[int], num_steps: int = NUM_STEPS) -> list[DraftStep]:
        """The oracle's draft after these tokens, of which the last is the bonus token without KV."""
        result = self.hf.prefill(committed[:-1])
        return self.oracle.draft(result.store_kv, result.hidden[-1], committed[-1], num_steps)


@pytest.fixture(scope="module", params=KINDS)
def loaded(request: pytest.FixtureRequest, tiny_checkpoints: Path) -> Pair:
    return Pair(tiny_checkpoints / request.param, tiny_checkpoints / f"{request.param}-assistant")


@pytest.fixture
def pair(loaded: Pair) -> Pair:
    """Loaded once per variant; sequences start empty, over the stale KV of the test before."""
    for request in range(len(loaded.probe.kv_lens)):
        loaded.probe.rewind(request, 0)
    return loaded


class TestEngineDraft:
    @pytest.mark.parametrize("length", PROMPT_LENS)
    def test_every_step(self, pair: Pair, length: int) -> None:
        ids = prompt(length)
        rows = pair.probe.run({0: ids}, last_only=True)[0]
        bonus = int(rows.logits[0].argmax())
        before = pair.probe.pool.digest()
        steps = pair.probe.draft({0: (bonus, rows.hidden[0])}, NUM_STEPS)[0]
        assert pair.probe.pool.digest() == before, "drafting changed the target's KV"
        assert_same_steps(steps, pair.expected([*ids, bonus]))

    def test_unlike_lengths_in_one_batch(self, pair: Pair) -> None:
        prompts = dict(enumerate(prompt(n) for n in (27, 1, 8, 5)))
        rows = pair.probe.run(prompts, last_only=True)
        seeds = {r: (int(rows[r].logits[0].argmax()), rows[r].hidden[0]) for r in (2, 0, 3, 1)}
        for request, steps in pair.probe.draft(seeds, NUM_STEPS).items():
            assert_same_steps(steps, pair.expected([*prompts[request], seeds[request][0]]))

    @pytest.mark.parametrize("kept", [0, 1, 3])
    @pytest.mark.parametrize("length", [3, 20])
    def test_after_a_partial_rejection(self, pair: Pair, length: int, kept: int) -> None:
        """Stale KV of rejected drafts is never seen: the draft is that of a fresh prefill of the same tokens."""
        ids, verified = prompt(length), prompt(6)[2:]
        pair.probe.run({0: ids})
        rows = pair.probe.run({0: verified}, ForwardMode.TARGET_VERIFY)[0]
        committed = [*ids, *verified[: kept + 1]]
        pair.probe.rewind(0, len(committed))
        bonus = int(rows.logits[kept].argmax())
        steps = pair.probe.draft({0: (bonus, rows.hidden[kept])}, NUM_STEPS)[0]
        assert_same_steps(steps, pair.expected([*committed, bonus]))


def test_trained_pair_over_rounds(trained_pair: EmbeddedModel) -> None:
    """Draft, verify and commit until past the window of 64, accepting what the target agrees with."""
    pair = Pair(trained_pair.target, trained_pair.assistant)
    committed = prompt(50)
    rows = pair.probe.run({0: committed}, last_only=True)[0]
    bonus, hidden = int(rows.logits[0].argmax()), rows.hidden[0]
    for _ in range(16):
        steps = pair.probe.draft({0: (bonus, hidden)}, 4)[0]
        assert_same_steps(steps, pair.expected([*committed, bonus], 4))
        drafts = [step.token for step in steps]
        rows = pair.probe.run({0: [bonus, *drafts]}, ForwardMode.TARGET_VERIFY)[0]
        choices = rows.logits.argmax(dim=-1).tolist()
        accepted = next((i for i, (d, c) in enumerate(zip(drafts, choices, strict=False)) if d != c), len(drafts))
        committed += [bonus, *drafts[:accepted]]
        pair.probe.rewind(0, len(committed))
        bonus, hidden = choices[accepted], rows.hidden[accepted]
    assert len(committed) > 66
