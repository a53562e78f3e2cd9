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
    pool.flush()
    expected = [[0] * 8, [0, 0, 40, 41, 42, 0, 0, 0], [0] * 8, [0] * 8]  # and the row of padding
    assert pool.req_to_token.dtype == torch.int32 and pool.host.dtype == np.int32
    assert pool.req_to_token.tolist() == pool.host.tolist() == expected


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_a_mirrored_table_shows_all_writes_at_the_next_flush(device: str) -> None:
    pool = ReqToTokenPool(2, 8, device, mirrored=True)
    rng = np.random.default_rng(0)
    rows = [pool.alloc(), pool.alloc()]
    for _ in range(5):
        seen = pool.req_to_token.clone()
        for _ in range(20):
            start = int(rng.integers(0, 8))
            slots = rng.integers(1, 1000, size=int(rng.integers(0, 9 - start)))
            pool.write(rows[int(rng.integers(2))], start, slots)
        assert torch.equal(pool.req_to_token, seen), "nothing is shown before the flush"
        pool.flush()
        assert pool.req_to_token.device.type == device
        assert np.array_equal(pool.req_to_token.cpu().numpy(), pool.host)
        assert not pool.host[pool.dummy_row].any() and pool.host[:2].any()


def test_a_flush_takes_writes_of_any_length() -> None:
    pool = ReqToTokenPool(2, 5000, "cpu", mirrored=True)
    row = pool.alloc()
    for length in (3, 5000, 1, 4000):
        pool.write(row, 0, np.arange(length) + length)
        pool.flush()
        assert np.array_equal(pool.req_to_token.numpy(), pool.host)


def test_nobody_writes_the_dummy_row() -> None:
    pool = ReqToTokenPool(2, 8, "cpu")
    with pytest.raises(AssertionError, match="not in use"):
        pool.write(pool.dummy_row, 0, np.array([1]))


@pytest.mark.parametrize("start", [-1, 7])
def test_a_write_stays_in_its_row(start: int) -> None:
    pool = ReqToTokenPool(2, 8, "cpu")
    row = pool.alloc()
    with pytest.raises(AssertionError, match="do not fit a row of 8"):
        pool.write(row, start, np.array([1, 2]))


def test_only_rows_in_use_are_written() -> None:
    with pytest.raises(AssertionError, match="not in use"):
        ReqToTokenPool(2, 8, "cpu").write(0, 0, np.array([1]))
