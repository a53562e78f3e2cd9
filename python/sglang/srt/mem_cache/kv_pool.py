"""The buffers that hold keys and values, and the reading side of them.

A *slot* is the place of one token in every layer's buffers; a *page* is ``page_size`` consecutive slots:

    slot   0 .. page_size-1      page_size .. size_tokens+page_size-1
           | dummy page       |  | pages 1 .. size_tokens/page_size  |
             padding rows        owned by requests or the prefix cache
             write here,
             nobody reads

Whoever only reads asks for a ``KVReader``; only a ``KVCache`` can write.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from sgl_kernel.kvcache import norm_rope_store, store_kv
from sglang.srt.configs.model_config import KVLayout, LayerKVSpec


@dataclass(frozen=True, slots=True, eq=False)
class LayerKV:
    """One physical layer's buffers together with all that is needed to interpret them.

    ``key``, ``value``: [slots, KH, D]. ``k_scale``, ``v_scale``: the stored value times the scale is the real one.
    ``window``: attention span in tokens, None for full attention. ``layer_id``: the layer that owns the buffers.
    """

    layer_id: int
    key: torch.Tensor
    value: torch.Tensor
    dtype: torch.dtype
    window: int | None
    k_scale: float = 1.0
    v_scale: float = 1.0


class KVReader(Protocol):
    """What a borrower of KV may do: look. Every ``layer_id`` may be a sharing layer; it resolves to its owner."""

    @property
    def layout(self) -> KVLayout: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def size_tokens(self) -> int: ...

    @property
    def page_size(self) -> int: ...

    def layer(self, layer_id: int) -> LayerKV:
        """Buffers and interpretation; the same object on every call. KeyError for an unknown layer."""
        ...

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """[slots, KH, D]."""
        ...

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """[slots, KH, D]."""
        ...

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]: ...

    def digest(self) -> str:
        """Bitwise digest of every buffer, the dummy page included: equal digests mean nothing was written between."""
        ...


class KVCache(ABC):
    """A pool that can be written. Satisfies ``KVReader``; never handed to a borrower."""

    def __init__(self, layout: KVLayout, size_tokens: int, page_size: int, dtype: torch.dtype) -> None:
        assert page_size >= 1, f"{page_size=}"
        assert size_tokens >= page_size and size_tokens % page_size == 0, (
            f"{size_tokens=} is not whole pages of {page_size}"
        )
        self.layout = layout
        self.size_tokens = size_tokens
        self.page_size = page_size
        self.dtype = dtype

    @abstractmethod
    def layer(self, layer_id: int) -> LayerKV: ...

    @abstractmethod
    def set_kv_buffer(self, layer_id: int, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store ``k``, ``v`` [T, KH, D] at slots ``loc`` [T] int64 of a layer that owns its KV."""

    @abstractmethod
    def norm_rope_store(
        self,
        layer_id: int,
        loc: torch.Tensor,
        heads: torch.Tensor,
        weights: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        """``set_kv_buffer`` straight from a merged projection; the queries. See ``sgl_kernel.kvcache``."""

    def move_slots(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """In every layer, what is in slots ``source`` [T] int64 before the call is in slots ``target`` [T] after it."""
        for spec in self.layout.owners:
            kv = self.layer(spec.layer_id)
            self.set_kv_buffer(spec.layer_id, target, kv.key[source], kv.value[source])

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.layer(layer_id).key

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.layer(layer_id).value

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        kv = self.layer(layer_id)
        return kv.key, kv.value

    def digest(self) -> str:
        return digest_layers(self.layer(spec.layer_id) for spec in self.layout.owners)


class MHATokenToKVPool(KVCache):
    """Uniform pool: every owning layer has ``size_tokens`` slots and the dummy page, in its own head geometry.

    Buffers start as zeros, live as long as the pool and never move, so a ``LayerKV`` stays good.
    """

    def __init__(
        self, layout: KVLayout, size_tokens: int, page_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__(layout, size_tokens, page_size, dtype)
        slots = size_tokens + page_size
        owned = {spec.layer_id: _allocate(spec, slots, dtype, device) for spec in layout.owners}
        self._layers: dict[int, LayerKV] = {}
        for spec in layout.layers:
            kv = owned[spec.owner]
            expected = (spec.num_kv_heads, spec.head_dim, spec.window)
            assert (*kv.key.shape[1:], kv.window) == expected, (
                f"layer {spec.layer_id} cannot share layer {spec.owner}'s KV"
            )
            self._layers[spec.layer_id] = kv

    @property
    def bytes_per_token(self) -> int:
        return self.layout.elements_per_token * self.dtype.itemsize

    @property
    def bytes_total(self) -> int:
        """All buffers, the dummy page included."""
        return self.bytes_per_token * (self.size_tokens + self.page_size)

    def layer(self, layer_id: int) -> LayerKV:
        return self._layers[layer_id]

    def set_kv_buffer(self, layer_id: int, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        kv = self._owned(layer_id)
        store_kv(kv.key, kv.value, loc, k, v)

    def norm_rope_store(
        self,
        layer_id: int,
        loc: torch.Tensor,
        heads: torch.Tensor,
        weights: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        kv = self._owned(layer_id)
        return norm_rope_store(kv.key, kv.value, loc, heads, weights, cos, sin, eps)

    def _owned(self, layer_id: int) -> LayerKV:
        kv = self._layers[layer_id]
        assert kv.layer_id == layer_id, f"layer {layer_id} reads layer {kv.layer_id}'s KV and owns none to write"
        return kv


def digest_layers(layers: Iterator[LayerKV]) -> str:
    """Bitwise digest of the buffers of these layers, in order (hexadecimal)."""
    digest = hashlib.blake2b(digest_size=16)
    for kv in layers:
        for buffer in (kv.key, kv.value):
            digest.update(buffer.view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()


def _allocate(spec: LayerKVSpec, slots: int, dtype: torch.dtype, device: torch.device | str) -> LayerKV:
    shape = (slots, spec.num_kv_heads, spec.head_dim)
    key, value = _zeros(shape, dtype, torch.device(device)), _zeros(shape, dtype, torch.device(device))
    return LayerKV(spec.layer_id, key, value, dtype, spec.window)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU as pages the system hands out when first touched, so that an unused pool costs nothing."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
