"""Sampled drafts keep the target's distribution: the rule by enumeration, the draws by statistics."""

from __future__ import annotations

import math

import pytest
import torch

from sgl_kernel.rejection import count_accepted, draw_drafts, residual, sampling_distribution, verify_drafts
from sgl_kernel.sampling import sample
from sgl_kernel.spec_tree import accept_chain

VOCAB, NUM = 5, 120_000
CONTROLS = {
    "temperature": (1.0, None, None, None),
    "hot": (1.7, None, None, None),
    "top-k": (1.0, 2, None, None),
    "top-p": (0.8, None, 0.7, None),
    "min-p": (1.2, None, None, 0.3),
    "all": (0.9, 4, 0.9, 0.05),
}


def logits_of(prefix: tuple[int, ...], salt: int) -> list[float]:
    """Of a made-up model; ``salt`` tells target and assistant apart."""
    return [
        math.sin(1.0 + 3.1 * token + 1.7 * sum((i + 1) * t for i, t in enumerate(prefix)) + salt) * 1.5
        for token in range(VOCAB)
    ]


def distribution(prefix: tuple[int, ...], salt: int, control: str, *, edited: bool = False) -> torch.Tensor:
    """[V]. ``edited``: a bias, a penalty on what was emitted, and a forbidden token, as a grammar forbids it."""
    temperature, top_k, top_p, min_p = CONTROLS[control]
    logits = torch.tensor([logits_of(prefix, salt)])
    if edited:
        logits[0, 1] += 1.0
        for token in prefix:
            logits[0, token] -= 0.7
        logits[0, (len(prefix) + 2) % VOCAB] = float("-inf")
    probs = sampling_distribution(
        logits,
        torch.tensor([temperature]),
        None if top_k is None else torch.tensor([top_k]),
        None if top_p is None else torch.tensor([top_p]),
        None if min_p is None else torch.tensor([min_p]),
    )[0].double()
    return probs / probs.sum()


@pytest.mark.parametrize("edited", [False, True])
@pytest.mark.parametrize("control", CONTROLS)
def test_the_rule_by_enumeration(control: str, edited: bool) -> None:
    """sum over drafts of q(d) (min(1, p / q) [d] + (1 - min(1, p / q)) residual) is p."""
    for prefix in ((), (1,), (4, 2)):
        target, draft = distribution(prefix, 0, control, edited=edited), distribution(prefix, 1, control)
        emitted = torch.zeros(VOCAB, dtype=torch.float64)
        for token in range(VOCAB):
            if draft[token] == 0:
                continue
            accept = min(1.0, float(target[token] / draft[token]))
            emitted[token] += draft[token] * accept
            if accept < 1.0:
                rest = residual(target[None], draft[None], torch.tensor([token]))[0]
                emitted += draft[token] * (1.0 - accept) * rest / rest.sum()
        torch.testing.assert_close(emitted, target, atol=1e-12, rtol=0)


