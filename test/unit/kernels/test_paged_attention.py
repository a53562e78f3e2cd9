"""Paged attention: Triton kernels under the interpreter against the reference in float64, and row by row, bitwise."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fixtures.attention_cases import Problem, attend, lengths_on_device, make_problem, pick
from fixtures.interpreter import interpreted
from sgl_kernel.launch import triton_kernels
from sgl_kernel.paged_attention import HeadKind, PagedRows, paged_attention, plan_paged_attention
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.mem_cache.kv_pool import LayerKV
from sglang.srt.model_executor.forward_batch_info import AttnGeometry, HostLens

F32, F16 = torch.float32, torch.float16
KINDS = {
    "mqa": HeadKind(8, 1, 32, F32, None),
    "mqa sliding": HeadKind(8, 1, 32, F32, 70),
    "gqa": HeadKind(6, 2, 16, F32, None),
    "mha narrow window": HeadKind(2, 2, 64, F32, 3),
    "half": HeadKind(12, 1, 32, F16, 50),
}
COMMITTED = (0, 5, 64, 130)


def _check(problem: Problem) -> torch.Tensor:
    got = attend(problem)
    tolerance = 2e-3 if problem.kind.dtype is F16 else 2e-6
    torch.testing.assert_close(got.double(), problem.expected(), atol=tolerance, rtol=tolerance)
    return got


@interpreted
@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_split(kind: HeadKind, num_rows: int) -> None:
    problem = make_problem(kind, COMMITTED, [num_rows] * len(COMMITTED))
    got = _check(problem)
    if num_rows == 1:
        assert torch.equal(attend(problem, planned_just_now=False), got)


@interpreted
def test_split_over_chunks_of_growing_width() -> None:
    """Past the first bound of ``chunk_start``, and in a plan made for much longer requests, as in a captured graph."""
    kind = HeadKind(4, 2, 16, F32, None)
    problem = make_problem(kind, [2300, 7], [3] * 2)
    got = _check(problem)
    longer = replace(problem, rows=replace(problem.rows, max_kv_len=9000))
    assert torch.equal(attend(longer), got)


@interpreted
@pytest.mark.parametrize("width", [256, 512])
def test_wide_heads(width: int) -> None:
    kind = HeadKind(2, 1, width, F16, None)
    _check(make_problem(kind, [40, 3], [2, 2]))
    _check(make_problem(kind, [40, 3], [2, 7], is_extend=True))


@interpreted
@pytest.mark.parametrize("window", [None, 1, 2, 64])
def test_draft_stands_behind_its_keys(window: int | None) -> None:
    """One row at the first position without a key; a request without any key gets zeros."""
    problem = make_problem(HeadKind(4, 2, 32, F32, window), COMMITTED, [1] * len(COMMITTED), drafting=True)
    got = _check(problem)
    assert torch.equal(got[0], torch.zeros_like(got[0]))


@interpreted
@pytest.mark.parametrize("window", [None, 20])
def test_tree(window: int | None) -> None:
    """Branches hide from each other; the prefix is seen as without a tree."""
    num_rows = 5
    parents = (-1, 0, 0, 1, 2)
    mask = torch.zeros(num_rows, num_rows, dtype=torch.uint8)
    depths = []
    for row, parent in enumerate(parents):
        mask[row] = mask[parent] if parent >= 0 else 0
        mask[row, row] = 1
        depths.append(0 if parent < 0 else depths[parent] + 1)
    batch = len(COMMITTED)
    masks = mask.expand(batch, -1, -1).contiguous()
    problem = make_problem(HeadKind(4, 2, 16, F32, window), COMMITTED, [num_rows] * batch, tree_mask=masks)
    positions = (torch.tensor(COMMITTED)[:, None] + torch.tensor(depths)).view(-1)
    problem = replace(problem, rows=replace(problem.rows, positions=positions))
    got = _check(problem)
    chain = replace(problem.rows, tree_mask=torch.ones(batch, num_rows, num_rows, dtype=torch.uint8))
    assert not torch.equal(attend(replace(problem, rows=chain)), got)


@interpreted
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_split_rows_do_not_depend_on_others(kind: HeadKind) -> None:
    """Bitwise: a row of a verification is the decode of that row, and a request of a batch is the request alone."""
    problem = make_problem(kind, (0, 63, 100), [4] * 3)
    got = attend(problem)
    for requests, keep in ((range(3), slice(0, 1)), (range(3), slice(3, 4)), ([2, 1], slice(1, 4)), ([0], slice(None))):
        part, chosen = pick(problem, requests, keep)
        assert torch.equal(attend(part), got[chosen])


@interpreted
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_extend(kind: HeadKind) -> None:
    """Ragged prompts behind cached prefixes; however a prompt is cut, its rows come out bitwise alike."""
    problem = make_problem(kind, [0, 5, 100, 33], [1, 70, 40, 16], is_extend=True)
    got = _check(problem)
    for requests, keep in (([1], slice(None)), ([1, 2], slice(0, 23)), ([2, 1], slice(23, None)), ([0], slice(0, 1))):
        part, chosen = pick(problem, requests, keep)
        assert torch.equal(attend(part), got[chosen])


@interpreted
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_extend_of_lengths_that_only_the_device_knows(kind: HeadKind) -> None:
    """The same tiles in the same order, then some without rows; the same bytes. Requests without rows have no tile."""
    problem = make_problem(kind, [0, 5, 100, 33, 0], [1, 70, 40, 16, 9], is_extend=True)
    captured = lengths_on_device(problem)
    plan = triton_kernels("attention_extend").plan_extend
    expected, tiles = plan(problem.rows, kind).tiles, plan(captured.rows, kind).tiles
    assert len(tiles) > len(expected)
    assert torch.equal(tiles[: len(expected)], expected) and not tiles[len(expected) :].any()
    got = _check(captured)
    assert torch.equal(got, attend(problem))
    old = captured.rows
    assert old.row_ends is not None
    places = torch.tensor([2, 0, 0, 1, 1, 2, 3, 4, 4])
    ends = old.row_ends[places]
    ends[0] = 0
    gaps = replace(old, req_rows=old.req_rows[places], kv_lens=old.kv_lens[places], row_ends=ends)
    assert gaps.read_q_lens() == (0, 1, 0, 70, 0, 40, 16, 9, 0)
    assert torch.equal(attend(replace(captured, rows=gaps)), got)
    with pytest.raises(ValueError, match="for prompts of unknown lengths"):
        replace(old, q_lens=(136,))


@interpreted
def test_chunks_cover_every_position_once() -> None:
    """The widths grow at fixed positions, and the count is the inverse of the starts."""
    module = triton_kernels("paged_attention")
    for width in (64, 128):
        starts = [int(module.chunk_start.fn(index, width)) for index in range(300)]
        widths = {end - start for start, end in zip(starts, starts[1:], strict=False)}
        assert starts[0] == 0 and widths == {width, 4 * width, 8 * width, 16 * width}
        for length in (1, width - 1, width, width + 1, 2048, 2049, 8192, 8193, 32768, 32769, 131072):
            number = int(module.num_chunks.fn(length, width))
            assert starts[number - 1] < length <= starts[number]
        assert int(module.num_chunks.fn(0, width)) == 0


@interpreted
def test_refused_tensors_are_named() -> None:
    problem = make_problem(KINDS["gqa"], [3], [1])
    with pytest.raises(ValueError, match="q must be"):
        attend(replace(problem, q=problem.q.transpose(1, 2).contiguous().transpose(1, 2)))
    with pytest.raises(ValueError, match="value must be"):
        attend(replace(problem, value=problem.value[:, :1]))
    with pytest.raises(ValueError, match="key is torch.float16"):
        attend(replace(problem, key=problem.key.half()))
    with pytest.raises(ValueError, match="q has 2 rows"):
        attend(replace(problem, q=problem.q.repeat(2, 1, 1)))


def test_refused_kinds_and_rows() -> None:
    with pytest.raises(ValueError, match="head width 24"):
        HeadKind(4, 2, 24, F32, None)
    with pytest.raises(ValueError, match="float64"):
        HeadKind(4, 2, 32, torch.float64, None)
    with pytest.raises(ValueError, match="5 query heads over 2"):
        HeadKind(5, 2, 32, F32, None)
    rows = make_problem(KINDS["gqa"], [3, 4], [2, 2]).rows
    with pytest.raises(ValueError, match="unless they are prompts"):
        replace(rows, q_lens=(1, 3))
    with pytest.raises(ValueError, match="tree mask"):
        replace(rows, tree_mask=torch.ones(2, 3, 3, dtype=torch.uint8))


@pytest.mark.parametrize("window", [None, 1, 9, 70])
@pytest.mark.parametrize("q_lens", [(1, 1, 1), (4, 4, 4), (1, 30, 3)])
def test_reference_and_backend_agree_with_torch_native(q_lens: tuple[int, ...], window: int | None) -> None:
    """On a CPU the backend runs the reference, which two independent implementations have to agree on."""
    committed = (0, 9, 80)
    problem = make_problem(HeadKind(6, 2, 32, F32, window), committed, q_lens, is_extend=len(set(q_lens)) > 1)
    rows = problem.rows
    host = HostLens(tuple(n + q for n, q in zip(committed, q_lens, strict=True)), committed)
    geometry = AttnGeometry.from_host(rows.req_rows, rows.positions, q_lens, host)
    kv = LayerKV(0, problem.key, problem.value, F32, window)
    backends = TritonAttnBackend(rows.req_to_token), TorchNativeAttnBackend(rows.req_to_token, compiled=False)
    got, expected = (backend.init_forward_metadata(geometry).attend(problem.q, kv) for backend in backends)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert plan_paged_attention(rows, problem.kind) is None
    ends = torch.tensor(q_lens).cumsum(0)
    blind = replace(geometry, q_lens_cpu=(), host=None, is_extend=True, row_ends=ends)
    for backend, known in zip(backends, (got, expected), strict=True):
        assert torch.equal(backend.init_forward_metadata(blind).attend(problem.q, kv), known)


def test_rows_of_a_geometry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode steps are split; prompts are not, even where all happen to be short and equally long."""
    seen: list[PagedRows] = []

    def record(q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: PagedRows, *_: object) -> torch.Tensor:
        seen.append(rows)
        return q

    monkeypatch.setattr("sglang.srt.layers.attention.triton_backend.paged_attention", record)
    problem = make_problem(KINDS["gqa"], [3, 4], [2, 2])
    rows, kv = problem.rows, LayerKV(0, problem.key, problem.value, F32, None)
    mask = torch.ones(2, 2, 2, dtype=torch.uint8)
    for q_lens, is_extend, tree in (((2, 2), False, mask), ((2, 2), True, None), ((1, 3), False, None)):
        geometry = AttnGeometry(rows.req_rows, rows.kv_lens, rows.positions, q_lens, 6, None, is_extend, tree)
        TritonAttnBackend(rows.req_to_token).init_forward_metadata(geometry).attend(problem.q, kv)
    assert [r.is_extend for r in seen] == [False, True, True]
    assert seen[0].tree_mask is mask and seen[0].max_kv_len == 6


def test_public_op_takes_the_reference_on_a_cpu() -> None:
    problem = make_problem(KINDS["mqa sliding"], COMMITTED, [2] * len(COMMITTED))
    got = paged_attention(problem.q, problem.key, problem.value, problem.rows, problem.kind, None)
    torch.testing.assert_close(got.double(), problem.expected(), atol=2e-6, rtol=2e-6)
