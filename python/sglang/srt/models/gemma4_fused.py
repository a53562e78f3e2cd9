"""Decoder layers as one compiled call, where a CPU computes a few rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sgl_kernel.cpu_ops import cpu_ops
from sgl_kernel.decoder_layers import DecoderLayers, LayerWeights
from sgl_kernel.packed_linear import PackedWeight
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.kv_pool import KVReader
from sglang.srt.models.gemma4_layers import Gemma4DecoderLayer


def fuse_layers(
    layers: Sequence[Gemma4DecoderLayer], following: Sequence[RMSNorm], kinds: Sequence[str], pool: KVReader
) -> DecoderLayers | None:
    """``layers`` over the buffers of ``pool``; None where a layer is of a kind, a type or a size that the compiled
    operator does not have, or there is no compiler. ``following``: the norm behind each layer; ``kinds``: the kinds of
    layers, in the order of their rope tables."""
    if cpu_ops() is None:
        return None
    weights = [_weights(layer, norm, kinds, pool) for layer, norm in zip(layers, following, strict=True)]
    made = [layer for layer in weights if layer is not None]
    return DecoderLayers(made, len(following[0].weight), following[0].eps) if len(made) == len(layers) else None


def _weights(
    layer: Gemma4DecoderLayer, following: RMSNorm, kinds: Sequence[str], pool: KVReader
) -> LayerWeights | None:
    attention, block = layer.self_attn, layer.per_layer_input
    if layer.sparse is not None or type(attention.attn) is not RadixAttention:
        return None
    kv = pool.layer(attention.attn.kv_layer_id)
    products = _products(layer)
    widths = (len(following.weight), attention.head_dim)
    if products is None or kv.dtype is not torch.float32 or any(width % 16 for width in widths):
        return None
    qkv, o, gate_up, down, *ple = products
    return LayerWeights(
        qkv=qkv,
        o=o,
        gate_up=gate_up,
        down=down,
        ple=(ple[0], ple[1]) if ple else None,
        head_weights=attention.head_weights,
        post_attention_norm=layer.post_attention_norm.weight,
        pre_mlp_norm=layer.pre_feedforward_norm.weight,
        post_mlp_norm=layer.post_feedforward_norm.weight,
        post_ple_norm=None if block is None else block.post_norm.weight,
        next_norm=following.weight,
        scale=layer.layer_scalar,
        key=kv.key,
        value=kv.value,
        owns_kv=attention.owns_kv,
        window=kv.window,
        rope=kinds.index(attention.kind),
    )


def _products(layer: Gemma4DecoderLayer) -> list[PackedWeight] | None:
    """The layer's matrices in panels, if all of them are, and whole."""
    products = [layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj]
    if layer.per_layer_input is not None:
        products += [layer.per_layer_input.gate, layer.per_layer_input.projection]
    packed = [product.whole_panels for product in products]
    return [weight for weight in packed if weight is not None] if None not in packed else None
