"""Sampling is exact: filters by hand, the race by statistics, acceptance by enumeration."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from sgl_kernel.sampling import exponential_noise, filtered_probs, sample
from sgl_kernel.spec_tree import accept_chain
from sglang.srt.layers.sampler import sample_tokens
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams

LOGITS = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0]])


def by_hand(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    """Plain Python: temperature, top-k, top-p over what is left, min-p; not renormalised."""
    exps = [math.exp(x / temperature) for x in logits]
    probs = [e / sum(exps) for e in exps]
    order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    kept = order[:top_k] if top_k > 0 else order
    total, before, nucleus = sum(probs[i] for i in kept), 0.0, []
    for i in kept:
        if before < top_p * total or not nucleus:
            nucleus.append(i)
        before += probs[i]
    best = probs[order[0]]
    return [p if i in nucleus and p >= min_p * best else 0.0 for i, p in enumerate(probs)]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [-1, 1, 3])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5, 1e-9])
@pytest.mark.parametrize("min_p", [0.0, 0.3, 1.0])
def test_filters(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    got = filtered_probs(
        LOGITS,
        torch.tensor([temperature]),
        None if top_k < 0 else torch.tensor([top_k]),
        None if top_p == 1.0 else torch.tensor([top_p]),
        None if min_p == 0.0 else torch.tensor([min_p]),
    )
    expected = torch.tensor([by_hand(LOGITS[0].tolist(), temperature, top_k, top_p, min_p)])
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


def draws(probs: torch.Tensor, num: int, seed: int = 3) -> torch.Tensor:
    """Relative frequencies over ``num`` positions of one seed."""
    tokens = sample(probs.expand(num, -1), torch.full((num,), seed), torch.arange(num))
    return torch.bincount(tokens, minlength=probs.shape[1]).double() / num


@pytest.mark.parametrize("seed", [0, 1, -5, 1 << 40])
def test_the_race_draws_from_the_distribution(seed: int) -> None:
    num = 200_000
    probs = torch.softmax(LOGITS, -1)
    error = (draws(probs, num, seed) - probs[0].double()).abs()
    limit = 5 * (probs[0].double() * (1 - probs[0].double()) / num).sqrt()  # five standard deviations
    assert bool((error < limit).all()), (error, limit)


def test_the_race_over_seeds_is_as_good_as_over_positions() -> None:
    num = 200_000
    probs = torch.softmax(LOGITS, -1)
    tokens = sample(probs.expand(num, -1), torch.arange(num), torch.full((num,), 17))
    error = (torch.bincount(tokens, minlength=5).double() / num - probs[0].double()).abs()
    assert float(error.max()) < 5 * 0.5 / math.sqrt(num)


def test_neighbouring_draws_are_independent() -> None:
    """Joint frequencies of the tokens at positions p and p + 1 are products of the marginal ones."""
    num = 200_000
    probs = torch.softmax(LOGITS, -1)
    tokens = sample(probs.expand(num, -1), torch.full((num,), 9), torch.arange(num))
    joint = torch.bincount(tokens[:-1] * 5 + tokens[1:], minlength=25).double().view(5, 5) / (num - 1)
    expected = probs[0].double()[:, None] * probs[0].double()[None, :]
    assert float((joint - expected).abs().max()) < 5 * 0.5 / math.sqrt(num)


def test_noise_is_exponential_and_keyed() -> None:
    ids = torch.arange(100_000)
    noise = exponential_noise(torch.tensor([5, 5, 6]), torch.tensor([1, 2, 1]), ids)
    assert bool((noise > 0).all()) and bool(noise.isfinite().all())
    assert abs(float(noise[0].mean()) - 1) < 0.02 and abs(float(noise[0].var()) - 1) < 0.05
    assert float(torch.corrcoef(noise).triu(1).abs().max()) < 0.02
    assert torch.equal(noise[1:2], exponential_noise(torch.tensor([5]), torch.tensor([2]), ids))


def test_noise_is_never_nothing() -> None:
    """Token 68100's hash starts with 24 ones: what it stands for must still be below 1, or p / 0 wins every race."""
    noise = exponential_noise(torch.tensor([7 - 3 * (1 << 33)]), torch.tensor([1039]), torch.arange(1 << 18))
    assert bool((noise > 0).all()) and int(noise.argmin()) == 68100


def test_a_removed_token_is_never_drawn() -> None:
    assert draws(torch.tensor([[0.5, 0.0, 0.5]]), 50_000)[1] == 0


def test_accept_chain_by_hand() -> None:
    drafts = torch.tensor([[9, 1, 2, 3], [9, 1, 2, 3], [9, 1, 2, 3], [9, 1, 2, 3]])
    target = torch.tensor([[1, 2, 3, 4], [5, 2, 3, 4], [1, 5, 3, 4], [1, 2, 5, 4]])
    assert accept_chain(drafts, target).tolist() == [4, 1, 2, 3]
    assert accept_chain(torch.tensor([[9]]), torch.tensor([[4]])).tolist() == [1]


@pytest.mark.parametrize("drafts", list(itertools.product(range(3), repeat=2)))
def test_distribution_of_a_round_by_enumeration(drafts: tuple[int, int]) -> None:
    """Every outcome of the target's choices, weighted with its probability: the emitted tokens, continued by plain
    decode to a fixed length, have exactly the target's own distribution, whatever was drafted."""
    length = 3

    def p(prefix: tuple[int, ...]) -> list[float]:
        weights = [1.0 + ((3 * sum(prefix) + 5 * len(prefix) + 7 * token) % 4) for token in range(3)]
        return [w / sum(weights) for w in weights]

    def plain(prefix: tuple[int, ...]) -> dict[tuple[int, ...], float]:
        if len(prefix) == length:
            return {prefix: 1.0}
        found: dict[tuple[int, ...], float] = {}
        for token, weight in enumerate(p(prefix)):
            for seq, rest in plain((*prefix, token)).items():
                found[seq] = found.get(seq, 0.0) + weight * rest
        return found

    chain = torch.tensor([[0, *drafts]])
    speculative: dict[tuple[int, ...], float] = {}
    rows = [drafts[:j] for j in range(length)]  # what the target saw before each row's choice
    for choice in itertools.product(range(3), repeat=length):
        weight = math.prod(p(row)[token] for row, token in zip(rows, choice, strict=True))
        gained = int(accept_chain(chain, torch.tensor([choice]))[0])
        for seq, rest in plain(choice[:gained]).items():
            speculative[seq] = speculative.get(seq, 0.0) + weight * rest
    expected = plain(())
    assert speculative.keys() == expected.keys()
    for seq, weight in expected.items():
        assert speculative[seq] == pytest.approx(weight, abs=1e-12)


def test_rows_of_a_block_draw_what_plain_rows_draw() -> None:
    """[B * N] rows of a verified block against the same rows one at a time."""
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.8, top_k=5),
        SamplingParams(temperature=1.2, top_p=0.7, min_p=0.01),
    ]
    seeds, width = [3, 4, 5], 4
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(len(params) * width, 50, generator=generator)
    positions = torch.arange(len(params) * width) * 7
    device = torch.device("cpu")
    block = sample_tokens(logits, SamplingBatchInfo.from_params(params, seeds, device), positions)
    for row in range(len(logits)):
        b = row // width
        info = SamplingBatchInfo.from_params(params[b : b + 1], seeds[b : b + 1], device)
        assert sample_tokens(logits[row : row + 1], info, positions[row : row + 1]).item() == block[row]
