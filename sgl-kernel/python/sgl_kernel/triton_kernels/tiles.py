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


# (rows of the weight, its columns, whether the product must come in one part) -> tile
TILES: Mapping[tuple[int, int, bool], Tile] = MappingProxyType(
    {
        (2560, 1536, False): Tile(64, 128, 4, 4, 3),
        (5120, 1536, False): Tile(128, 64, 4, 4, 3),
        (1536, 2048, False): Tile(64, 128, 5, 4, 4),
        (1536, 4096, False): Tile(64, 128, 5, 4, 4),
        (12288, 1536, True): Tile(128, 64, 6, 8, 1),
        (1536, 6144, False): Tile(64, 128, 5, 4, 4),
        (2048, 1536, False): Tile(64, 64, 8, 4, 4),
        (4096, 1536, False): Tile(64, 128, 6, 4, 2),
        (24576, 1536, True): Tile(128, 64, 4, 8, 1),
        (1536, 12288, False): Tile(64, 64, 6, 4, 8),
        (256, 1536, False): Tile(64, 64, 6, 4, 8),
        (8960, 1536, False): Tile(128, 64, 4, 4, 2),
        (3072, 2560, False): Tile(64, 128, 5, 4, 2),
        (6144, 2560, False): Tile(128, 64, 4, 4, 4),
        (2560, 2048, False): Tile(64, 64, 6, 4, 4),
        (2560, 4096, False): Tile(128, 64, 4, 4, 8),
        (20480, 2560, True): Tile(128, 64, 4, 8, 1),
        (2560, 10240, False): Tile(128, 64, 4, 4, 8),
        (2048, 2560, False): Tile(64, 128, 5, 4, 4),
        (4096, 2560, False): Tile(64, 128, 5, 4, 2),
        (256, 2560, False): Tile(64, 64, 6, 4, 8),
        (10752, 2560, False): Tile(128, 64, 4, 4, 2),
        (8192, 3840, False): Tile(128, 64, 6, 8, 2),
        (8704, 3840, False): Tile(128, 64, 4, 4, 2),
        (3840, 4096, False): Tile(64, 128, 5, 4, 2),
        (3840, 8192, False): Tile(128, 64, 6, 8, 4),
        (30720, 3840, True): Tile(128, 64, 8, 8, 1),
        (3840, 15360, False): Tile(128, 64, 6, 8, 4),
        (8192, 2816, False): Tile(128, 64, 6, 8, 2),
        (9216, 2816, False): Tile(128, 64, 4, 4, 2),
        (2816, 4096, False): Tile(64, 128, 5, 4, 2),
        (2816, 8192, False): Tile(128, 64, 4, 4, 8),
        (4224, 2816, True): Tile(64, 128, 6, 4, 1),
        (2816, 2112, False): Tile(64, 64, 8, 4, 3),
        (16384, 5376, False): Tile(128, 64, 6, 8, 1),
        (18432, 5376, False): Tile(128, 64, 4, 8, 1),
        (5376, 8192, False): Tile(128, 64, 4, 4, 4),
        (5376, 16384, False): Tile(128, 64, 4, 4, 4),
        (43008, 5376, True): Tile(128, 64, 8, 8, 1),
        (5376, 21504, False): Tile(128, 64, 6, 8, 3),
        (256, 3072, False): Tile(64, 128, 4, 4, 8),
        (1024, 256, False): Tile(64, 64, 6, 4, 2),
        (2048, 256, False): Tile(64, 64, 6, 4, 2),
        (256, 1024, False): Tile(64, 128, 3, 4, 8),
        (256, 2048, False): Tile(64, 128, 4, 4, 8),
        (4096, 256, True): Tile(64, 128, 6, 4, 1),
        (1536, 256, True): Tile(64, 128, 3, 4, 1),
        (256, 5120, False): Tile(64, 128, 6, 4, 8),
        (2560, 256, True): Tile(64, 64, 6, 4, 1),
        (1024, 7680, False): Tile(64, 64, 8, 4, 8),
        (4096, 1024, False): Tile(64, 128, 6, 4, 2),
        (8192, 1024, False): Tile(128, 64, 4, 4, 2),
        (1024, 4096, False): Tile(64, 128, 4, 4, 8),
        (1024, 8192, False): Tile(64, 128, 4, 4, 8),
        (16384, 1024, True): Tile(128, 64, 6, 8, 1),
        (3840, 1024, True): Tile(64, 128, 6, 4, 1),
        (1024, 5632, False): Tile(64, 64, 8, 4, 8),
        (2816, 1024, True): Tile(64, 128, 6, 4, 1),
        (1024, 10752, False): Tile(64, 64, 8, 4, 8),
        (16384, 1024, False): Tile(128, 64, 6, 8, 1),
        (1024, 16384, False): Tile(64, 128, 5, 4, 8),
        (5376, 1024, True): Tile(64, 128, 5, 4, 1),
    }
)
