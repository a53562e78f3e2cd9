"""Every control on a vocabulary of three tokens: what a round emits has exactly the distribution of plain decode.

Plain decode is written here once more, in plain Python. A round is computed by the engine's own functions: all drafts,
all choices at all of its rows, weighted with their probabilities. Rounds with chains and with trees, whose drafts are
the best ones, and with chains of drawn drafts.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch

from fixtures.logit_processors import NoRepeatAfter
from sgl_kernel.rejection import residual, sampling_distribution
from sgl_kernel.spec_tree import accept_chain, accept_tree
from sglang.srt.layers.grammar_mask import apply_grammar_masks
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


def model_logits(prefix: tuple[int, ...], salt: int = 0) -> list[float]:
    """``salt`` tells target and assistant apart."""
    total = sum((i + 1) * (token + 1) for i, token in enumerate(prefix))
    return [((total * (3 + 2 * token) + token + 5 * salt) % 11) / 3 - 1.5 for token in range(VOCAB)]


class NeverTheNext:
    """A grammar: behind token t there is no t + 1."""

    is_terminated = False

    def __init__(self, output: tuple[int, ...]) -> None:
        self.output = list(output)

    def accept(self, token_id: int) -> bool:
        legal = token_id != (self.output[-1] + 1) % VOCAB
        if legal:
            self.output.append(token_id)
        return legal

    def fill_mask(self, masks: torch.Tensor, row: int) -> None:
        masks[row] = 0b111 & ~(1 << (self.output[-1] + 1) % VOCAB)

    def rollback(self, num_tokens: int) -> None:
        del self.output[-num_tokens:]


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
    "grammar": {"grammar": True},
    "grammar and the rest": {
        "grammar": True, "temperature": 0.7, "top_k": 2, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.4,
        "presence_penalty": 0.6, "logit_bias": ((0, 0.8),),
    },
    "all": {
        "temperature": 0.8, "top_k": 2, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.2,
        "frequency_penalty": 0.3, "presence_penalty": 0.2, "logit_bias": ((1, 0.4),), "min_new_tokens": 2,
        "processor": True,
    },
}  # fmt: skip


def params_of(case: dict[str, Any]) -> SamplingParams:
    values = {name: value for name, value in case.items() if name not in ("processor", "budget", "grammar")}
    return SamplingParams(custom_params={"window": 1}, **values)


def plain_probs(output: tuple[int, ...], case: dict[str, Any]) -> list[float]:
    """Of the token after prompt and output."""
    params, budget = params_of(case), case.get("budget")
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
    if "processor" in case and output:
        row[output[-1]] = -math.inf
    if "grammar" in case:
        row[(output[-1] + 1) % VOCAB] = -math.inf
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
    req = Req("r", array("i", (*PROMPT, ROOT)), len(PROMPT), params_of(case), 99, frozenset({STOP}), 0, False, 0.0)
    req.logit_processor = NoRepeatAfter() if "processor" in case else None
    req.thought_budget = ThoughtBudget(THOUGHT, case["budget"], PROMPT[:1]) if "budget" in case else None
    req.grammar = NeverTheNext((ROOT,)) if "grammar" in case else None  # type: ignore[assignment]
    above = parents or list(range(-1, len(nodes) - 1))
    paths: list[tuple[int, ...]] = [(ROOT,)]
    for node in range(1, len(nodes)):
        paths.append((*paths[above[node]], nodes[node]))
    logits = torch.tensor([model_logits((*PROMPT, *path)) for path in paths])
    tree = None if parents is None else torch.tensor([parents])
    apply_logit_controls(logits, [req], torch.tensor([nodes]), tree)
    apply_grammar_masks(logits, [req], torch.tensor([nodes]), tree)
    return distributions(logits, case)


def distributions(logits: torch.Tensor, case: dict[str, Any]) -> torch.Tensor:
    """[R, V]: what is drawn from, of target and assistant alike."""
    info = SamplingBatchInfo.from_params([params_of(case)], [0], torch.device("cpu"))

    def rows(value: torch.Tensor | None) -> torch.Tensor | None:
        return None if value is None else value.expand(len(logits))

    temperatures = info.temperatures.expand(len(logits))
    return sampling_distribution(logits, temperatures, rows(info.top_ks), rows(info.top_ps), rows(info.min_ps)).double()


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
    return continued(zip(runs, weights, strict=True), case)


def continued(runs: Iterable[tuple[Sequence[int], float]], case: dict[str, Any]) -> dict[tuple[int, ...], float]:
    """Runs with their probabilities, each gone on with by plain decode."""
    found: dict[tuple[int, ...], float] = {}
    for run, weight in runs:
        for answer, rest in plain((ROOT, *run), case).items() if weight else ():
            found[answer] = found.get(answer, 0.0) + weight * rest
    return found


def drawn_runs(case: dict[str, Any]) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every run of a round of two drawn drafts: a draft counts with probability min(1, p / q), and where one does not
    its place is drawn from what the engine has left of p."""
    for drafts in itertools.product(range(VOCAB), repeat=2):
        path = (*PROMPT, ROOT, *drafts)
        q = distributions(torch.tensor([model_logits(path[: 3 + j], salt=1) for j in range(2)]), case)
        p = round_probs([ROOT, *drafts], None, case)
        weight = float(q[0, drafts[0]] * q[1, drafts[1]])
        for j, draft in enumerate(drafts if weight else ()):
            accept = min(1.0, float(p[j, draft] / q[j, draft]))
            rest = residual(p[j : j + 1], q[j : j + 1], torch.tensor([draft]))[0]
            for token in range(VOCAB):
                # nothing is left where p is q, and then nothing is rejected
                share = float(rest[token] / rest.sum()) if accept < 1.0 else 0.0
                yield (*drafts[:j], token), weight * (1.0 - accept) * share
            weight *= accept
        for token in range(VOCAB):
            yield (*drafts, token), weight * float(p[2, token])


@pytest.mark.parametrize("name", CASES)
def test_chain_of_drawn_drafts(name: str) -> None:
    compare(continued(drawn_runs(CASES[name]), CASES[name]), plain((ROOT,), CASES[name]))


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
