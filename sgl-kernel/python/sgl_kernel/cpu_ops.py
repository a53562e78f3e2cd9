"""The compiled CPU operators: built with the machine's C++ compiler on first use, kept in a cache, called by pointer.

Without a compiler every operator has its torch form, which computes the same up to rounding, more slowly.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

logger = logging.getLogger(__name__)
_SOURCE = Path(__file__).parent / "csrc" / "cpu_ops.cpp"
_FLAGS = ("-O3", "-march=native", "-ffast-math", "-std=c++17", "-fPIC")
# without -ffast-math, with which a library makes its whole process round denormals to zero
_LINK_FLAGS = ("-shared",)
_LONG, _FLOAT, _POINTER = ctypes.c_long, ctypes.c_float, ctypes.c_void_p
_SIGNATURES = {
    "sgl_linear": [_POINTER] * 3 + [_LONG] * 3,
    "sgl_linear_bf16": [_POINTER] * 3 + [_LONG] * 3,
    "sgl_rmsnorm": [_POINTER] * 4 + [_LONG] * 2 + [_FLOAT],
    "sgl_head_norm_rope": [_POINTER] * 6 + [_LONG] * 6 + [_FLOAT],
    "sgl_rope_tables": [_POINTER] * 4 + [_LONG] * 2,
    "sgl_gelu_mul": [_POINTER] * 3 + [_LONG] * 4,
    "sgl_linear_groups": [_POINTER] * 4 + [_LONG] * 4,
    "sgl_linear_groups_bf16": [_POINTER] * 4 + [_LONG] * 4,
    "sgl_rmsnorm_add_rmsnorm": [_POINTER] * 6 + [_LONG] * 2 + [_FLOAT],
    "sgl_softcap": [_POINTER, _LONG, _FLOAT],
    "sgl_attention": [_POINTER] * 11 + [_LONG] * 8,
    "sgl_argmax": [_POINTER] * 3 + [_LONG] * 2,
    "sgl_accept_chain": [_POINTER] * 10 + [_LONG] * 5,
    "sgl_decoder_layers": [_POINTER, _LONG, _POINTER, _LONG, _FLOAT],
    "sgl_draft_chain": [_POINTER, _LONG, _POINTER, _LONG, _FLOAT] + [_POINTER] * 3 + [_LONG] + [_POINTER] * 3,
}


@cache
def cpu_ops() -> ctypes.CDLL | None:
    """The library, or None (with one log line that says why) where it cannot be built."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        logger.info("No C++ compiler found: CPU operators run in torch, which is slower")
        return None
    try:
        library = ctypes.CDLL(str(_build(compiler)))
    except (OSError, subprocess.SubprocessError) as err:
        logger.warning("The CPU operators could not be compiled (%s): they run in torch, which is slower", err)
        return None
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return library


def _build(compiler: str) -> Path:
    """Path of the compiled library for this source, these flags and this processor."""
    processor = next(
        (line for line in _read(Path("/proc/cpuinfo")).splitlines() if line.startswith(("flags", "Features"))), ""
    )
    key = "\n".join([_SOURCE.read_text(), *_FLAGS, *_LINK_FLAGS, compiler, platform.machine(), processor])
    name = f"cpu_ops-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    target = _cache_folder() / name
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            compiled, fresh = Path(folder) / "cpu_ops.o", Path(folder) / name
            for step in (*_FLAGS, "-c", _SOURCE, "-o", compiled), (*_LINK_FLAGS, compiled, "-o", fresh):
                subprocess.run([compiler, *map(str, step)], check=True, capture_output=True, timeout=120)
            os.replace(fresh, target)  # atomic: another process may be building the same file
    return target


def _cache_folder() -> Path:
    folder = Path.home() / ".cache" / "sglang"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="sglang-"))
    return folder


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def usable(*tensors: torch.Tensor) -> ctypes.CDLL | None:
    """The library when all tensors are contiguous float32 on the CPU, else None."""
    for tensor in tensors:
        if tensor.dtype is not torch.float32 or not tensor.is_cpu or not tensor.is_contiguous():
            return None
    return cpu_ops()


def address(tensor: torch.Tensor | None) -> int | None:
    """Where a tensor's elements begin, as an operator takes it; null for none."""
    return None if tensor is None else tensor.data_ptr()