@pytest.mark.parametrize("edited", [False, True])
@pytest.mark.parametrize("control", CONTROLS)
def test_tokens_of_a_round_have_the_targets_distribution(control: str, edited: bool) -> None:
    """Two drafts by hash, over seeds; what is emitted, continued by plain draws, against the product of p."""
    seeds, start = torch.arange(NUM), 7

    def table(salt: int, *, edit: bool) -> torch.Tensor:
        """[V + 1, V + 1, V]: by the two tokens before, V for none."""
        rows = torch.zeros(VOCAB + 1, VOCAB + 1, VOCAB)
        for first in range(VOCAB + 1):
            for second in range(VOCAB + 1):
                prefix = tuple(t for t in (first, second) if t < VOCAB)
                rows[first, second] = distribution(prefix, salt, control, edited=edit).float()
        return rows

    target, draft = table(0, edit=edited), table(1, edit=False)
    none = torch.full((NUM,), VOCAB)
    at = [torch.full((NUM,), start + i) for i in range(3)]
    q0 = draft[none, none]
    first = draw_drafts(q0, seeds, at[0])
    q1 = draft[first, none]
    second = draw_drafts(q1, seeds, at[1])
    p = [target[none, none], target[first, none], target[first, second]]
    chain = torch.stack([torch.zeros_like(first), first, second], dim=1)
    of_target = torch.stack([p[0].gather(1, chain[:, 1:2])[:, 0], p[1].gather(1, chain[:, 2:])[:, 0]], dim=1)
    of_draft = torch.stack([q0.gather(1, chain[:, 1:2])[:, 0], q1.gather(1, chain[:, 2:])[:, 0]], dim=1)
    accepted = count_accepted(of_target, of_draft, seeds, torch.stack(at[:2], dim=1))
    request = torch.arange(NUM)
    rows_p, rows_q = torch.stack(p, dim=1), torch.stack([q0, q1, q1], dim=1)
    tokens = verify_drafts(
        rows_p[request, accepted], rows_q[request, accepted], chain, accepted, seeds, start + accepted
    )
    lens = accept_chain(chain, tokens)
    assert torch.equal(lens, accepted + 1), "whoever compares tokens finds the same number"
    assert set(lens.tolist()) == {1, 2, 3}
    # plain draws for positions the round did not reach
    full = tokens.clone()
    for position in (1, 2):
        before = [full[:, 0], none if position == 1 else full[:, 1]]
        fresh = sample(target[before[0], before[1]], seeds, at[position])
        full[:, position] = torch.where(lens > position, full[:, position], fresh)
    counts = torch.bincount((full[:, 0] * VOCAB + full[:, 1]) * VOCAB + full[:, 2], minlength=VOCAB**3).double()
    expected = torch.zeros(VOCAB**3, dtype=torch.float64)
    for a in range(VOCAB):
        for b in range(VOCAB):
            joint = target[VOCAB, VOCAB, a].double() * target[a, VOCAB, b].double() * target[a, b].double()
            expected[(a * VOCAB + b) * VOCAB :][:VOCAB] = joint * NUM
    assert counts[expected == 0].sum() == 0, "a token without probability was emitted"
    seen = expected > 5
    chi2, freedom = ((counts - expected)[seen] ** 2 / expected[seen]).sum(), int(seen.sum()) - 1
    # five standard deviations of a chi-square of that many degrees of freedom
    assert float(chi2) < freedom + 5 * math.sqrt(2 * freedom), (float(chi2), freedom)


def test_sampled_drafts_are_accepted_as_often_as_the_distributions_overlap() -> None:
    seeds, position = torch.arange(NUM), torch.full((NUM, 1), 3)
    target, draft = (distribution((), salt, "hot").float().expand(NUM, -1) for salt in (0, 1))
    drafts = draw_drafts(draft, seeds, position[:, 0])
    of_target, of_draft = target.gather(1, drafts[:, None]), draft.gather(1, drafts[:, None])
    share = count_accepted(of_target, of_draft, seeds, position).double().mean()
    overlap = torch.minimum(target[0], draft[0]).sum()
    assert abs(float(share) - float(overlap)) < 5 * 0.5 / math.sqrt(NUM)
    assert float(overlap) > float(target[0, draft[0].argmax()]) + 0.1, "or the best draft would do as well"


def test_drafts_equal_to_the_target_are_always_accepted() -> None:
    probs = torch.rand(1000, 3, generator=torch.Generator().manual_seed(1))
    seeds, positions = torch.arange(1000), torch.arange(3).expand(1000, -1)
    assert (count_accepted(probs, probs, seeds, positions) == 3).all()
    assert (count_accepted(torch.zeros_like(probs), probs, seeds, positions) == 0).all()


def test_a_rejected_token_does_not_come_back() -> None:
    """Also where rounding leaves nothing of p - q."""
    p = torch.tensor([[0.5, 0.3, 0.2]])
    assert residual(p, torch.tensor([[0.2, 0.6, 0.2]]), torch.tensor([1]))[0].tolist() == pytest.approx([0.3, 0, 0])
    assert residual(p, p, torch.tensor([0]))[0].tolist() == pytest.approx([0.0, 0.3, 0.2])
