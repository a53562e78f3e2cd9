"""Tiles of products of up to 32 rows, as measured best on an H200 for the weights of Gemma 4 and its assistants."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Tile:
    """BN rows of the weight by BK columns in a pipeline of ``stages``, by ``warps``; ``split`` parts along K."""

    bn: int
    bk: int
    stages: int
    warps: int
    split: int


# (rows of the weight, its columns, whether gate and up are paired) -> tile
TILES: Mapping[tuple[int, int, bool], Tile] = MappingProxyType({})
