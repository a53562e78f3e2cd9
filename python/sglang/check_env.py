"""`python -m sglang.check_env`: what a report of a problem should say about machine and packages."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from sglang.version import __version__

_PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "huggingface-hub",
    "numpy",
    "jinja2",
    "xgrammar",
    "fastapi",
    "starlette",
    "uvicorn",
    "pyzmq",
    "msgspec",
    "prometheus-client",
    "httpx",
    "openai",
)


def facts() -> Iterator[tuple[str, str]]:
    """Name and value of everything that is reported, in order."""
    yield "sglang", f"{__version__} in {Path(__file__).parent}"
    yield "Python", f"{platform.python_version()} ({sys.executable})"
    yield "Platform", platform.platform()
    yield "CPU", f"{_cpu_name()}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores usable"
    yield "Memory", _memory()
    yield from _gpus()
    yield "C++ compiler", shutil.which("c++") or "none: CPU operators run in plain torch"
    for name in _PACKAGES:
        yield name, _version(name)


def main() -> int:
    """Print them, one a line."""
    for name, value in facts():
        print(f"{name}: {value}")
    return 0


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cpu_name() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), flags=re.MULTILINE)
    return found[1] if found else platform.machine()


def _memory() -> str:
    sizes = dict(re.findall(r"^(\w+):\s+(\d+) kB$", Path("/proc/meminfo").read_text(), flags=re.MULTILINE))
    total, available = (int(sizes[name]) / (1 << 20) for name in ("MemTotal", "MemAvailable"))
    return f"{total:.1f} GiB, {available:.1f} GiB available"


def _gpus() -> Iterator[tuple[str, str]]:
    """What the engine would see, and what the driver says of it."""
    # takes a second, and is not needed to say that it is missing
    try:
        import torch

        from sglang.srt.utils.device import make_device
    except ImportError as error:
        yield "CUDA", f"unknown, torch cannot be loaded: {error}"
        return
    yield "CUDA", f"torch is built for {torch.version.cuda or 'CPUs only'}"
    yield "Device", f"--device auto is {make_device('auto').kind}"
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version,compute_cap", "--format=csv,noheader"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        for line in (result.stdout or result.stderr).strip().splitlines():
            yield "GPU", line


if __name__ == "__main__":
    sys.exit(main())
