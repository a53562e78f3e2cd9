"""Every control on a vocabulary of three tokens: what a round emits has exactly the distribution of plain decode.

Plain decode is written here once more, in plain Python. A round is computed by the engine's own functions: all choices
at all of its rows, weighted with their probabilities.
"""

from __future__ import annotations

import itertools
import math
from array import array
from typing import Any

import pytest
import torch

from fixtures.logit_processors import NoRepeatAfter
from sgl_kernel.sampling import filtered_probs
from sgl_kernel.spec_tree import accept_chain, accept_tree
from sglang.srt.layers.logit_controls import apply_logit_controls
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.sampling.thought_budget import ThoughtBudget, ThoughtTokens

VOCAB, LENGTH = 3, 4
PROMPT = (1, 2)
ROOT = 1  # the first token of the answer; a round begins behind it
STOP = 2
THOUGHT = ThoughtTokens(open_id=1, close_id=0, header_len=0)


def model_logits(prefix: tuple[int, ...]) -> list[float]:
    total = sum((i + 1) * (token + 1) for i, token in enumerate(prefix))
    return [((total * (3 + 2 * token) + token) % 11) / 3 - 1.5 for token in range(VOCAB)]


CASES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.3},
    "repetition": {"repetition_penalty": 1.7},
    "frequency": {"frequency_penalty": 0.9},
    "presence": {"presence_penalty": 1.1},
    "bias": {"logit_bias": ((0, 1.5), (2, -0.5))},
    "min_new_tokens": {"min_new_tokens": 3},
    "processor": {"processor": True},
    "thought": {"budget": 1},
    "all": {
        "temperature": 0.8, "top_k": 2, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.2,
        "frequency_penalty": 0.3, "presence_penalty": 0.2, "logit_bias": ((1, 0.4),), "min_new_tokens": 2,
        "processor": True,
    },
}  # fmt: skip


def split(case: dict[str, Any]) -> tuple[SamplingParams, bool, int | None]:
    values = dict(case)
    processor, budget = values.pop("processor", False), values.pop("budget", None)
    return SamplingParams(custom_params={"window": 1}, **values), processor, budget


