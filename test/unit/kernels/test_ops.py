"""Reference ops against formulas written out."""

from __future__ import annotations

import math

import pytest
import torch

from sgl_kernel.activation import gelu_tanh_and_mul
from sgl_kernel.centroid_head import centroid_argmax, centroid_candidates
from sgl_kernel.moe import experts, route
from sgl_kernel.norm import rmsnorm, rmsnorm_add
from sgl_kernel.packed_linear import pack_weight, packed_linear
from sgl_kernel.rope import apply_rope, rope_tables


@pytest.mark.parametrize("shape", [(1, 256), (5, 64), (3, 4, 32)])
def test_rmsnorm(shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape) * 3, torch.randn(shape[-1])
    expected = x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(rmsnorm(x, None, 1e-6), expected)
    torch.testing.assert_close(rmsnorm(x, weight, 1e-6), expected * weight)
    residual = torch.randn(shape)
    torch.testing.assert_close(rmsnorm_add(x, weight, 1e-6, residual), residual + expected * weight)


def test_rmsnorm_of_tiny_values_keeps_epsilon_inside_the_mean() -> None:
    x = torch.full((1, 8), 1e-4)
    torch.testing.assert_close(rmsnorm(x, None, 1e-6), x / math.sqrt(1e-8 + 1e-6))


def test_rmsnorm_in_bf16_casts_once() -> None:
    x, weight = torch.randn(4, 128).bfloat16(), torch.randn(128).bfloat16()
    assert torch.equal(rmsnorm(x, weight, 1e-6), rmsnorm(x.float(), weight.float(), 1e-6).bfloat16())
    residual = torch.randn(4, 128).bfloat16()
    assert torch.equal(rmsnorm_add(x, weight, 1e-6, residual), residual + rmsnorm(x, weight, 1e-6))


def test_rope_pairs_dimension_j_with_j_plus_half() -> None:
    inv_freq = torch.tensor([1.0, 0.1, 0.0, 0.0])
    cos, sin = rope_tables(torch.tensor([3]), inv_freq, torch.float32)
    x = torch.randn(1, 2, 8)
    got = apply_rope(x, cos, sin)
    for j in range(4):
        angle = 3 * float(inv_freq[j])
        a, b = x[0, :, j], x[0, :, j + 4]
        torch.testing.assert_close(got[0, :, j], a * math.cos(angle) - b * math.sin(angle))
        torch.testing.assert_close(got[0, :, j + 4], b * math.cos(angle) + a * math.sin(angle))


def test_gated_gelu_takes_the_gate_first() -> None:
    x = torch.randn(3, 10)
    gate, up = x[:, :5], x[:, 5:]
    expected = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
    torch.testing.assert_close(gelu_tanh_and_mul(x), expected)


def test_experts_do_not_depend_on_the_batch_around() -> None:
    x, logits = torch.randn(9, 16), torch.randn(9, 6)
    scale, gate_up, down = torch.rand(6) + 0.5, torch.randn(6, 8, 16), torch.randn(6, 16, 4)
    weights, ids = route(logits, scale, 3)
    probs = torch.softmax(logits, -1)
    for row in range(9):
        best = probs[row].argsort(descending=True)[:3]
        expected = torch.zeros(16)
        for e in best.tolist():
            share = probs[row, e] / probs[row, best].sum() * scale[e]
            expected += share * (down[e] @ gelu_tanh_and_mul((gate_up[e] @ x[row])[None])[0])
        alone = experts(x[row : row + 1], weights[row : row + 1], ids[row : row + 1], gate_up, down)
        torch.testing.assert_close(alone[0], expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(experts(x, weights, ids, gate_up, down)[row], alone[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("batch", [1, 2, 9])
def test_centroid_head_is_the_best_token_of_the_best_clusters(batch: int) -> None:
    clusters, per, width, top_k = 8, 4, 16, 3
    order = torch.randperm(clusters * per)
    head, centroids = torch.randn(clusters * per, width), torch.randn(clusters, width)
    clustered = head[order].view(clusters, per, width)
    hidden = torch.randn(batch, width)
    got = centroid_argmax(hidden, centroids, clustered, order.view(clusters, per), top_k)
    for row in range(batch):
        best = (centroids @ hidden[row]).argsort(descending=True)[:top_k]
        allowed = order.view(clusters, per)[best].flatten()
        scores = head[allowed] @ hidden[row]
        assert got[row] == allowed[scores.argmax()]
    logits, found = centroid_candidates(hidden, centroids, clustered, top_k)
    assert logits.shape == (batch, top_k * per) and found.shape == (batch, top_k)


@pytest.mark.parametrize("rows", [1, 2, 5, 80, 300])
def test_packed_product_is_the_product(rows: int) -> None:
    weight, x = torch.randn(520, 256), torch.randn(rows, 256)  # no panels: not a multiple of 32
    packed = pack_weight(weight)
    assert packed is not None and packed.panels is None
    torch.testing.assert_close(packed_linear(x, packed), x @ weight.T, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("rows", [1, 5])
def test_odd_and_low_precision_weights_stay_plain(rows: int) -> None:
    weight, x = torch.randn(9, 8), torch.randn(rows, 8)
    packed = pack_weight(weight)
    assert packed is not None and packed.panels is None and packed.blocked is None
    torch.testing.assert_close(packed_linear(x, packed), x @ weight.T)
    assert pack_weight(torch.randn(512, 256).bfloat16()) is None
