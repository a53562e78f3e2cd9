"""Compiled CPU operators against their torch references, and rows that do not depend on the batch around them."""

from __future__ import annotations

import pytest
import torch

from sgl_kernel.activation import gelu_tanh_and_mul, gelu_tanh_and_mul_torch, gelu_tanh_mul, softcap_
from sgl_kernel.centroid_head import centroid_candidates
from sgl_kernel.decode_step import advance_rows, advance_rows_torch
from sgl_kernel.head_argmax import row_argmax
from sgl_kernel.head_norm_rope import head_norm_rope, head_norm_rope_torch
from sgl_kernel.norm import rmsnorm, rmsnorm_add, rmsnorm_add_rmsnorm, rmsnorm_torch
from sgl_kernel.packed_linear import PackedWeight, pack_weight, packed_linear, packed_linear_groups
from sgl_kernel.rope import rope_tables, rope_tables_torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.kv_pool import LayerKV
from sglang.srt.model_executor.forward_batch_info import AttnGeometry, HostLens

pytestmark = pytest.mark.usefixtures("need_compiler")


def test_small_numbers_stay_what_they_are() -> None:
    """Compiled with fast mathematics, yet the rest of the process keeps its denormals."""
    assert (torch.full((64,), 2.0**-140) * 1.5 > 0).all()


@pytest.mark.parametrize("rows", [*range(1, 17), 80, 301])
@pytest.mark.parametrize("shape", [(32, 2), (64, 48), (2048, 256), (96, 1024)])
@pytest.mark.parametrize("values", [torch.float32, torch.bfloat16])
def test_linear(values: torch.dtype, shape: tuple[int, int], rows: int) -> None:
    weight, x = torch.randn(shape).to(values).float(), torch.randn(rows, shape[1])
    packed = pack_weight(weight)
    assert packed is not None and packed.panels is not None and packed.panels.dtype is values
    got = packed_linear(x, packed)
    torch.testing.assert_close(got, x @ weight.T, atol=2e-4, rtol=1e-4)
    for row in range(rows):
        assert torch.equal(packed_linear(x[row : row + 1], packed)[0], got[row])


@pytest.mark.parametrize("rows", [1, 5, 6, 31])
def test_half_the_bytes_give_the_same_bits(rows: int) -> None:
    weight, x = torch.randn(96, 80).bfloat16().float(), torch.randn(rows, 80)
    packed = pack_weight(weight)
    assert packed is not None and packed.panels is not None
    assert packed.panels.nbytes == weight.nbytes // 2
    wide = PackedWeight(96, None, None, weight.view(3, 32, 80).transpose(1, 2).contiguous())
    assert torch.equal(packed_linear(x, packed), packed_linear(x, wide))
    groups = torch.tensor([[2, 0]] * rows)
    got = packed_linear_groups(x, packed, groups, 32)
    assert torch.equal(got, packed_linear(x, packed)[:, [*range(64, 96), *range(32)]])


@pytest.mark.parametrize("shape", [(1, 16), (5, 256), (3, 4, 32)])
def test_norms(shape: tuple[int, ...]) -> None:
    x, weight, residual = torch.randn(shape), torch.randn(shape[-1]), torch.randn(shape)
    torch.testing.assert_close(rmsnorm(x, weight, 1e-6), rmsnorm_torch(x, weight, 1e-6))
    total = residual + rmsnorm_torch(x, weight, 1e-6)
    torch.testing.assert_close(rmsnorm_add(x, weight, 1e-6, residual), total)
    got = rmsnorm_add_rmsnorm(x, weight, 1e-6, residual, weight + 1)
    torch.testing.assert_close(got, (total, rmsnorm_torch(total, weight + 1, 1e-6)))


@pytest.mark.parametrize(("num_in", "rotated", "values"), [(6, 5, 1), (5, 5, 1), (4, 4, 0), (12, 8, 4)])
@pytest.mark.parametrize("width", [16, 64, 128])
def test_head_norm_rope(num_in: int, rotated: int, values: int, width: int) -> None:
    heads, weights = torch.randn(7, num_in, width), torch.randn(rotated, width)
    cos, sin = rope_tables(torch.arange(7) * 11, torch.rand(width // 2), torch.float32)
    got = head_norm_rope(heads, weights, cos, sin, values, 1e-6)
    expected = head_norm_rope_torch(heads, weights, cos, sin, values, 1e-6)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("half", [8, 20, 64])
def test_rope_tables(half: int) -> None:
    positions = torch.cat([torch.arange(5), torch.tensor([513, 8191, 131_071])])
    inv_freq = 1.0 / 10_000.0 ** (torch.arange(half) / half)
    got, expected = (
        rope_tables(positions, inv_freq, torch.float32),
        rope_tables_torch(positions, inv_freq, torch.float32),
    )
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=0)
    for row in range(len(positions)):
        alone = rope_tables(positions[row : row + 1], inv_freq, torch.float32)
        assert all(torch.equal(one[0], many[row]) for one, many in zip(alone, got, strict=True))


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_gated_gelu(scale: float) -> None:
    gate_up = torch.randn(5, 2 * 48) * scale
    torch.testing.assert_close(gelu_tanh_and_mul(gate_up), gelu_tanh_and_mul_torch(gate_up), atol=1e-5, rtol=1e-5)
    apart = torch.randn(5, 3, 48)[:, 1]
    gate = gate_up[:, :48].contiguous()
    expected = gelu_tanh_and_mul_torch(torch.cat([gate, apart], -1))
    torch.testing.assert_close(gelu_tanh_mul(gate, apart), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 1, 5, 64])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (4, 2), (3, 3), (6, 2), (8, 1)])
