"""Which batch sizes are captured, and what a batch is padded to."""

from __future__ import annotations

import pytest

from sglang.srt.model_executor.cuda_graph_runner import BatchSizes, batch_sizes
from sglang.srt.server_args_slices import GraphConfig


def config(sizes: tuple[int, ...] | None = None, *, capture: bool = True, max_size: int = 256) -> GraphConfig:
    return GraphConfig(capture=capture, sizes=sizes, max_size=max_size, pad=True, overlap=True)


def test_the_default_list_is_dense_where_batches_are_small() -> None:
    sizes = batch_sizes(config(), 2048).sizes
    assert sizes[:9] == (1, 2, 3, 4, 5, 6, 7, 8, 16) and sizes[-1] == 256
    assert all(after <= 2 * before for before, after in zip(sizes, sizes[1:], strict=False))
    assert len(sizes) == 27


@pytest.mark.parametrize(("max_size", "max_requests"), [(256, 5), (5, 256), (256, 20), (24, 64), (1, 9), (70, 70)])
def test_the_largest_size_is_the_largest_batch(max_size: int, max_requests: int) -> None:
    largest = min(max_size, max_requests)
    sizes = batch_sizes(config(max_size=max_size), max_requests).sizes
    assert sizes[0] == 1 and sizes[-1] == largest and list(sizes) == sorted(set(sizes))


def test_sizes_that_were_asked_for() -> None:
    assert batch_sizes(config((8, 1, 8, 300)), 64).sizes == (1, 8)
    assert batch_sizes(config((8, 2), capture=False), 64).sizes == (2, 8)
    with pytest.raises(ValueError, match="--cuda-graph-bs 80 96 are all above the 64 requests"):
        batch_sizes(config((80, 96)), 64)


def test_nothing_is_padded_where_nothing_is_captured() -> None:
    sizes = batch_sizes(config(capture=False), 64)
    assert sizes.sizes == () and sizes.fit(1) is None


def test_a_batch_is_padded_to_the_next_size() -> None:
    padded, exact = BatchSizes((1, 2, 6), pad=True), BatchSizes((1, 2, 6), pad=False)
    assert [padded.fit(n) for n in range(1, 8)] == [1, 2, 6, 6, 6, 6, None]
    assert [exact.fit(n) for n in range(1, 8)] == [1, 2, None, None, None, 6, None]
