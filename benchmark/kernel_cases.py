"""What ``bench_kernels`` measures: one function per kernel family, yielding cases on the shapes of one pair.

A case says how to make its inputs, how to run the kernel and the vendor's nearest operation on them, and what the
kernel cannot avoid moving and computing. Adding a kernel is a function here and a line in ``FAMILIES``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from model_shapes import Pair, expected_distinct

from sgl_kernel.centroid_head import centroid_argmax
from sgl_kernel.head_argmax import head_argmax
from sgl_kernel.head_norm_rope import query_norm_rope
from sgl_kernel.kvcache import norm_rope_store
from sgl_kernel.linear import gate_up_gelu, gated_projection, linear, linear_parts
from sgl_kernel.moe import experts, route
from sgl_kernel.norm import add_norm
from sgl_kernel.rope import rope_tables
from sgl_kernel.sampling import choose_tokens
from sgl_kernel.spec_tree import accept_and_gather
from sglang.srt.configs.model_config import LayerKVSpec, TextConfig
from sglang.srt.configs.registries import ATTENTION_BACKENDS, load_entry
from sglang.srt.mem_cache.kv_pool import LayerKV
from sglang.srt.model_executor.forward_batch_info import AttnGeometry, HostLens
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams

Inputs = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel on one shape. ``num_bytes`` and ``flops`` are what it cannot avoid."""

    kernel: str
    batch: int
    context: int
    make: Callable[[], Inputs]
    run: Callable[..., object]
    num_bytes: float
    flops: float = 0.0
    vendor: Callable[..., object] | None = None


