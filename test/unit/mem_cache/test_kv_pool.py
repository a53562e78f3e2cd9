from __future__ import annotations

import pytest
import torch

from sglang.srt.configs.model_config import FULL, KVLayout, LayerKVSpec
from sglang.srt.mem_cache.kv_manager import KVCacheManager
from sglang.srt.mem_cache.kv_pool import KVReader, MHATokenToKVPool
from sglang.srt.mem_cache.req_to_token import ReqToTokenPool

from .kv_cases import FULL_SPEC, OWNERS, SHARING, SLIDING_SPEC, make_layout, make_pool, random_kv


def test_only_owners_have_buffers_in_their_own_geometry() -> None:
    pool = make_pool(size_tokens=32, page_size=4)
    for layer_id in (*OWNERS, *SHARING):
        kv = pool.layer(layer_id)
        _, heads, dim, window = FULL_SPEC if layer_id % 2 else SLIDING_SPEC
        assert kv.key.shape == kv.value.shape == (36, heads, dim)
        assert (kv.window, kv.dtype, kv.k_scale, kv.v_scale) == (window, torch.float32, 1.0, 1.0)
        assert kv.layer_id == SHARING.get(layer_id, layer_id)
        assert pool.layer(layer_id) is kv
    storages = {buffer.data_ptr() for i in (*OWNERS, *SHARING) for buffer in pool.get_kv_buffer(i)}
    assert len(storages) == 2 * len(OWNERS)
    assert pool.layer(4) is pool.layer(2) and pool.layer(5) is pool.layer(3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_what_the_buffers_occupy(dtype: torch.dtype) -> None:
    pool = make_pool(size_tokens=32, page_size=4, dtype=dtype)
    occupied = sum(buffer.nbytes for i in OWNERS for buffer in pool.get_kv_buffer(i))
    assert pool.bytes_total == occupied
    assert pool.bytes_per_token * 36 == occupied
    assert pool.bytes_per_token == 2 * dtype.itemsize * (2 * 2 * 4 + 2 * 1 * 8)


def test_reading_functions_agree_and_start_as_zeros() -> None:
    pool: KVReader = make_pool()
    for layer_id in (*OWNERS, *SHARING):
        key, value = pool.get_kv_buffer(layer_id)
        assert key is pool.get_key_buffer(layer_id) is pool.layer(layer_id).key
        assert value is pool.get_value_buffer(layer_id) is pool.layer(layer_id).value
        assert not key.any() and not value.any()


@pytest.mark.parametrize("layer_id", [-1, 6])
def test_an_unknown_layer_is_an_error(layer_id: int) -> None:
    with pytest.raises(KeyError):
        make_pool().layer(layer_id)


def test_a_write_reaches_its_layer_and_those_that_share_it() -> None:
    pool = make_pool()
    loc = torch.tensor([5, 9])
    k, v = random_kv(pool, 2, 2)
    pool.set_kv_buffer(2, loc, k, v)
    assert torch.equal(pool.get_key_buffer(4)[loc], k) and torch.equal(pool.get_value_buffer(4)[loc], v)
    assert not any(buffer.any() for i in (0, 1, 3) for buffer in pool.get_kv_buffer(i))


def test_a_sharing_layer_cannot_write() -> None:
    pool = make_pool()
    k, v = random_kv(pool, 4, 1)
    with pytest.raises(AssertionError, match="layer 4 reads layer 2's KV"):
        pool.set_kv_buffer(4, torch.tensor([5]), k, v)


def test_a_layer_cannot_share_kv_of_another_shape() -> None:
    layers = (LayerKVSpec(0, FULL, 1, 8, None, 0), LayerKVSpec(1, FULL, 1, 16, None, 0))
    with pytest.raises(AssertionError, match="layer 1 cannot share layer 0's KV"):
        MHATokenToKVPool(KVLayout(layers), 16, 4, torch.float32, "cpu")


def test_the_pool_is_whole_pages() -> None:
    with pytest.raises(AssertionError, match="size_tokens=30"):
        MHATokenToKVPool(make_layout(), 30, 4, torch.float32, "cpu")


def test_the_digest_sees_every_element_of_every_buffer() -> None:
    pool = make_pool(size_tokens=4, page_size=4)
    seen = {pool.digest()}
    assert pool.digest() in seen
    for layer_id in OWNERS:
        for buffer in pool.get_kv_buffer(layer_id):
            for element in range(buffer.numel()):
                buffer.view(-1)[element] += 1
                digest = pool.digest()
                assert digest not in seen
                seen.add(digest)


def test_the_digest_is_bitwise() -> None:
    pool = make_pool()
    before = pool.digest()
    pool.get_key_buffer(0)[3, 1, 2] = -0.0  # equal to 0.0 as a number
    assert pool.digest() != before
    poisoned = make_pool()
    for layer_id in OWNERS:
        for buffer in poisoned.get_kv_buffer(layer_id):
            buffer.fill_(float("nan"))
    assert poisoned.digest() == poisoned.digest()


@pytest.mark.parametrize("page_size", [1, 4])
def test_poisoned_slots_never_reach_what_a_request_committed(page_size: int) -> None:
    """Every slot starts as NaN; neighbours write NaN into their reserves and padding rows into the dummy page."""
    pool = make_pool(size_tokens=32, page_size=page_size)
    for layer_id in OWNERS:
        for buffer in pool.get_kv_buffer(layer_id):
            buffer.fill_(float("nan"))
    manager = KVCacheManager(pool, ReqToTokenPool(4, 32, "cpu"), disable_radix_cache=False)
    stored = {}
    for request, num_tokens in enumerate((3, 5, 8)):
        kv = manager.open(range(100 * request, 100 * request + num_tokens + 1))
        assert kv is not None and manager.grow(kv, num_tokens + 2)
        reserve = torch.from_numpy(manager.locs(kv, num_tokens, kv.allocated_len))
        padding = torch.zeros(3, dtype=torch.int64)
        for layer_id in OWNERS:
            k, v = random_kv(pool, layer_id, num_tokens)
            pool.set_kv_buffer(layer_id, torch.from_numpy(manager.locs(kv, 0, num_tokens)), k, v)
            stored[request, layer_id] = kv, k, v
            for loc in (reserve, padding):
                k, v = (torch.full_like(x, float("nan")) for x in random_kv(pool, layer_id, len(loc)))
                pool.set_kv_buffer(layer_id, loc, k, v)
        manager.commit(kv, num_tokens)
    for (_, layer_id), (kv, k, v) in stored.items():
        loc = torch.from_numpy(manager.locs(kv, 0, kv.committed_len))
        assert torch.equal(pool.get_key_buffer(layer_id)[loc], k)
        assert torch.equal(pool.get_value_buffer(layer_id)[loc], v)
