"""Setting up the environment: what cannot work ends with one sentence that says what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fixtures.source_tree import ROOT


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """As much of the project as the set-up reads before it installs."""
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/env.sh", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def set_up(clone: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    command = ["bash", str(clone / "scripts" / "env.sh")]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**kept, **variables}, stdin=subprocess.DEVNULL
    )
    assert result.returncode == 1
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    return result


def fake_python(folder: Path, script: str) -> str:
    path = folder / "fake-python"
    path.write_text(f'#!/bin/sh\n{script}\nexec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return str(path)


def test_python_that_is_not_there(clone) -> None:
    assert "does not exist" in set_up(clone, PYTHON=str(clone / "nothing")).stderr


def test_python_that_is_too_old(clone) -> None:
    # the question about the version is the only -c before anything is made
    old = fake_python(clone, '[ "$1" = -c ] && exit 1')
    assert "Python 3.10 or newer" in set_up(clone, PYTHON=old).stderr
    assert not (clone / ".venv").exists()


def test_python_without_venv(clone) -> None:
    crippled = fake_python(clone, '[ "$2" = venv ] && { mkdir .venv; echo "ensurepip is not available"; exit 1; }')
    assert "python3-venv" in set_up(clone, PYTHON=crippled).stderr
    assert not (clone / ".venv").exists()


def test_no_network(clone) -> None:
    # nothing listens on the discard port of this machine
    unreachable = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "1"}
    result = set_up(clone, PYTHON=sys.executable, PIP_NO_CACHE_DIR="1", **unreachable)
    assert "index cannot be reached" in result.stderr
    assert "[2/3]" in result.stdout
    assert (clone / ".venv" / "install.log").stat().st_size
    assert not (clone / ".venv" / "stamp").exists()
