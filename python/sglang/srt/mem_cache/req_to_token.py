"""Which pool slot holds each position of each open request."""

from __future__ import annotations

import numpy as np
import torch

from sglang.srt.utils.device import Staging

_BYTES_OF_INDEX, _BYTES_OF_SLOT = 8, 4


class ReqToTokenPool:
    """A table of rows, one per open request: ``row[position] = slot``.

    ``req_to_token``: [max_requests + 1, max_len] int32 on ``device``, for kernels. ``host``: the same table for the
    CPU, so that planning never reads the device. On a CPU both are the same memory; elsewhere what was written since
    the last ``flush`` is shown to the device by one copy. Entries beyond what a row's owner wrote are leftovers of
    earlier requests. The last row, ``dummy_row``, belongs to nobody and stays zero: every position of it is a slot of
    the pool's dummy page, where the padding rows of a batch write.
    """

    def __init__(
        self, max_requests: int, max_len: int, device: torch.device | str, *, mirrored: bool | None = None
    ) -> None:
        """``mirrored`` keeps a copy apart even on a CPU; by default only where it is needed."""
        assert max_requests >= 1 and max_len >= 1, f"{max_requests=} {max_len=}"
        device = torch.device(device)
        self.max_requests = max_requests
        self.max_len = max_len
        self.dummy_row = max_requests
        host = torch.zeros((max_requests + 1, max_len), dtype=torch.int32)
        self.host: np.ndarray = host.numpy()
        self._mirrored = device.type != "cpu" if mirrored is None else mirrored
        self.req_to_token = torch.zeros(host.shape, dtype=torch.int32, device=device) if self._mirrored else host
        self._free_rows = list(reversed(range(max_requests)))
        self._in_use = [False] * max_requests
        self._unseen: list[tuple[int, int, int]] = []  # (row, start, end) the device does not know of yet
        self._staging = Staging(device)
        self._host_block = torch.empty(0, dtype=torch.uint8)

    @property
    def available(self) -> int:
        return len(self._free_rows)

    def alloc(self) -> int | None:
        """A free row, or None. The order is deterministic: the row freed last comes first."""
        if not self._free_rows:
            return None
        row = self._free_rows.pop()
        self._in_use[row] = True
        return row

    def free(self, row: int) -> None:
        assert self._in_use[row], f"row {row} is freed but not in use"
        self._in_use[row] = False
        self._free_rows.append(row)

    def write(self, row: int, start: int, slots: np.ndarray) -> None:
        """Set positions ``start ..`` of a row to ``slots`` [n], any integer dtype."""
        end = start + len(slots)
        assert 0 <= row < self.max_requests and self._in_use[row], f"row {row} is written but not in use"
        assert 0 <= start and end <= self.max_len, f"positions {start}..{end} do not fit a row of {self.max_len}"
        self.host[row, start:end] = slots
        if self._mirrored and end > start:
            self._unseen.append((row, start, end))

    def flush(self) -> None:
        """Show the device all writes since the last call. Comes before every forward that reads the table."""
        if not self._unseen:
            return
        count = sum(end - start for _, start, end in self._unseen)
        block = self._block_of(_BYTES_OF_INDEX * count + _BYTES_OF_SLOT * count)
        indices, slots = _parts(block, count)
        host_indices, host_slots, at = indices.numpy(), slots.numpy(), 0
        for row, start, end in self._unseen:
            stop, first = at + end - start, row * self.max_len + start
            host_indices[at:stop] = np.arange(first, first + stop - at)
            host_slots[at:stop] = self.host[row, start:end]
            at = stop
        self._unseen.clear()
        sent = torch.empty(block.shape, dtype=torch.uint8, device=self.req_to_token.device)
        self._staging.send(block, sent)
        # a position written twice is in the list twice, with the same newest slot
        self.req_to_token.view(-1).index_copy_(0, *_parts(sent, count))

    def _block_of(self, num_bytes: int) -> torch.Tensor:
        """``num_bytes`` of host memory that no copy is reading any more."""
        self._staging.wait()
        if self._host_block.shape[0] < num_bytes:
            capacity = max(4096, 1 << (num_bytes - 1).bit_length())
            self._host_block = torch.empty(capacity, dtype=torch.uint8, pin_memory=self._staging.is_pinned)
        return self._host_block[:num_bytes]


def _parts(block: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes as ``count`` places of the flat table [count] int64, and the slots there [count] int32."""
    places = block[: _BYTES_OF_INDEX * count].view(torch.int64)
    return places, block[_BYTES_OF_INDEX * count :].view(torch.int32)
