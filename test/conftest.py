"""Fixtures every test may use: tiny checkpoints made on the spot, the shipped pair, fixed seeds and threads."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from fixtures.make_tiny_gemma4 import write_pairs
from sgl_kernel.cpu_ops import cpu_ops
from sglang.srt.utils.embedded import EMBEDDED_MODELS, EmbeddedModel

SEED = 20260131


def pytest_configure(config: pytest.Config) -> None:
    # the suite is made for two cores; more threads only slow these shapes down
    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


@pytest.fixture
def need_compiler() -> None:
    """For tests of the compiled CPU operators."""
    if cpu_ops() is None:
        pytest.skip("there is no C++ compiler here")


@pytest.fixture(scope="session")
def tiny_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a random float32 checkpoint ``KIND`` and its ``KIND-assistant`` for every kind of
    ``fixtures.make_tiny_gemma4.KINDS``, in the composite layout of released checkpoints."""
    folder = tmp_path_factory.mktemp("tiny_gemma4_composite")
    write_pairs(folder, layout="composite")
    return folder


@pytest.fixture(scope="session")
def tiny_checkpoints_flat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights as ``tiny_checkpoints``, where the kind has one, in the flat text-only layout."""
    folder = tmp_path_factory.mktemp("tiny_gemma4_flat")
    write_pairs(folder, layout="text")
    return folder


@pytest.fixture(scope="session")
def trained_pair() -> EmbeddedModel:
    """Checkpoint folders of the shipped, trained pair."""
    return EMBEDDED_MODELS["tiny-gemma4"]