@dataclass(frozen=True, slots=True)
class Bench:
    """Where cases run: a pair's shapes, ``rows`` rows, a device and a type."""

    pair: Pair
    rows: int
    device: str
    dtype: torch.dtype
    contexts: tuple[int, ...]

    @property
    def text(self) -> TextConfig:
        return self.pair.target.text

    def rand(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Uniform, small enough that products of any width stay near 1."""
        bound = (3.0 / shape[-1]) ** 0.5
        return torch.empty(*shape, dtype=dtype or self.dtype, device=self.device).uniform_(-bound, bound)

    def ids(self, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, device=self.device)

    def arange(self, *args: int) -> torch.Tensor:
        return torch.arange(*args, device=self.device)


def layer_kinds(text: TextConfig) -> Iterator[tuple[str, LayerKVSpec]]:
    """One layer of each kind that differs in shape, named."""
    seen = set()
    for spec in text.kv_layout.layers:
        name = f"{'full' if spec.window is None else 'sliding'}{'' if spec.owns_kv else ' shared'}"
        if name not in seen:
            seen.add(name)
            yield name, spec


# ------------------------------------------------------------------------------------------------------------- products


def _products(bench: Bench) -> Iterator[tuple[str, int, int]]:
    """(name, out, in) of every product but gate and up."""
    text, draft = bench.text, bench.pair.assistant
    for name, spec in layer_kinds(text):
        kv_heads = 0 if not spec.owns_kv else spec.num_kv_heads
        values = 0 if text.attention_k_eq_v and spec.window is None else kv_heads
        yield f"qkv {name}", (text.num_heads + kv_heads + values) * spec.head_dim, text.hidden_size
        yield f"o {name}", text.hidden_size, text.num_heads * spec.head_dim
    for layer in (0, text.num_layers - 1):
        yield "down", text.hidden_size, text.mlp_width(layer)
    if text.per_layer_input_size:
        yield "per-layer gate", text.per_layer_input_size, text.hidden_size
        yield "per-layer context", text.num_layers * text.per_layer_input_size, text.hidden_size
    assert draft.assistant is not None
    yield "draft pre", draft.text.hidden_size, 2 * draft.assistant.backbone_hidden_size
    yield "draft post", draft.assistant.backbone_hidden_size, draft.text.hidden_size
    yield "draft down", draft.text.hidden_size, draft.text.intermediate_size


def _product(bench: Bench, name: str, n: int, k: int, run: Callable[..., object]) -> Case:
    return Case(
        f"{name} {n}x{k}",
        bench.rows,
        0,
        lambda: (bench.rand(bench.rows, k), bench.rand(n, k)),
        run,
        n * k * bench.dtype.itemsize,
        2.0 * bench.rows * n * k,
        vendor=F.linear,
    )


def linear_cases(bench: Bench) -> Iterator[Case]:
    text, draft, seen = bench.text, bench.pair.assistant.text, set()
    for name, n, k in _products(bench):
        if (n, k) not in seen:
            seen.add((n, k))
            yield _product(bench, name, n, k, linear_parts)
    widths = dict.fromkeys((text.mlp_width(0), text.mlp_width(text.num_layers - 1)))
    for width in widths:
        yield _product(bench, "gate+up", 2 * width, text.hidden_size, gate_up_gelu)
    yield _product(bench, "draft gate+up", 2 * draft.intermediate_size, draft.hidden_size, gate_up_gelu)
    yield _product(bench, "head", text.vocab_size, text.hidden_size, linear)


def per_layer_input_cases(bench: Bench) -> Iterator[Case]:
    width, hidden, rows = bench.text.per_layer_input_size, bench.text.hidden_size, bench.rows
    if width:
        yield Case(
            f"per-layer projection {hidden}x{width}",
            rows,
            0,
            lambda: (
                bench.rand(1, rows, width, dtype=torch.float32),
                bench.rand(rows, width),
                bench.rand(hidden, width),
            ),
            gated_projection,
            hidden * width * bench.dtype.itemsize,
            2.0 * rows * hidden * width,
        )


# ------------------------------------------------------------------------------------------------------ norms and heads


def norm_cases(bench: Bench) -> Iterator[Case]:
    hidden, rows, eps = bench.text.hidden_size, bench.rows, bench.text.rms_norm_eps

    def make() -> Inputs:
        return (
            bench.rand(2, rows, hidden, dtype=torch.float32),
            bench.rand(hidden),
            bench.rand(rows, hidden),
            bench.rand(hidden),
        )

    yield Case(
        f"parts, norm, add, norm {hidden}",
        rows,
        0,
        make,
        lambda x, weight, residual, following: add_norm(x, weight, eps, residual, None, (following,)),
        rows * hidden * (2 * 4 + 3 * bench.dtype.itemsize),
        vendor=lambda x, weight, residual, following: F.rms_norm(residual, (hidden,), weight, eps),
    )


def head_norm_cases(bench: Bench) -> Iterator[Case]:
    text, rows, eps = bench.text, bench.rows, bench.text.rms_norm_eps
    for name, spec in layer_kinds(text):
        width, kv = spec.head_dim, spec.num_kv_heads if spec.owns_kv else 0
        values = 0 if text.attention_k_eq_v and spec.window is None else kv
        heads = text.num_heads + kv + values

        def make(width: int = width, kv: int = kv, heads: int = heads) -> Inputs:
            cos, sin = rope_tables(bench.arange(rows), bench.rand(width // 2, dtype=torch.float32), bench.dtype)
            weights = bench.rand(text.num_heads + kv, width)
            merged = bench.rand(2, rows, heads, width, dtype=torch.float32)
            buffers = [bench.rand(1024, max(kv, 1), width) for _ in range(2)]
            return merged, weights, cos, sin, *buffers, bench.arange(rows) * 7

        def store(merged: Any, weights: Any, cos: Any, sin: Any, key: Any, value: Any, loc: Any) -> object:
            return norm_rope_store(key, value, loc, merged, weights, cos, sin, eps)

        def queries(merged: Any, weights: Any, cos: Any, sin: Any, *_: Any) -> object:
            return query_norm_rope(merged, weights, cos, sin, eps)

        moved = rows * heads * width * (2 * 4 + bench.dtype.itemsize)
        yield Case(f"head norm, rope, store {name}", rows, 0, make, store if kv else queries, moved)


# ------------------------------------------------------------------------------------------------------------ attention


def attention_cases(bench: Bench) -> Iterator[Case]:
    """Decode, verify with the default drafts, and a draft step, at each context; ``rows`` is the number of requests."""
    for context in bench.contexts:
        for name, spec in layer_kinds(bench.text):
            if spec.owns_kv:
                yield _attention(bench, f"decode {name}", spec, bench.text.num_heads, context, 1)
                yield _attention(bench, f"verify {name}", spec, bench.text.num_heads, context, bench.pair.num_steps + 1)
        for name, spec in layer_kinds(bench.pair.assistant.text):
            yield _attention(bench, f"draft {name}", spec, bench.pair.assistant.text.num_heads, context, 1)


def extend_cases(bench: Bench) -> Iterator[Case]:
    """A prompt of each context's length, for one request."""
    for context in bench.contexts:
        for name, spec in layer_kinds(bench.text):
            if spec.owns_kv and bench.rows == 1:
                yield _attention(bench, f"extend {name}", spec, bench.text.num_heads, context, context)


def _attention(bench: Bench, name: str, spec: LayerKVSpec, num_heads: int, context: int, rows: int) -> Case:
    batch, width, kv_heads = bench.rows, spec.head_dim, spec.num_kv_heads
    visible = context if spec.window is None else min(context, spec.window + rows - 1)
    per_row = context if spec.window is None else min(context, spec.window)
    pairs = (per_row * (per_row + 1) / 2 + (rows - per_row) * per_row) if rows >= per_row else rows * per_row

    def make() -> Inputs:
        slots = batch * context + 1
        key, value = bench.rand(slots, kv_heads, width), bench.rand(slots, kv_heads, width)
        table = bench.arange(1, slots).to(torch.int32).view(batch, context)
        backend = load_entry(ATTENTION_BACKENDS, "triton" if bench.device == "cuda" else "torch_native")(table)
        positions = bench.arange(context - rows, context).repeat(batch)
        requests, q_lens = bench.arange(batch), (rows,) * batch
        if rows == context:
            host = HostLens((context,) * batch, (0,) * batch)
            geometry = AttnGeometry.from_host(requests, positions, q_lens, host, is_extend=True)
        else:  # as in a captured step, which must fit any length
            lens = torch.full((batch,), context, device=bench.device)
            geometry = AttnGeometry(requests, lens, positions, q_lens, bench.text.max_position_embeddings, None)
        plan = backend.init_forward_metadata(geometry)
        return plan, bench.rand(batch * rows, num_heads, width), LayerKV(0, key, value, bench.dtype, spec.window)

    def vendor(plan: Any, q: torch.Tensor, kv: LayerKV) -> object:
        """Contiguous keys without a window: what it reads is no more than ``visible``."""
        k, v = (
            buffer[1:].view(batch, context, kv_heads, width)[:, -visible:].transpose(1, 2)
            for buffer in (kv.key, kv.value)
        )
        return F.scaled_dot_product_attention(
            q.view(batch, rows, num_heads, width).transpose(1, 2),
            k,
            v,
            scale=1.0,
            is_causal=rows == context,
            enable_gqa=True,
        )

    moved = batch * kv_heads * visible * 2 * width + 2 * batch * rows * num_heads * width
    flops = 4.0 * batch * num_heads * width * pairs
    # of a prompt the vendor's operation has no window, and for the widest heads it keeps the whole score matrix
    too_much = rows == context and (visible < context or width > 256)
    return Case(
        f"{name} {num_heads}/{kv_heads}x{width}",
        batch,
        context,
        make,
        lambda plan, q, kv: plan.attend(q, kv),
        moved * bench.dtype.itemsize,
        flops,
        vendor=None if too_much else vendor,
    )


# ----------------------------------------------------------------------------------------- experts, heads and sampling


def moe_cases(bench: Bench) -> Iterator[Case]:
    moe, hidden, rows = bench.text.moe, bench.text.hidden_size, bench.rows
    if moe is None:
        return
    num, width, top_k = moe.num_experts, moe.intermediate_size, moe.top_k

    def make() -> Inputs:
        weights, ids = route(
            bench.rand(rows, num, dtype=torch.float32) * 8, torch.ones(num, device=bench.device), top_k
        )
        return (
            bench.rand(rows, hidden),
            weights,
            ids,
            bench.rand(num, 2 * width, hidden),
            bench.rand(num, hidden, width),
        )

    touched = expected_distinct(num, top_k, rows)
    yield Case(
        f"experts {num}/{top_k}x{width}",
        rows,
        0,
        make,
        experts,
        touched * 3 * hidden * width * bench.dtype.itemsize,
        6.0 * rows * top_k * hidden * width,
    )
    yield Case(
        f"route {num}/{top_k}",
        rows,
        0,
        lambda: (bench.rand(rows, num, dtype=torch.float32), torch.ones(num, device=bench.device)),
        lambda logits, scale: route(logits, scale, top_k),
        rows * num * 4,
    )


def centroid_cases(bench: Bench) -> Iterator[Case]:
    draft, text = bench.pair.assistant.assistant, bench.pair.assistant.text
    assert draft is not None
    if not draft.num_centroids:
        return
    num, top_k, width = draft.num_centroids, draft.centroid_top_k, text.hidden_size
    per_cluster = text.vocab_size // num

    def make() -> Inputs:
        order = torch.randperm(text.vocab_size, device=bench.device)
        return bench.rand(bench.rows, width), bench.rand(num, width), bench.rand(num, per_cluster, width), order

    elements = (num + expected_distinct(num, top_k, bench.rows) * per_cluster) * width
    yield Case(
        f"centroid head {num}/{top_k}x{per_cluster}x{width}",
        bench.rows,
        0,
        make,
        lambda hidden, centroids, clustered, order: centroid_argmax(hidden, centroids, clustered, order, top_k),
        elements * bench.dtype.itemsize,
    )


def head_argmax_cases(bench: Bench) -> Iterator[Case]:
    """The fused head of greedy targets, and of the assistant where it is plain; the vendor writes rows of logits."""
    target, draft = bench.text, bench.pair.assistant
    assert draft.assistant is not None
    shapes = [("head argmax", target.vocab_size, target.hidden_size, target.final_logit_softcapping)]
    if not draft.assistant.num_centroids:
        shapes.append(("draft head argmax", draft.text.vocab_size, draft.text.hidden_size, None))
    for name, vocab, hidden, cap in shapes:
        product = _product(bench, name, vocab, hidden, partial(head_argmax, softcap=cap))
        yield replace(product, vendor=lambda x, weight: F.linear(x, weight).argmax(dim=-1))


def sampling_cases(bench: Bench) -> Iterator[Case]:
    """A token per row of logits: the vendor only takes the largest."""
    vocab, rows = bench.text.vocab_size, bench.rows
    controls = {
        "sample": SamplingParams(),
        "sample min-p": SamplingParams(min_p=0.05),
        "sample top-k, top-p": SamplingParams(top_k=64, top_p=0.95),
    }
    for name, params in controls.items():
        info = SamplingBatchInfo.from_params([params] * rows, list(range(rows)), torch.device(bench.device))
        filters = (info.top_ks, info.top_ps, info.min_ps)

        def choose(
            logits: Any, positions: Any, info: SamplingBatchInfo = info, filters: tuple[Any, ...] = filters
        ) -> object:
            return choose_tokens(logits, info.greedy, info.temperatures, info.seeds, positions, *filters)

        yield Case(
            f"{name} {vocab}",
            rows,
            0,
            lambda: (bench.rand(rows, vocab) * vocab**0.5, bench.arange(rows)),
            choose,
            rows * vocab * bench.dtype.itemsize,
            vendor=lambda logits, positions: logits.argmax(dim=-1),
        )


def accept_cases(bench: Bench) -> Iterator[Case]:
    rows, width, hidden = bench.rows, bench.pair.num_steps + 1, bench.text.hidden_size
    yield Case(
        f"accept {width}x{hidden}",
        rows,
        0,
        lambda: (bench.ids(2, rows, width), bench.ids(2, rows, width), bench.rand(rows * width, hidden)),
        accept_and_gather,
        2 * 8 * rows * width + 2 * rows * hidden * bench.dtype.itemsize,
    )


FAMILIES: Mapping[str, Callable[[Bench], Iterator[Case]]] = MappingProxyType(
    {
        "linear": linear_cases,
        "per_layer_input": per_layer_input_cases,
        "norm": norm_cases,
        "head_norm": head_norm_cases,
        "attention": attention_cases,
        "extend": extend_cases,
        "moe": moe_cases,
        "centroid": centroid_cases,
        "head_argmax": head_argmax_cases,
        "sampling": sampling_cases,
        "accept": accept_cases,
    }
)
