"""Speculation changes no token in any combination of two settings: pairs of models, batches, kinds and lengths of
drafts, pages, chunks, prefix hits, arrivals, aborts, short memory, and the order of steps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fixtures.make_tiny_gemma4 import KINDS
from fixtures.pairwise import Case, all_pairs, pairs_of, pairwise
from fixtures.scheduler_driver import SchedulerDriver
from sglang.srt.managers.io_struct import TokenOut
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.embedded import EmbeddedModel
from sglang.srt.utils.hf_transformers.tokenizer import load_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

PAIRS = ("trained", *KINDS)
ROUNDS: dict[str, dict[str, Any]] = {
    "chain": {},
    "adaptive": {"speculative_adaptive": True},
    "tree of 2": {"speculative_eagle_topk": 2},
    "tree of 3": {"speculative_eagle_topk": 3},
    "drawn": {"speculative_use_rejection_sampling": True},
}
PREFILL: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks": {"chunked_prefill_size": 16},
    "mixed": {"chunked_prefill_size": 16, "enable_mixed_chunk": True},
}
ORDER: dict[str, dict[str, Any]] = {
    "exact": {},
    "in turn": {"cuda_graph_bs": (1, 2, 4, 8), "disable_overlap_schedule": True},
    "overlapped": {"cuda_graph_bs": (1, 2, 4, 8)},
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "pair": PAIRS,
    "batch": (1, 2, 3, 4, 5, 6),
    "steps": (1, 2, 3, 4, 5, 6),
    "rounds": tuple(ROUNDS),
    "page_size": (1, 4, 16),
    "prefill": tuple(PREFILL),
    "order": tuple(ORDER),
    "staggered": (False, True),
    "cached": (False, True),
    "event": ("none", "abort", "short memory"),
}
CASES = pairwise(FACTORS)
TEXTS = ("Count from 1 to 30.", "Tell me a story.", "Say fox 9 times.", "What is 7 + 8?", "Spell the word river.")
NUM_TOKENS = 24


def params_of(num: int) -> list[SamplingParams]:
    """Greedy and drawn answers of several lengths, so that rows leave the batch at different times."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 50, "top_p": 0.9},
        {"temperature": 0.0, "frequency_penalty": 0.8},
        {"temperature": 0.8, "min_p": 0.05},
        {"temperature": 0.0, "min_new_tokens": 4, "stop_token_ids": (298, 20)},
        {"temperature": 1.3, "logit_bias": ((9, 2.0),)},
    ]
    return [
        SamplingParams(max_new_tokens=NUM_TOKENS - 3 * (i % 3), ignore_eos=True, sampling_seed=i, **kinds[i])
        for i in range(num)
    ]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two checkpoints, prompts for them that begin alike, and what each gets from the target alone."""

    target: Path
    assistant: Path
    prompts: list[list[int]]
    answers: list[tuple[int, ...]]


@pytest.fixture(scope="module")
def pairs(tiny_checkpoints: Path, trained_pair: EmbeddedModel) -> dict[str, Pair]:
    tokenizer = load_tokenizer(trained_pair.target, trust_remote_code=False)
    turns = [[{"role": "user", "content": " ".join((*TEXTS[: i % 3], TEXTS[i % 5]))}] for i in range(6)]
    chats = [list(tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)) for turn in turns]
    beginning = [4 + 29 * j % 490 for j in range(18)]
    noise = [beginning[: 18 * (i % 2)] + [4 + (37 * i + 11 * j) % 490 for j in range(5 * i + 3)] for i in range(6)]
    found = {}
    for name in PAIRS:
        target, assistant = trained_pair.target, trained_pair.assistant
        if name != "trained":
            target, assistant = tiny_checkpoints / name, tiny_checkpoints / f"{name}-assistant"
        prompts = chats if name == "trained" else noise
        plain = SchedulerDriver(target, None, 0, disable_radix_cache=True)
        answers = [plain.tokens([p], [q])[0] for p, q in zip(prompts, params_of(6), strict=True)]
        found[name] = Pair(target, assistant, prompts, answers)
    return found


def make_driver(case: Case, pair: Pair) -> SchedulerDriver:
    options = {**ROUNDS[case["rounds"]], **PREFILL[case["prefill"]], **ORDER[case["order"]]}
    topk = options.get("speculative_eagle_topk", 1)
    if topk > 1:
        most = 1 + topk + (case["steps"] - 1) * topk**2
        options["speculative_num_draft_tokens"] = min(most, 2 + 2 * case["steps"])
    if case["event"] == "short memory":
        # enough for the longest one by itself, and for all prompts but not for all answers
        width = max(case["steps"] + 1, options.get("speculative_num_draft_tokens", 0))
        needs = [len(prompt) + NUM_TOKENS + width + case["page_size"] for prompt in pair.prompts[: case["batch"]]]
        room = max(max(needs) + width, sum(needs) // 2)
        options |= {
            "max_total_tokens": -(-room // 16) * 16,
            "schedule_conservativeness": 0.001,
            "max_running_requests": 6,
        }
    return SchedulerDriver(pair.target, pair.assistant, case["steps"], page_size=case["page_size"], **options)


def check(case: Case, pair: Pair, outs: list[TokenOut], victim: int | None) -> None:
    for i, out in enumerate(outs):
        answer, params = pair.answers[i], params_of(case["batch"])[i]
        assert out.finish_reason is not None
        if out.finish_reason.type == "abort":
            assert i == victim, case
            answer = answer[: len(out.token_ids)]
        if case["rounds"] != "drawn" or params.is_greedy:
            assert out.token_ids == answer, (case, i)


def run(case: Case, pair: Pair) -> int:
    """The number of retractions."""
    driver, num = make_driver(case, pair), case["batch"]
    prompts, params = pair.prompts[:num], params_of(num)
    arrivals = [2 * i for i in range(num)] if case["staggered"] else [0] * num
    victim = num // 2 if case["event"] == "abort" else None
    aborts = None if victim is None else {victim: arrivals[victim] + 3}
    if case["cached"]:
        check(case, pair, driver.run(prompts, params, arrivals=arrivals), None)
    outs = driver.run(prompts, params, arrivals=arrivals, aborts=aborts)
    check(case, pair, outs, victim)
    if case["cached"] and case["event"] != "short memory":
        assert any(out.cached_tokens for out in outs) or max(map(len, prompts)) <= case["page_size"], case
    return driver.scheduler.metrics.totals.num_retractions


def test_every_two_values_meet() -> None:
    met = set().union(*(pairs_of(case) for case in CASES))
    assert met == all_pairs(FACTORS) and len(CASES) < 80


@pytest.mark.slow
@pytest.mark.parametrize("event", FACTORS["event"])
def test_on_is_off(event: str, pairs: dict[str, Pair]) -> None:
    retractions = sum(run(case, pairs[case["pair"]]) for case in CASES if case["event"] == event)
    assert (retractions > 5) == (event == "short memory"), f"{retractions=}"
