"""Drafts that are drawn: answers keep their distribution, greedy ones their tokens, and more drafts are accepted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fixtures.scheduler_driver import SchedulerDriver
from sglang.srt.managers.io_struct import TokenOut
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.embedded import EmbeddedModel
from sglang.srt.utils.hf_transformers.tokenizer import load_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

SAMPLED = {"speculative_use_rejection_sampling": True}
PROMPT = [5, 77, 301, 12]
NUM = 1500
CONTROLS: dict[str, dict[str, Any]] = {
    "top-k": {"top_k": 3},
    "filters": {"temperature": 1.4, "top_k": 5, "top_p": 0.9, "min_p": 0.05},
    "penalties": {"top_k": 3, "frequency_penalty": 1.5, "repetition_penalty": 1.2, "logit_bias": ((9, 2.0),)},
}


def answers(driver: SchedulerDriver, controls: dict[str, Any], num: int, first_seed: int) -> list[tuple[int, ...]]:
    params = [
        SamplingParams(max_new_tokens=4, ignore_eos=True, sampling_seed=first_seed + i, **controls) for i in range(num)
    ]
    return driver.tokens([PROMPT] * num, params)


def two_samples(one: Sequence[tuple[int, ...]], other: Sequence[tuple[int, ...]]) -> tuple[float, int]:
    """Chi-square of two samples of equal size, and its degrees of freedom; rare outcomes count as one."""
    counts: dict[tuple[int, ...], list[int]] = {}
    for side, sample in enumerate((one, other)):
        for outcome in sample:
            counts.setdefault(outcome, [0, 0])[side] += 1
    common = [pair for pair in counts.values() if sum(pair) >= 20]
    rare = [sum(pair[side] for pair in counts.values() if sum(pair) < 20) for side in (0, 1)]
    cells = [*common, *([rare] if sum(rare) else [])]
    return sum((a - b) ** 2 / (a + b) for a, b in cells), len(cells) - 1


@pytest.mark.parametrize("controls", CONTROLS.values(), ids=CONTROLS)
def test_answers_have_the_distribution_of_plain_decode(controls: dict[str, Any], tiny_checkpoints: Path) -> None:
    """Whole answers of four tokens, through the scheduler: the first is plain, the others come from rounds."""
    target, assistant = tiny_checkpoints / "dense", tiny_checkpoints / "dense-assistant"
    options = {"max_running_requests": 128, "max_total_tokens": 8192, "context_length": 32}
    plain = answers(SchedulerDriver(target, None, 0, **options), controls, NUM, 0)
    sampled = answers(SchedulerDriver(target, assistant, 2, **SAMPLED, **options), controls, NUM, NUM)
    chi2, freedom = two_samples(plain, sampled)
    assert freedom > 8 and chi2 < freedom + 5 * math.sqrt(2 * freedom), f"{chi2=:.1f} {freedom=}"
    moved = [(*answer[:3], (answer[3] + 1) % 512 if i % 5 == 0 else answer[3]) for i, answer in enumerate(sampled)]
    chi2, freedom = two_samples(plain, moved)
    assert chi2 > freedom + 5 * math.sqrt(2 * freedom), "a fifth of the answers changed and the test does not see it"


def test_greedy_requests_and_first_tokens_are_as_ever(tiny_checkpoints: Path) -> None:
    target, assistant = tiny_checkpoints / "eseries", tiny_checkpoints / "eseries-assistant"
    params = [
        SamplingParams(temperature=t, max_new_tokens=20, ignore_eos=True, sampling_seed=i, top_k=40)
        for i, t in enumerate((0.0, 1.0, 0.0, 1.3))
    ]
    prompts = [PROMPT, PROMPT[::-1], PROMPT * 3, PROMPT * 2]
    plain = SchedulerDriver(target, None, 0).tokens(prompts, params)
    driver = SchedulerDriver(target, assistant, 4, **SAMPLED)
    got = driver.tokens(prompts, params)
    assert got[0] == plain[0] and got[2] == plain[2]
    assert [tokens[0] for tokens in got] == [tokens[0] for tokens in plain], "the prefill's token is drawn plainly"
    assert got[1] != plain[1], "a drawn answer is another one"
    for prompt, param, tokens in zip(prompts, params, got, strict=True):
        assert driver.tokens([prompt], [param])[0] == tokens, "a seed reproduces, in any batch"


def run_pair(pair: EmbeddedModel, temperature: float, num_steps: int, **options: Any) -> list[TokenOut]:
    tokenizer = load_tokenizer(pair.target, trust_remote_code=False)
    texts = ["Tell me a story.", "Count from 1 to 40.", "Say fox 9 times.", "What is 17 + 25?", "Spell the word river."]
    prompts = [
        list(tokenizer.apply_chat_template([{"role": "user", "content": t}], add_generation_prompt=True)["input_ids"])
        for t in texts
    ]
    params = [
        SamplingParams(temperature=temperature, sampling_seed=seed, max_new_tokens=48, ignore_eos=True)
        for seed in range(4)
        for _ in prompts
    ]
    driver = SchedulerDriver(pair.target, pair.assistant, num_steps, max_total_tokens=8192, **options)
    return driver.run(prompts * 4, params)


def accept_length(outs: Sequence[TokenOut]) -> float:
    stats = [out.spec for out in outs if out.spec is not None]
    return 1 + sum(s.accepted_tokens for s in stats) / sum(s.verify_ct for s in stats)


def test_drawn_drafts_are_accepted_more_often_when_answers_are_drawn(trained_pair: EmbeddedModel) -> None:
    best, drawn = (accept_length(run_pair(trained_pair, 1.0, 4, **options)) for options in ({}, SAMPLED))
    assert drawn > best * 1.02, f"{best=:.3f} {drawn=:.3f}"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_tree_accepts_at_least_what_a_chain_does(temperature: float, trained_pair: EmbeddedModel) -> None:
    lengths = []
    for topk in (1, 2, 3):
        outs = run_pair(trained_pair, temperature, 3, speculative_eagle_topk=topk)
        lengths.append(accept_length(outs))
        if topk > 1:
            assert all(out.spec is not None and out.spec.draft_tokens == 3 * topk * out.spec.verify_ct for out in outs)
        assert all(out.spec is not None and len(out.spec.accepted_by_position) == 3 for out in outs)
    assert lengths == sorted(lengths), lengths
