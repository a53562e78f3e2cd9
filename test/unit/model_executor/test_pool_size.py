"""How much memory the KV pool takes of a device."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sglang.srt.configs.model_config import FULL, KVLayout, LayerKVSpec
from sglang.srt.model_executor.pool_configurator import build_kv_memory, kv_budget_bytes, size_pool
from sglang.srt.server_args_slices import MemoryConfig
from sglang.srt.utils.device import Device, make_device

CONFIG = MemoryConfig(
    mem_fraction_static=0.9,
    max_total_tokens=None,
    max_running_requests=None,
    page_size=1,
    context_length=1024,
    disable_radix_cache=False,
)
GB = 10**9


@dataclasses.dataclass(frozen=True)
class FakeDevice(Device):
    """A device of 100 GB of which 60 are free."""

    def available_bytes(self) -> int:
        return 60 * GB

    def total_bytes(self) -> int:
        return 100 * GB


GPU = FakeDevice("cuda", 0, supports_graphs=True)


def test_a_gpu_keeps_free_what_the_fraction_leaves_or_what_is_needed() -> None:
    assert kv_budget_bytes(CONFIG, GPU, 0) == pytest.approx(50 * GB)
    assert kv_budget_bytes(CONFIG, GPU, 9 * GB) == pytest.approx(50 * GB)
    assert kv_budget_bytes(CONFIG, GPU, 25 * GB) == 35 * GB
    cpu = FakeDevice("cpu", 0, supports_graphs=False)
    assert kv_budget_bytes(CONFIG, cpu, 0) == pytest.approx(54 * GB)


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("requests", [None, 40])
def test_pool_and_request_rows_fit_the_budget(requests: int | None, page: int) -> None:
    memory = dataclasses.replace(CONFIG, page_size=page, max_running_requests=requests)
    per_token, per_row, budget = 1000, 40_000, 50_000_000
    tokens, max_requests = size_pool(memory, budget, per_token, per_row)
    rows_in_two_percent = 25
    assert tokens % page == 0 and max_requests == (requests or rows_in_two_percent)
    taken = (tokens + page) * per_token + (max_requests + 1) * per_row
    assert budget - page * per_token - per_token < taken <= budget


def test_the_number_of_requests_follows_from_memory() -> None:
    """Short rows: by tokens, whatever their number. Long rows: by their part of the memory."""
    assert size_pool(CONFIG, 100 * GB, 10_000, 4096)[1] == 10_000_000 // 512
    tokens, max_requests = size_pool(CONFIG, 100 * GB, 10_000, 1 << 19)
    assert max_requests == 2 * GB // (1 << 19) and tokens > 0.97 * 10_000_000
    assert size_pool(CONFIG, 100 * GB, 1 << 30, 1 << 32)[1] == 1


def test_tokens_that_were_asked_for_are_given() -> None:
    memory = dataclasses.replace(CONFIG, max_total_tokens=5000, page_size=16)
    assert size_pool(memory, 0, 1000, 4096) == (4992, 9)


def test_a_pool_too_small_names_the_flags() -> None:
    layout = KVLayout((LayerKVSpec(0, FULL, 1, 16, None, 0),))
    memory = dataclasses.replace(CONFIG, max_total_tokens=3)
    with pytest.raises(ValueError, match="3 tokens, .*--max-total-tokens or --mem-fraction-static"):
        build_kv_memory(layout, memory, tokens_per_step=4, dtype=torch.float32, device=make_device("cpu"))
