"""Checkpoint tensors from sharded safetensors, straight into their places.

Of a tensor that ranks share, each reads its part only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from sglang.srt.distributed.sharding import ShardedSlot, WeightSlot, slot_tensors
from sglang.srt.models.interfaces import LoadableModel, WeightPlan

_INDEX = "model.safetensors.index.json"
_LISTED = 20


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """Which tensors a model was filled with, and the bytes they take in it."""

    names: frozenset[str]
    num_bytes: int


def load_weights(model: LoadableModel, path: Path, *, quiet: bool = False) -> LoadedWeights:
    """Fill the model from ``path``; ``quiet``: without showing how far it is.

    ``ValueError``: unreadable or absent files, or one message that lists every missing, unexpected and misshapen tensor
    (before anything is copied).
    """
    files, plan = _plan(model, path)
    what = f"Loading {path.name}"
    with torch.inference_mode(), tqdm(total=len(plan.slots), desc=what, unit="tensor", disable=quiet) as bar:
        for file in files:
            with _open(file) as tensors:
                for name in tensors.keys():
                    if name in plan.slots:
                        _fill(plan.slots[name], tensors, name)
                        bar.update()
    model.finish_loading()
    return _loaded(plan.slots)


def tensors_to_load(model: LoadableModel, path: Path) -> frozenset[str]:
    """Names of what ``load_weights`` would fill the model with; raises what it would raise before it copies."""
    return frozenset(_plan(model, path)[1].slots)


def load_dummy_weights(model: LoadableModel, seed: int = 0) -> LoadedWeights:
    """Small random weights, the same for the same seed; for trying shapes without a checkpoint."""
    slots = model.weight_plan(()).slots
    with torch.inference_mode():
        for name, slot in slots.items():
            for tensor in slot_tensors(slot):
                _fill_dummy(tensor, slot.shape[-1], seed + len(name))
    model.finish_loading()
    return _loaded(slots)


def _fill(slot: WeightSlot, tensors: safe_open, name: str) -> None:
    if isinstance(slot, ShardedSlot):
        slot.fill(tensors.get_slice(name).__getitem__)
    else:
        slot.copy_(tensors.get_tensor(name))


def _fill_dummy(tensor: torch.Tensor, fan_in: int, seed: int) -> None:
    if not tensor.is_floating_point():
        tensor.copy_(torch.arange(tensor.numel(), device=tensor.device).view(tensor.shape))
    elif tensor.dim() == 1:
        tensor.fill_(1.0)
    else:
        generator = torch.Generator(device=tensor.device).manual_seed(seed)
        tensor.normal_(0.0, fan_in**-0.5, generator=generator)


def _loaded(slots: Mapping[str, WeightSlot]) -> LoadedWeights:
    tensors = [tensor for slot in slots.values() for tensor in slot_tensors(slot)]
    return LoadedWeights(frozenset(slots), sum(tensor.numel() * tensor.element_size() for tensor in tensors))


def _plan(model: LoadableModel, path: Path) -> tuple[list[Path], WeightPlan]:
    """The files of a checkpoint, and where in the model each of their tensors goes."""
    files = _tensor_files(path)
    shapes = {name: shape for file in files for name, shape in _shapes(file).items()}
    plan = model.weight_plan(shapes.keys())
    _check(path, plan.slots, shapes, plan.ignored)
    return files, plan


def _tensor_files(path: Path) -> list[Path]:
    index = path / _INDEX
    if not index.exists():
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise ValueError(f"{path} holds no .safetensors file: give a folder with a complete checkpoint")
        return files
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, UnicodeDecodeError) as err:
        raise ValueError(f"{index} is not a safetensors index ({err!r}): download the checkpoint again") from err
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise ValueError(f"{index} names {outside[0]!r:.200}, which is no file of its own folder: a checkpoint is one")
    absent = [name for name in names if not (path / name).exists()]
    if absent:
        raise ValueError(f"{path} lacks {', '.join(absent)}, which {_INDEX} names: download the checkpoint again")
    return [path / name for name in names]


def _open(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as err:
        raise ValueError(f"{file} is not a complete safetensors file ({err}): download it again") from err


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    with _open(file) as tensors:
        return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}


def _check(
    path: Path, slots: Mapping[str, WeightSlot], shapes: Mapping[str, tuple[int, ...]], ignored: frozenset[str]
) -> None:
    problems: list[str] = []
    _add(problems, "missing", sorted(set(slots) - set(shapes)))
    _add(problems, "unexpected", sorted(set(shapes) - set(slots) - ignored))
    _add(
        problems,
        "misshapen",
        [
            f"{name} is {list(shapes[name])}, the configuration says {list(slot.shape)}"
            for name, slot in sorted(slots.items())
            if name in shapes and shapes[name] != tuple(slot.shape)
        ],
    )
    if problems:
        raise ValueError(f"the tensors in {path} do not fit its config.json. " + " ".join(problems))


def _add(problems: list[str], what: str, names: Iterable[str]) -> None:
    names = list(names)
    if names:
        more = f", and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        problems.append(f"{len(names)} {what}: {', '.join(names[:_LISTED])}{more}.")
