from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang.srt.mem_cache.req_to_token import ReqToTokenPool


def test_rows_are_given_out_once_in_a_fixed_order() -> None:
    pool = ReqToTokenPool(3, 8, "cpu")
    assert [pool.alloc() for _ in range(4)] == [0, 1, 2, None]
    pool.free(1)
    pool.free(0)
    assert pool.available == 2
    assert [pool.alloc() for _ in range(3)] == [0, 1, None]


def test_a_row_is_freed_once() -> None:
    pool = ReqToTokenPool(3, 8, "cpu")
    row = pool.alloc()
    pool.free(row)
    with pytest.raises(AssertionError, match="row 0 is freed but not in use"):
        pool.free(row)


def test_host_and_device_show_the_same_table() -> None:
    pool = ReqToTokenPool(3, 8, "cpu")
    pool.alloc()
    row = pool.alloc()
    pool.write(row, 2, np.array([40, 41, 42], dtype=np.int64))
    pool.write(row, 0, np.empty(0, dtype=np.int64))
    expected = [[0] * 8, [0, 0, 40, 41, 42, 0, 0, 0], [0] * 8]
    assert pool.req_to_token.dtype == torch.int32 and pool.host.dtype == np.int32
    assert pool.req_to_token.tolist() == pool.host.tolist() == expected


@pytest.mark.cuda
def test_a_device_table_is_kept_equal() -> None:
    pool = ReqToTokenPool(2, 8, "cuda")
    pool.write(pool.alloc(), 3, np.array([7, 8], dtype=np.int64))
    assert pool.req_to_token.is_cuda
    assert pool.req_to_token.cpu().tolist() == pool.host.tolist() == [[0, 0, 0, 7, 8, 0, 0, 0], [0] * 8]


@pytest.mark.parametrize("start", [-1, 7])
def test_a_write_stays_in_its_row(start: int) -> None:
    pool = ReqToTokenPool(2, 8, "cpu")
    row = pool.alloc()
    with pytest.raises(AssertionError, match="do not fit a row of 8"):
        pool.write(row, start, np.array([1, 2]))


def test_only_rows_in_use_are_written() -> None:
    with pytest.raises(AssertionError, match="not in use"):
        ReqToTokenPool(2, 8, "cpu").write(0, 0, np.array([1]))