@pytest.mark.parametrize("q_len", [1, 3, 16])
def test_attention(q_len: int, heads: int, kv_heads: int, window: int | None) -> None:
    """Ragged lengths, poisoned slots that nobody may read, drafts that stand behind their keys."""
    width, committed = 32, [1, 9, 70]
    generator = torch.Generator().manual_seed(1)
    table = (torch.randperm(300, generator=generator)).view(3, 100).to(torch.int32)[[2, 0, 1]]
    rows = torch.tensor([1, 2, 0])
    for drafting in (False, True):
        if drafting and (q_len > 1 or window == 1):
            continue
        kv_lens = tuple(n + (0 if drafting else q_len) for n in committed)
        positions = torch.cat([torch.arange(n, n + q_len) for n in committed])
        key, value = torch.full((300, kv_heads, width), float("nan")), torch.full((300, kv_heads, width), float("nan"))
        for row, n in zip(rows.tolist(), kv_lens, strict=True):
            used = table[row, :n].long()
            key[used] = torch.randn(n, kv_heads, width, generator=generator)
            value[used] = torch.randn(n, kv_heads, width, generator=generator)
        kv = LayerKV(0, key, value, torch.float32, window)
        q = torch.randn(3 * q_len, heads + 2, width, generator=generator)[:, :heads]
        geometry = AttnGeometry.from_host(rows, positions, (q_len,) * 3, HostLens(kv_lens, tuple(committed)))
        plans = [TorchNativeAttnBackend(table, compiled=c).init_forward_metadata(geometry) for c in (True, False)]
        got, expected = (plan.attend(q, kv) for plan in plans)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
        for b in range(3):
            host = HostLens(kv_lens[b : b + 1], (committed[b],))
            alone = AttnGeometry.from_host(rows[b : b + 1], positions[b * q_len :][:q_len], (q_len,), host)
            mine = q[b * q_len : (b + 1) * q_len]
            plan = TorchNativeAttnBackend(table).init_forward_metadata(alone)
            assert torch.equal(plan.attend(mine, kv), got[b * q_len : (b + 1) * q_len])


@pytest.mark.parametrize("cap", [5.0, 30.0])
def test_softcap(cap: float) -> None:
    logits = torch.cat([torch.randn(3, 70) * 20, torch.tensor([[-1e9, 1e9, 0.0, 1e-3] * 17 + [4.0, -4.0]])])
    expected = torch.tanh(logits / cap) * cap
    torch.testing.assert_close(softcap_(logits, cap), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("batch", [1, 2, 3, 9])
def test_centroid_candidates_of_a_packed_head(batch: int) -> None:
    clusters, per, width, top_k = 12, 64, 48, 4
    head, centroids, hidden = torch.randn(clusters, per, width), torch.randn(clusters, width), torch.randn(batch, width)
    expected = centroid_candidates(hidden, centroids, head, top_k)
    got = centroid_candidates(hidden, centroids, head, top_k, pack_weight(head.view(-1, width)))
    torch.testing.assert_close(got[0], expected[0], atol=1e-4, rtol=1e-4)
    assert torch.equal(got[1], expected[1])


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize(("batch", "num_rows"), [(1, 2), (3, 5), (7, 3)])
def test_chains_are_accepted(batch: int, num_rows: int, limited: bool, forced: bool) -> None:
    for seed in range(20):
        random = torch.Generator().manual_seed(seed)
        drafts, targets = torch.randint(0, 2, (2, batch, num_rows), generator=random)
        live = torch.randint(0, 2, (batch,), generator=random)
        lens = torch.randint(0, num_rows + 3, (batch,), generator=random) if forced else None
        limits = torch.randint(0, num_rows, (batch,), generator=random) if limited else None
        hidden = torch.randn(batch * num_rows, 16, generator=random)
        left = []
        for operator in advance_rows, advance_rows_torch:
            committed, bonus = torch.arange(batch) + 10, torch.zeros(batch, dtype=torch.int64)
            room = torch.zeros((batch, num_rows + 4), dtype=torch.int64)
            states = torch.zeros(batch, 16)
            result = room[:, : num_rows + 1]
            operator(drafts, targets, live, lens, limits, committed, bonus, result, hidden, states)
            left.append((committed, bonus, room, states))
        assert all(torch.equal(*pair) for pair in zip(*left, strict=True))


def test_argmax_of_equal_logits_is_the_lowest() -> None:
    logits = torch.randn(5, 100).round()
    values, ids = row_argmax(logits)
    assert torch.equal(values, logits.amax(dim=1))
    assert ids.tolist() == [row.tolist().index(max(row.tolist())) for row in logits]
