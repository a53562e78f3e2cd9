"""Greedy tokens of the engine, with and without speculation, equal transformers' greedy tokens."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from fixtures.make_tiny_gemma4 import KINDS
from oracle.corpus_prompts import prompt_ids, questions, task_names
from oracle.hf_reference import HFReference
from sglang import Engine
from sglang.srt.utils.embedded import EmbeddedModel
from sglang.srt.utils.hf_transformers.tokenizer import load_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

SPEC = {"speculative_algorithm": "FROZEN_KV_MTP", "speculative_num_steps": 3}
# shorter than, just at, around and far past the window of 8
PROMPT_LENS = (1, 5, 8, 9, 27, 40)
NUM_TOKENS = 48
FLAT_KINDS = ("dense", "dense_keqv", "eseries", "moe")


def random_prompts() -> list[list[int]]:
    rng = random.Random(11)
    # ids above 299 reach into the media placeholders of the tiny vocabulary
    return [[2, *(rng.randrange(3, 300) for _ in range(n - 1))] for n in PROMPT_LENS]


def engine_tokens(prompts: list[list[int]], num_tokens: int, **kwargs: Any) -> list[list[int]]:
    params = {"temperature": 0.0, "max_new_tokens": num_tokens, "ignore_eos": True}
    with Engine(dtype="float32", device="cpu", max_total_tokens=8192, **kwargs) as engine:
        outputs = engine.generate(input_ids=prompts, sampling_params=params)
    return [list(out["output_ids"]) for out in outputs]


@pytest.mark.parametrize("spec", [False, True], ids=["plain", "spec"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_variant(kind: str, spec: bool, tiny_checkpoints: Path, byte_tokenizer: Path) -> None:
    check_variant(tiny_checkpoints, kind, spec, byte_tokenizer)


@pytest.mark.parametrize("spec", [False, True], ids=["plain", "spec"])
@pytest.mark.parametrize("kind", FLAT_KINDS)
def test_every_flat_variant(kind: str, spec: bool, tiny_checkpoints_flat: Path, byte_tokenizer: Path) -> None:
    check_variant(tiny_checkpoints_flat, kind, spec, byte_tokenizer)


def check_variant(folder: Path, kind: str, spec: bool, tokenizer: Path) -> None:
    prompts = random_prompts()
    extra = {**SPEC, "speculative_draft_model_path": str(folder / f"{kind}-assistant")} if spec else {}
    ours = engine_tokens(
        prompts,
        NUM_TOKENS,
        model_path=str(folder / kind),
        tokenizer_path=str(tokenizer),
        chunked_prefill_size=16,
        **extra,
    )
    theirs = HFReference(folder / kind).greedy(prompts, NUM_TOKENS)
    assert len({tuple(row) for row in theirs}) > 1, "the reference answers every prompt alike"
    assert ours == theirs


@pytest.fixture(scope="module")
def corpus_prompts(trained_pair: EmbeddedModel) -> list[list[int]]:
    """20 prompts over every task of the corpus."""
    tokenizer = load_tokenizer(trained_pair.target, trust_remote_code=False)
    asked = [question for task in task_names() for question in questions(task, 2, seed=3)]
    return [prompt_ids(tokenizer, question.text) for question in random.Random(5).sample(asked, 20)]


@pytest.fixture(scope="module")
def corpus_tokens(trained_pair: EmbeddedModel, corpus_prompts: list[list[int]]) -> list[list[int]]:
    return HFReference(trained_pair.target, attn_implementation="sdpa").greedy(corpus_prompts, 200)


@pytest.mark.parametrize("spec", [False, True], ids=["plain", "spec"])
def test_trained_pair(spec: bool, corpus_prompts: list[list[int]], corpus_tokens: list[list[int]]) -> None:
    """200 tokens each, far past the window and past the end of the answer."""
    extra = {"speculative_algorithm": "FROZEN_KV_MTP"} if spec else {}
    ours = engine_tokens(corpus_prompts, 200, model_path="tiny-gemma4", **extra)
    pairs = enumerate(zip(ours, corpus_tokens, strict=True))
    wrong = [(i, first_difference(mine, theirs)) for i, (mine, theirs) in pairs if mine != theirs]
    assert not wrong, f"(prompt, first differing token): {wrong}"


def first_difference(ours: list[int], theirs: list[int]) -> int:
    return next((j for j, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
