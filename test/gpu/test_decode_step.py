"""The frame of a decode step on a GPU, at the widths of all models."""

from __future__ import annotations

import pytest
import torch

from fixtures.decode_step_cases import check_advance, check_place

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("num_rows", [1, 2, 4, 6, 16])
def test_place(num_rows: int) -> None:
    for batch in (1, 5, 32, 256):
        check_place("cuda", batch, num_rows, max_len=131072 if batch < 256 else 3000)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("num_rows", [1, 4, 6])
@pytest.mark.parametrize("width", [None, 1536, 2560, 2816, 3840, 5376])
def test_advance(num_rows: int, width: int | None, dtype: torch.dtype) -> None:
    for batch in (1, 5, 256):
        check_advance("cuda", batch, num_rows, width, dtype)
