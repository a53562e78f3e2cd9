"""Draft trees: which drafts they keep, who sees whom, what is accepted, and that a round keeps the distribution."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from fixtures.attention_cases import make_problem
from sgl_kernel.paged_attention import HeadKind, paged_attention_torch
from sgl_kernel.spec_tree import accept_chain, accept_tree, select_tree, tree_visibility
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.kv_pool import LayerKV
from sglang.srt.model_executor.forward_batch_info import AttnGeometry, HostLens

CHAIN = (0, 0, 1, 2)
BUSHY = (0, 0, 0, 1, 1, 2, 4)


def test_the_best_candidates_are_a_tree_below_the_root() -> None:
    """K = 2, two steps; the third child costs less than the second branch."""
    tokens = torch.tensor([[5, 6, 7, 8, 9, 3]])
    scores = torch.tensor([[-0.1, -2.0, -0.3, -0.9, -2.0, -9.0]])
    parents = torch.tensor([[-1, -1, 0, 0, 1, 1]])
    drafts, follows = select_tree(tokens, scores, parents, 3)
    assert drafts.tolist() == [[5, 7, 8]] and follows.tolist() == [[0, 1, 1]]
    drafts, follows = select_tree(tokens, scores, parents, 4)
    assert drafts.tolist() == [[5, 6, 7, 8]] and follows.tolist() == [[0, 0, 1, 1]], "of equal scores the parent"
    assert select_tree(tokens, scores, parents, 6)[1].tolist() == [[0, 0, 1, 1, 2, 2]]


def test_whoever_is_selected_has_its_parent_selected() -> None:
    generator = torch.Generator().manual_seed(4)
    k, batch, scores, parents = 3, 16, torch.zeros(16, 0), torch.zeros(16, 0, dtype=torch.int64)
    for num in (k, k * k, k * k, k * k):
        end, before = scores.shape[1], k if scores.shape[1] == k else k * k
        follows = (
            torch.randint(end - before, end, (batch, num), generator=generator) if end else torch.full((batch, k), -1)
        )
        above = scores.gather(1, follows) if end else torch.zeros(batch, k)
        # many gains are exactly zero: ties between parent and child
        scores = torch.cat((scores, above - torch.randint(0, 3, (batch, num), generator=generator)), dim=1)
        parents = torch.cat((parents, follows), dim=1)
    names = torch.arange(scores.shape[1]).expand(batch, -1)
    for num_nodes in (1, 4, 9, 20, 30):
        chosen, follows = select_tree(names, scores, parents, num_nodes)
        for b in range(batch):
            candidate_of = [-1, *chosen[b].tolist()]
            for node in range(1, num_nodes + 1):
                parent = int(follows[b, node - 1])
                assert parent < node and candidate_of[parent] == parents[b, candidate_of[node]]


def test_a_node_sees_its_ancestors() -> None:
    mask, depths = tree_visibility(torch.tensor([CHAIN, (0, 0, 0, 2)]), 3)
    assert mask[0].tolist() == torch.ones(4, 4).tril().bool().tolist()
    assert mask[1].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]
    assert depths.tolist() == [[0, 1, 2, 3], [0, 1, 1, 2]]


def test_the_walk_by_hand() -> None:
    """Node:      0 (root), 1 and 2 below it, 3 and 4 below 1, 5 below 2, 6 below 4."""
    drafts = torch.tensor([[9, 1, 2, 3, 4, 3, 5]]).expand(4, -1)
    target = torch.tensor(
        [
            [1, 4, 0, 0, 5, 0, 8],  # 1, then 4, then 5: the deepest path
            [2, 4, 3, 0, 5, 7, 8],  # the other branch of the root
            [7, 4, 3, 0, 5, 7, 8],  # nothing
            [1, 9, 3, 0, 5, 7, 8],  # 9 is the root's own token, which follows nobody
        ]
    )
    lens, path = accept_tree(drafts, target, torch.tensor([BUSHY]).expand(4, -1), 3)
    assert lens.tolist() == [4, 3, 1, 2]
    assert path.tolist() == [[0, 1, 4, 6], [0, 2, 5, 5], [0, 0, 0, 0], [0, 1, 1, 1]]


def test_a_tree_without_branches_is_a_chain() -> None:
    generator = torch.Generator().manual_seed(0)
    drafts, target = (torch.randint(0, 3, (200, 4), generator=generator) for _ in range(2))
    lens, path = accept_tree(drafts, target, torch.tensor(CHAIN).expand(200, -1), 3)
    assert torch.equal(lens, accept_chain(drafts, target)) and set(lens.tolist()) == {1, 2, 3, 4}
    run = target.gather(1, path)
    for row in range(200):
        assert run[row, : lens[row]].tolist() == target[row, : lens[row]].tolist()


def p(prefix: tuple[int, ...]) -> list[float]:
    weights = [1.0 + ((3 * sum(prefix) + 5 * len(prefix) + 7 * token) % 4) for token in range(3)]
    return [w / sum(weights) for w in weights]


def plain(prefix: tuple[int, ...], length: int) -> dict[tuple[int, ...], float]:
    if len(prefix) == length:
        return {prefix: 1.0}
    found: dict[tuple[int, ...], float] = {}
    for token, weight in enumerate(p(prefix)):
        for seq, rest in plain((*prefix, token), length).items():
            found[seq] = found.get(seq, 0.0) + weight * rest
    return found


@pytest.mark.parametrize(
    ("parents", "tokens"),
    [((0, 0, 0, 1), (0, 2, 1)), ((0, 0, 0, 1, 2), (0, 1, 2, 2)), ((0, 0, 0, 1, 1, 2), (2, 0, 0, 1, 1))],
)
def test_distribution_of_a_tree_round_by_enumeration(parents: Sequence[int], tokens: Sequence[int]) -> None:
    """Every outcome of the target's choices at all nodes, weighted: what is emitted, continued by plain decode, has the
    target's own distribution."""
    length, drafts = 3, (0, *tokens)
    prefixes: list[tuple[int, ...]] = [()]
    for node in range(1, len(parents)):
        prefixes.append((*prefixes[parents[node]], drafts[node]))
    choices = torch.tensor(list(itertools.product(range(3), repeat=len(parents))))
    lens, path = accept_tree(
        torch.tensor(drafts).expand(len(choices), -1), choices, torch.tensor(parents).expand(len(choices), -1), 2
    )
    runs = choices.gather(1, path)
    got: dict[tuple[int, ...], float] = {}
    for choice, run, gained in zip(choices.tolist(), runs.tolist(), lens.tolist(), strict=True):
        weight = math.prod(p(prefix)[token] for prefix, token in zip(prefixes, choice, strict=True))
        for seq, rest in plain(tuple(run[:gained]), length).items():
            got[seq] = got.get(seq, 0.0) + weight * rest
    expected = plain((), length)
    assert got.keys() == expected.keys() and max(lens.tolist()) == 3
    for seq, weight in expected.items():
        assert got[seq] == pytest.approx(weight, abs=1e-12)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("batch", [1, 3])
