"""Buffers that a fixed-shape program reads and writes, declared field by field.

A field says which of its axes counts requests, its type, and the value that stands in rows no request fills. Memory,
views of fewer rows, copying and padding follow from that, so no program pads by hand.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from sglang.srt.utils.device import Staging

ROWS = "rows"
_ALIGNMENT = 256  # of each field in the common block; kernels may assume at least 16

T = TypeVar("T", bound="InputBuffers")


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """One field. ``dims`` name its axes, one of them ``ROWS``; ``dtype`` None is the model's; ``pad`` is a value, or
    the name of one that is known when the buffers are made."""

    dims: tuple[str, ...]
    dtype: torch.dtype | None
    pad: float | str

    @property
    def axis(self) -> int:
        return self.dims.index(ROWS)


def buffer(*dims: str, dtype: torch.dtype | None, pad: float | str = 0) -> Any:
    """A field of an ``InputBuffers``."""
    return field(metadata={"buffer": BufferSpec(dims, dtype, pad)})


@dataclass(frozen=True, slots=True, eq=False)
class InputBuffers:
    """Base of all buffers. ``block`` [bytes] uint8 is the memory of all fields together, so that one copy moves them
    all; fields never move, so a captured program may keep their addresses. ``pads`` are the values in unused rows."""

    block: torch.Tensor
    pads: Mapping[str, float]
    _views: dict[tuple[int, ...], Any]  # by number of rows and of columns: the same objects on every call

    @classmethod
    def allocate(
        cls: type[T], sizes: Mapping[str, float], dtype: torch.dtype, device: torch.device, *, pinned: bool = False
    ) -> T:
        """All rows padded. ``sizes``: every name that the fields' ``dims`` and ``pad`` use."""
        specs = cls.specs()
        shapes = {name: tuple(int(sizes[dim]) for dim in spec.dims) for name, spec in specs.items()}
        starts, end = {}, 0
        for name, spec in specs.items():
            starts[name] = end
            num_bytes = math.prod(shapes[name]) * (spec.dtype or dtype).itemsize
            end += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        block = torch.zeros(end, dtype=torch.uint8, device=device, pin_memory=pinned)
        fields = {}
        for name, spec in specs.items():
            num_bytes = math.prod(shapes[name]) * (spec.dtype or dtype).itemsize
            part = block[starts[name] : starts[name] + num_bytes]
            fields[name] = part.view(spec.dtype or dtype).view(shapes[name])
        pads = {n: sizes[spec.pad] if isinstance(spec.pad, str) else spec.pad for n, spec in specs.items()}
        made = cls(block=block, pads=pads, _views={}, **fields)
        made.pad(0)
        return made

    @classmethod
    def specs(cls) -> dict[str, BufferSpec]:
        return {f.name: f.metadata["buffer"] for f in dataclasses.fields(cls) if "buffer" in f.metadata}

    def first(self: T, num_rows: int) -> T:
        """The same buffers, seen as ``num_rows`` rows."""
        found: T | None = self._views.get((num_rows,))
        if found is None:
            fields = {
                name: getattr(self, name).narrow(spec.axis, 0, num_rows) for name, spec in type(self).specs().items()
            }
            found = dataclasses.replace(self, _views={}, **fields)
            self._views[num_rows,] = found
        return found

    def front(self: T, num_rows: int, **sizes: int) -> T:
        """``num_rows`` dense rows in the front of the same memory, with other ``sizes`` of the axes so named.

        A row does not stand where it stands in ``first``, unless all sizes are those the buffers were made with.
        """
        key = (num_rows, *sizes.values())
        found: T | None = self._views.get(key)
        if found is None:
            fields: dict[str, Any] = {}
            for name, spec in type(self).specs().items():
                whole: torch.Tensor = getattr(self, name)
                wanted = {ROWS: num_rows, **sizes}
                shape = [wanted.get(dim, num) for dim, num in zip(spec.dims, whole.shape, strict=True)]
                fields[name] = whole.view(-1)[: math.prod(shape)].view(shape)
            found = dataclasses.replace(self, _views={}, **fields)
            self._views[key] = found
        return found

    def pad(self, start: int, end: int | None = None) -> None:
        """Put the declared values into rows ``start .. end`` (default: the last)."""
        for name, spec in type(self).specs().items():
            values: torch.Tensor = getattr(self, name)
            stop = values.shape[spec.axis] if end is None else end
            values.narrow(spec.axis, start, stop - start).fill_(self.pads[name])


class StagedBuffers(Generic[T]):
    """Buffers on the ``device``, and the host memory that they are filled from by one copy."""

    def __init__(self, kind: type[T], sizes: Mapping[str, float], device: torch.device) -> None:
        """``kind`` has no field of the model's type."""
        self._staging = Staging(device)
        self.device = kind.allocate(sizes, torch.float32, device)
        self._host = self.device
        if self._staging.is_pinned:
            self._host = kind.allocate(sizes, torch.float32, torch.device("cpu"), pinned=True)

    def fill(self) -> T:
        """Where to write what is to be sent."""
        self._staging.wait()
        return self._host

    def send(self) -> None:
        """Everything that was written."""
        if self._host is not self.device:
            self._staging.send(self._host.block, self.device.block)
