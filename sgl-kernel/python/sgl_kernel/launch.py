"""The one spot where Triton is imported: only when a CUDA tensor arrives."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType


@cache
def triton_kernels(name: str) -> ModuleType:
    """The launchers of ``sgl_kernel/triton_kernels/<name>.py``."""
    return import_module(f"sgl_kernel.triton_kernels.{name}")