def test_attention_over_a_tree(batch: int, window: int | None, compiled: bool) -> None:
    """Against the reference; and a node is computed as if its path lay in consecutive slots: for the compiled operator
    bitwise, so that a tree changes no token."""
    committed, num = (9, 1, 80)[:batch], len(BUSHY)
    mask, depths = tree_visibility(torch.tensor(BUSHY).expand(batch, -1), 3)
    problem = make_problem(HeadKind(4, 2, 32, torch.float32, window), committed, [num] * batch, tree_mask=mask)
    rows, kv = problem.rows, LayerKV(0, problem.key, problem.value, torch.float32, window)
    positions = (torch.tensor(committed)[:, None] + depths).view(-1)
    lens = tuple(n + num for n in committed)
    host = HostLens(lens, committed)
    geometry = AttnGeometry(rows.req_rows, rows.kv_lens, positions, (num,) * batch, max(lens), host, tree_mask=mask)
    backend = TorchNativeAttnBackend(rows.req_to_token, compiled=compiled)
    got = backend.init_forward_metadata(geometry).attend(problem.q, kv)
    placed = replace(rows, positions=positions)
    expected = paged_attention_torch(problem.q, problem.key, problem.value, placed, window)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    for b in range(batch):
        for node in range(num):
            path = mask[b, node].nonzero()[:, 0]
            table = rows.req_to_token.clone()
            table[rows.req_rows[b], committed[b] : committed[b] + len(path)] = rows.req_to_token[
                rows.req_rows[b], committed[b] + path
            ]
            at, length = committed[b] + len(path) - 1, committed[b] + len(path)
            alone = AttnGeometry.from_host(
                rows.req_rows[b : b + 1], torch.tensor([at]), (1,), HostLens((length,), (at,))
            )
            plan = TorchNativeAttnBackend(table, compiled=compiled).init_forward_metadata(alone)
            row = plan.attend(problem.q[b * num + node : b * num + node + 1], kv)[0]
            if compiled:
                assert torch.equal(row, got[b * num + node])
            else:
                torch.testing.assert_close(row, got[b * num + node], atol=1e-5, rtol=1e-5)