def plain_probs(output: tuple[int, ...], case: dict[str, Any]) -> list[float]:
    """Of the token after prompt and output."""
    params, processor, budget = split(case)
    row = model_logits((*PROMPT, *output))
    for token in range(VOCAB):
        if token in (*PROMPT, *output):
            row[token] = (
                row[token] / params.repetition_penalty if row[token] > 0 else row[token] * params.repetition_penalty
            )
        count = output.count(token)
        row[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        row[token] += dict(params.logit_bias).get(token, 0.0)
    if len(output) < params.min_new_tokens:
        row[STOP] = -math.inf
    if processor and output:
        row[output[-1]] = -math.inf
    if budget is not None and thought_len(output) >= budget:
        row = [0.0 if token == THOUGHT.close_id else -math.inf for token in range(VOCAB)]
    exps = [math.exp(value / params.temperature) for value in row]
    probs = [e / sum(exps) for e in exps]
    order = sorted(range(VOCAB), key=lambda i: (-probs[i], i))
    kept = order[: params.top_k] if params.top_k > 0 else order
    nucleus, before = [], 0.0
    for token in kept:
        if not nucleus or before < params.top_p * sum(probs[i] for i in kept):
            nucleus.append(token)
        before += probs[token]
    left = [p if i in nucleus and p >= params.min_p * max(probs) else 0.0 for i, p in enumerate(probs)]
    return [p / sum(left) for p in left]


def thought_len(output: tuple[int, ...]) -> int:
    """Tokens of thoughts in the answer where one is open at its end, -1 where none is. The prompt leaves one open."""
    is_open, used = True, 0
    for token in output:
        if token == THOUGHT.open_id:
            is_open = True
        elif token == THOUGHT.close_id:
            is_open = False
        elif is_open:
            used += 1
    return used if is_open else -1


def plain(output: tuple[int, ...], case: dict[str, Any]) -> dict[tuple[int, ...], float]:
    """Every answer of ``LENGTH`` tokens that begins with ``output``, with its probability from there."""
    if len(output) >= LENGTH:
        return {output[:LENGTH]: 1.0}
    found: dict[tuple[int, ...], float] = {}
    for token, weight in enumerate(plain_probs(output, case)):
        for answer, rest in plain((*output, token), case).items() if weight else ():
            found[answer] = found.get(answer, 0.0) + weight * rest
    return found


def round_probs(nodes: list[int], parents: list[int] | None, case: dict[str, Any]) -> torch.Tensor:
    """[N, V]: what the engine draws from behind each node, node 0 the root."""
    params, processor, budget = split(case)
    req = Req("r", array("i", (*PROMPT, ROOT)), len(PROMPT), params, 99, frozenset({STOP}), 0, False, 0.0)
    req.logit_processor = NoRepeatAfter() if processor else None
    req.thought_budget = None if budget is None else ThoughtBudget(THOUGHT, budget, PROMPT[:1])
    above = parents or list(range(-1, len(nodes) - 1))
    paths: list[tuple[int, ...]] = [(ROOT,)]
    for node in range(1, len(nodes)):
        paths.append((*paths[above[node]], nodes[node]))
    logits = torch.tensor([model_logits((*PROMPT, *path)) for path in paths])
    apply_logit_controls(logits, [req], torch.tensor([nodes]), None if parents is None else torch.tensor([parents]))
    info = SamplingBatchInfo.from_params([params], [0], torch.device("cpu"))

    def rows(value: torch.Tensor | None) -> torch.Tensor | None:
        return None if value is None else value.expand(len(nodes))

    probs = filtered_probs(
        logits, info.temperatures.expand(len(nodes)), rows(info.top_ks), rows(info.top_ps), rows(info.min_ps)
    )
    return (probs / probs.sum(-1, keepdim=True)).double()


def emitted(nodes: list[int], parents: list[int] | None, case: dict[str, Any]) -> dict[tuple[int, ...], float]:
    probs, num = round_probs(nodes, parents, case), len(nodes)
    choices = torch.tensor(list(itertools.product(range(VOCAB), repeat=num)))
    weights = probs[torch.arange(num), choices].prod(dim=1).tolist()
    block = torch.tensor([nodes]).expand(len(choices), -1)
    if parents is None:
        lens, path = accept_chain(block, choices), torch.arange(num).expand(len(choices), -1)
    else:
        lens, path = accept_tree(block, choices, torch.tensor([parents]).expand(len(choices), -1), max_depth=2)
    runs = [row[:n] for row, n in zip(choices.gather(1, path).tolist(), lens.tolist(), strict=True)]
    found: dict[tuple[int, ...], float] = {}
    for run, weight in zip(runs, weights, strict=True):
        for answer, rest in plain((ROOT, *run), case).items() if weight else ():
            found[answer] = found.get(answer, 0.0) + weight * rest
    return found


@pytest.mark.parametrize("name", CASES)
def test_chain(name: str) -> None:
    expected = plain((ROOT,), CASES[name])
    for drafts in itertools.product(range(VOCAB), repeat=2):
        compare(emitted([ROOT, *drafts], None, CASES[name]), expected)


@pytest.mark.parametrize("name", CASES)
def test_tree(name: str) -> None:
    """Two branches behind the root, two behind the first of them, in an order in which nodes follow no node before."""
    expected = plain((ROOT,), CASES[name])
    for left, right in itertools.permutations(range(VOCAB), 2):
        for upper, lower in ((0, 1), (2, 0), (1, 2)):
            compare(emitted([ROOT, left, right, upper, lower], [0, 0, 0, 1, 1], CASES[name]), expected)


def compare(got: dict[tuple[int, ...], float], expected: dict[tuple[int, ...], float]) -> None:
    assert got.keys() == expected.keys()
    for answer, weight in expected.items():
        assert got[answer] == pytest.approx(weight, abs=2e-6)


def test_every_case_changes_the_distribution() -> None:
    bare = plain((ROOT,), {})
    assert all(plain((ROOT,), case) != bare for name, case in CASES.items() if name != "nothing")
