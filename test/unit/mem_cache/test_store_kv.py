from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import sglang.srt.mem_cache.kv_pool as kv_pool
from sgl_kernel import kvcache
from sgl_kernel.kvcache import store_kv

SLOTS, HEADS, DIM = 8, 2, 4


def buffers(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(SLOTS, HEADS, DIM, dtype=dtype), torch.zeros(SLOTS, HEADS, DIM, dtype=dtype)


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_writes_exactly_the_named_slots_in_the_buffers_dtype(num_tokens: int, dtype: torch.dtype) -> None:
    k_buf, v_buf = buffers(dtype)
    k, v = torch.randn(num_tokens, HEADS, DIM), torch.randn(num_tokens, HEADS, DIM)
    loc = torch.tensor([6, 1, 3, 7, 2][:num_tokens], dtype=torch.int64)
    store_kv(k_buf, v_buf, loc, k, v)
    for buffer, new in ((k_buf, k), (v_buf, v)):
        expected = torch.zeros(SLOTS, HEADS, DIM, dtype=dtype)
        for row, slot in enumerate(loc.tolist()):
            expected[slot] = new[row].to(dtype)
        assert torch.equal(buffer, expected)


def test_accepts_slices_of_a_wider_projection() -> None:
    k_buf, v_buf = buffers()
    kv = torch.randn(3, 2 * HEADS, DIM)
    loc = torch.tensor([2, 4, 5])
    store_kv(k_buf, v_buf, loc, kv[:, :HEADS], kv[:, HEADS:])
    assert torch.equal(torch.cat((k_buf[loc], v_buf[loc]), dim=1), kv)


@pytest.mark.parametrize(
    "wrong",
    [
        {"k": torch.zeros(2, HEADS, DIM + 1)},
        {"v": torch.zeros(2, HEADS + 1, DIM)},
        {"k": torch.zeros(2, HEADS * DIM)},
        {"k": torch.zeros(2, DIM, HEADS)},
        {"v": torch.zeros(3, HEADS, DIM)},
        {"loc": torch.tensor([1])},
        {"loc": torch.tensor([[1], [2]])},
        {"loc": torch.tensor([1.0, 2.0])},
        {"loc": torch.tensor([1, SLOTS])},
        {"loc": torch.tensor([1, -1])},
        {"k": torch.zeros(2, HEADS, DIM, device="meta")},
        {"loc": torch.tensor([1, 2], device="meta")},
    ],
    ids=lambda wrong: "-".join(f"{name}{list(t.shape)}{t.device}" for name, t in wrong.items()),
)
def test_a_misfit_is_one_error_that_names_every_tensor(wrong: dict[str, torch.Tensor]) -> None:
    k_buf, v_buf = buffers()
    args = {"loc": torch.tensor([1, 2]), "k": torch.zeros(2, HEADS, DIM), "v": torch.zeros(2, HEADS, DIM), **wrong}
    with pytest.raises(ValueError, match=r"store_kv cannot write .*k_buf \[8, 2, 4\].*v_buf.*loc.*, k .*, v "):
        store_kv(k_buf, v_buf, **args)


def test_only_the_pool_writes() -> None:
    """The operations that change a KV buffer, and who calls them outside their own file."""
    roots = [Path(kv_pool.__file__).parents[2], Path(kvcache.__file__).parent]
    callers = set()
    for path in sorted(path for root in roots for path in root.rglob("*.py") if path.name != "kvcache.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                if node.func.id in ("store_kv", "norm_rope_store"):
                    callers.add((path.name, node.func.id))
    assert callers == {("kv_pool.py", "store_kv"), ("kv_pool.py", "norm_rope_store")}
