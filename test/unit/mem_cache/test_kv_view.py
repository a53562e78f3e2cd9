from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sglang
from sgl_kernel import kvcache
from sglang.srt.mem_cache.kv_pool import KVCache, KVReader
from sglang.srt.mem_cache.kv_view import FrozenKVWriteError, ReadOnlyKVPool

from .kv_cases import OWNERS, SHARING, make_pool, random_kv


def test_the_view_reads_what_the_pool_holds() -> None:
    pool = make_pool()
    view: KVReader = ReadOnlyKVPool(pool)
    assert (view.layout, view.dtype, view.size_tokens, view.page_size) == (pool.layout, torch.float32, 32, 4)
    pool.set_kv_buffer(3, torch.tensor([7]), *random_kv(pool, 3, 1))
    for layer_id in (*OWNERS, *SHARING):
        assert view.layer(layer_id) is pool.layer(layer_id)
        assert view.get_key_buffer(layer_id) is pool.get_key_buffer(layer_id)
        assert view.get_value_buffer(layer_id) is pool.get_value_buffer(layer_id)
        assert view.get_kv_buffer(layer_id) == pool.get_kv_buffer(layer_id)
    assert view.digest() == pool.digest()
    assert not isinstance(view, KVCache) and isinstance(pool, KVCache)
    assert ReadOnlyKVPool(view).digest() == pool.digest()


def write_through_the_view(view: ReadOnlyKVPool) -> None:
    view.set_kv_buffer(0, torch.tensor([1]), torch.zeros(1, 2, 4), torch.zeros(1, 2, 4))


def take_the_writer(view: ReadOnlyKVPool) -> None:
    _ = view.set_kv_buffer


def rebind_a_field(view: ReadOnlyKVPool) -> None:
    view.page_size = 1


def install_a_writer(view: ReadOnlyKVPool) -> None:
    view.set_kv_buffer = lambda *_: None


def edit_the_layer_map(view: ReadOnlyKVPool) -> None:
    view._layers[0] = view._layers[1]


def edit_a_layer(view: ReadOnlyKVPool) -> None:
    view.layer(0).window = 1


@pytest.mark.parametrize(
    ("misuse", "error"),
    [
        (write_through_the_view, FrozenKVWriteError),
        (take_the_writer, FrozenKVWriteError),
        (rebind_a_field, dataclasses.FrozenInstanceError),
        (install_a_writer, (dataclasses.FrozenInstanceError, TypeError)),
        (edit_the_layer_map, TypeError),
        (edit_a_layer, dataclasses.FrozenInstanceError),
    ],
)
def test_misuse_fails_and_changes_nothing(misuse, error) -> None:
    pool = make_pool()
    view = ReadOnlyKVPool(pool)
    before = pool.digest()
    with pytest.raises(error):
        misuse(view)
    assert pool.digest() == before
    assert (view.page_size, view.layer(0), view.layer(0).window) == (4, pool.layer(0), 8)


def test_the_write_error_is_a_sentence_that_says_whose_kv_it_is() -> None:
    with pytest.raises(
        FrozenKVWriteError, match="^set_kv_buffer was asked of a ReadOnlyKVPool: .*borrowed from the target"
    ):
        write_through_the_view(ReadOnlyKVPool(make_pool()))


def test_a_misspelt_name_is_a_plain_attribute_error() -> None:
    with pytest.raises(AttributeError, match="get_keys"):
        _ = ReadOnlyKVPool(make_pool()).get_keys


def test_the_view_holds_no_reference_to_the_pool() -> None:
    pool = make_pool()
    view = ReadOnlyKVPool(pool)
    held = [object.__getattribute__(view, field.name) for field in dataclasses.fields(view)]
    assert not any(isinstance(value, KVCache) for value in held)


CORRECT = """
from __future__ import annotations
import torch
from sglang.srt.mem_cache.kv_pool import KVCache, KVReader, LayerKV
from sglang.srt.mem_cache.kv_view import ReadOnlyKVPool

def write(pool: KVCache, loc: torch.Tensor, k: torch.Tensor) -> None:
    pool.set_kv_buffer(0, loc, k, k)

def read(pool: KVReader) -> LayerKV:
    return pool.layer(0)

def use(pool: KVCache, reader: KVReader, loc: torch.Tensor, k: torch.Tensor) -> None:
    view = ReadOnlyKVPool(pool)
    read(pool), read(view), view.digest()
    write(pool, loc, k)
    if isinstance(reader, KVCache):
        reader.set_kv_buffer(0, loc, k, k)
"""

MISUSES = """
def misuse(view: ReadOnlyKVPool, reader: KVReader, loc: torch.Tensor, k: torch.Tensor) -> None:
    view.set_kv_buffer(0, loc, k, k)
    reader.set_kv_buffer(0, loc, k, k)
    write(view, loc, k)
    view.page_size = 1
    view._layers[0] = view.layer(1)
    view.layer(0).window = None
"""


def mypy_errors(folder: Path, source: str) -> list[str]:
    """Error lines of strict mypy on a module; third-party packages count as untyped to keep it quick."""
    roots = [Path(sglang.__file__).parents[1], Path(kvcache.__file__).parents[1]]
    config = folder / "mypy.ini"
    skip = "[mypy-torch.*,numpy.*]\nfollow_imports = skip\n[mypy-sglang]\nfollow_imports = skip\n"
    skip += "[mypy-sgl_kernel.*,sglang.srt.*]\nfollow_imports = silent\n"
    path = ":".join(map(str, roots))
    config.write_text(f"[mypy]\nstrict = True\nmypy_path = {path}\ncache_dir = {folder / 'cache'}\n{skip}")
    module = folder / "snippet.py"
    module.write_text(source)
    command = [sys.executable, "-m", "mypy", "--config-file", str(config), str(module)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=folder)
    assert result.returncode in (0, 1), result.stdout + result.stderr
    return [line for line in result.stdout.splitlines() if ": error:" in line]


def test_the_type_checker_rejects_every_misuse_and_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    source = CORRECT + MISUSES
    first = len(CORRECT.splitlines()) + 3  # the first misuse, after a blank line and the "def"
    errors = mypy_errors(tmp_path, source)
    lines = [int(error.split(":")[1]) for error in errors]
    assert lines == list(range(first, first + 6)), "\n".join(errors)
