"""The reading side of a KV pool, as its own object: what a draft model is given.

The view keeps the layers and the geometry of a pool but no reference to the pool itself, so no writer can be
reached through it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, NoReturn, final

import torch

from sglang.srt.configs.model_config import KVLayout
from sglang.srt.mem_cache.kv_pool import KVReader, LayerKV, digest_layers


class FrozenKVWriteError(RuntimeError):
    """Somebody tried to write KV that is only borrowed."""


@final
@dataclass(frozen=True, slots=True, init=False, eq=False)
class ReadOnlyKVPool:
    """A ``KVReader`` over another pool's buffers. Asking it for a writer raises ``FrozenKVWriteError``."""

    layout: KVLayout
    dtype: torch.dtype
    size_tokens: int
    page_size: int
    _layers: Mapping[int, LayerKV] = field(repr=False)

    def __init__(self, pool: KVReader) -> None:
        layers = {spec.layer_id: pool.layer(spec.layer_id) for spec in pool.layout.layers}
        object.__setattr__(self, "layout", pool.layout)
        object.__setattr__(self, "dtype", pool.dtype)
        object.__setattr__(self, "size_tokens", pool.size_tokens)
        object.__setattr__(self, "page_size", pool.page_size)
        object.__setattr__(self, "_layers", MappingProxyType(layers))

    def layer(self, layer_id: int) -> LayerKV:
        return self._layers[layer_id]

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self._layers[layer_id].key

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self._layers[layer_id].value

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        kv = self._layers[layer_id]
        return kv.key, kv.value

    def digest(self) -> str:
        return digest_layers(self._layers[spec.layer_id] for spec in self.layout.owners)

    if not TYPE_CHECKING:  # hidden from the type checker, for which a writer must stay a plain missing attribute

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith(("set_", "store_", "norm_rope_store", "move_")):
                raise FrozenKVWriteError(
                    f"{name} was asked of a ReadOnlyKVPool: its KV is borrowed from the target model and only the "
                    "target's own layers may write it"
                )
            raise AttributeError(f"ReadOnlyKVPool has no attribute {name!r}")
