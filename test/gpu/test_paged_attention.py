"""Paged attention on a GPU: the shapes of the five model sizes, long contexts, graphs, bitwise repeatability."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fixtures.attention_cases import SIZES, Problem, attend, lengths_on_device, make_problem, pick
from sgl_kernel.paged_attention import HeadKind, paged_attention, plan_paged_attention

pytestmark = pytest.mark.cuda

BF16 = torch.bfloat16
TOLERANCE = {torch.float32: 2e-5, BF16: 1e-2, torch.float16: 2e-3}
KINDS = {
    f"{size} {'full' if window is None else 'sliding'}": HeadKind(heads, kv_heads, width, BF16, window)
    for size, kinds in SIZES.items()
    for heads, kv_heads, width, window in kinds
}
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
COMMITTED = (0, 1, 300, 1023, 2047, 9000)


def _check(problem: Problem) -> torch.Tensor:
    got = attend(problem)
    expected = problem.expected()
    error = float((got.float() - expected).norm() / expected.norm())
    assert error < TOLERANCE[problem.kind.dtype], (problem.kind, problem.rows.q_lens, error)
    return got


@pytest.mark.parametrize("num_rows", [1, 4, 6, 16])
@each_kind
def test_split(kind: HeadKind, num_rows: int) -> None:
    _check(make_problem(kind, COMMITTED, [num_rows] * len(COMMITTED), device="cuda"))
    if num_rows == 1:
        _check(make_problem(kind, COMMITTED, [1] * len(COMMITTED), device="cuda", drafting=True))


@pytest.mark.parametrize(
    "kind",
    [
        HeadKind(4, 1, 16, torch.float32, None),
        HeadKind(3, 3, 32, torch.float16, 100),
        HeadKind(16, 2, 64, BF16, None),
        HeadKind(16, 1, 128, torch.float32, 100),
        HeadKind(4, 2, 256, torch.float32, None),
        HeadKind(8, 1, 512, torch.float16, 100),
        HeadKind(8, 2, 512, torch.float32, None),
    ],
    ids=str,
)
def test_other_widths_and_dtypes(kind: HeadKind) -> None:
    _check(make_problem(kind, (0, 70, 333), [3] * 3, device="cuda"))
    _check(make_problem(kind, (0, 70, 333), [1, 200, 31], device="cuda", is_extend=True))


@each_kind
def test_long_context(kind: HeadKind) -> None:
    """128k keys; on full layers a window as wide would see the same."""
    _check(make_problem(kind, (131_000, 40_000), [4] * 2, device="cuda"))


@each_kind
def test_extend(kind: HeadKind) -> None:
    problem = make_problem(kind, (0, 5, 1500, 3000), (1, 700, 333, 2100), device="cuda", is_extend=True)
    got = _check(problem)
    for requests, keep in (([1], slice(None)), ([3, 2], slice(0, 150)), ([2, 3], slice(150, None)), ([0], slice(0, 1))):
        part, chosen = pick(problem, requests, keep)
        assert torch.equal(attend(part), got[chosen])


@pytest.mark.parametrize("kind", [*KINDS.values(), HeadKind(8, 2, 32, torch.float32, 70)], ids=[*KINDS, "tiny"])
def test_split_rows_do_not_depend_on_others(kind: HeadKind) -> None:
    """Bitwise: decode, verification of any width, alone or in a batch; and a plan for longer requests."""
    problem = make_problem(kind, COMMITTED, [6] * len(COMMITTED), device="cuda")
    got = attend(problem)
    for keep in (slice(0, 1), slice(2, 3), slice(5, 6), slice(1, 5), slice(0, 4)):
        part, chosen = pick(problem, range(len(COMMITTED)), keep)
        assert torch.equal(attend(part), got[chosen]), keep
    for b in range(len(COMMITTED)):
        part, chosen = pick(problem, [b])
        assert torch.equal(attend(part), got[chosen]), b
    assert torch.equal(attend(replace(problem, rows=replace(problem.rows, max_kv_len=131_072))), got)


@pytest.mark.parametrize("kind", [kind for name, kind in KINDS.items() if name.startswith(("e4b", "31b"))], ids=str)
def test_a_chain_as_a_tree_is_the_chain(kind: HeadKind) -> None:
    num_rows, batch = 4, len(COMMITTED)
    problem = make_problem(kind, COMMITTED, [num_rows] * batch, device="cuda")
    chain = torch.ones(batch, num_rows, num_rows, dtype=torch.uint8, device="cuda").tril()
    as_tree = replace(problem, rows=replace(problem.rows, tree_mask=chain))
    torch.testing.assert_close(attend(as_tree), attend(problem), rtol=2**-6, atol=2**-7)
    branches = chain.clone()
    branches[:, 2:, 1] = 0
    _check(replace(problem, rows=replace(problem.rows, tree_mask=branches)))


@each_kind
def test_hundred_runs_give_the_same_bytes(kind: HeadKind) -> None:
    for problem in (
        make_problem(kind, COMMITTED, [4] * len(COMMITTED), device="cuda"),
        make_problem(kind, (0, 700), (900, 300), device="cuda", is_extend=True),
    ):
        first = attend(problem)
        assert all(torch.equal(attend(problem), first) for _ in range(99))


@each_kind
def test_captured_with_later_lengths(kind: HeadKind) -> None:
    """A graph captured at one set of lengths serves any other, planning included."""
    batch, num_rows = 3, 4
    later = make_problem(kind, (5, 2500, 700), [num_rows] * batch, device="cuda", max_kv_len=4096)
    rows = replace(later.rows, kv_lens=torch.full_like(later.rows.kv_lens, num_rows))
    rows = replace(rows, positions=torch.arange(num_rows, device="cuda").repeat(batch))

    def run() -> torch.Tensor:
        work = plan_paged_attention(rows, kind)
        return paged_attention(later.q, later.key, later.value, rows, kind, work)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for problem in (later, pick(later, [1, 1, 0])[0]):
        rows.kv_lens.copy_(problem.rows.kv_lens)
        rows.positions.copy_(problem.rows.positions)
        rows.req_rows.copy_(problem.rows.req_rows)
        graph.replay()
        assert torch.equal(out, attend(replace(problem, q=later.q)))


@each_kind
def test_prompts_captured_with_later_lengths(kind: HeadKind) -> None:
    """As above, for prompts that share a number of rows; one of them may have all the rows, or none."""
    cases = [
        make_problem(kind, (5, 2500, 0), q_lens, device="cuda", is_extend=True, max_kv_len=4096)
        for q_lens in ((300, 512, 88), (1, 898, 1), (880, 4, 16))
    ]
    whole = lengths_on_device(cases[0])
    q, rows = whole.q, replace(whole.rows, req_to_token=torch.zeros(3, 4096, dtype=torch.int32, device="cuda"))
    assert rows.row_ends is not None
    num_slots = max(len(case.key) for case in cases)
    key, value = (torch.zeros(num_slots, *whole.key.shape[1:], dtype=kind.dtype, device="cuda") for _ in range(2))

    def run() -> torch.Tensor:
        return paged_attention(q, key, value, rows, kind, plan_paged_attention(rows, kind))

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for case in cases:
        later = lengths_on_device(case).rows
        assert later.row_ends is not None
        for mine, new in (
            (rows.req_to_token[:, : later.req_to_token.shape[1]], later.req_to_token),
            (rows.req_rows, later.req_rows),
            (rows.kv_lens, later.kv_lens),
            (rows.positions, later.positions),
            (rows.row_ends, later.row_ends),
            (q, case.q),
            (key[: len(case.key)], case.key),
            (value[: len(case.value)], case.value),
        ):
            mine.copy_(new)
        graph.replay()
        assert torch.equal(out, attend(case))
