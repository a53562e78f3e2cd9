"""Which pool slot holds each position of each open request."""

from __future__ import annotations

import numpy as np
import torch


class ReqToTokenPool:
    """A table of rows, one per open request: ``row[position] = slot``.

    ``req_to_token``: [max_requests, max_len] int32 on ``device``, for kernels. ``host``: the same table for the CPU
    (the same memory when the device is a CPU), so that planning never reads the device. Entries beyond what a row's
    owner wrote are leftovers of earlier requests.
    """

    def __init__(self, max_requests: int, max_len: int, device: torch.device | str) -> None:
        assert max_requests >= 1 and max_len >= 1, f"{max_requests=} {max_len=}"
        self.max_requests = max_requests
        self.max_len = max_len
        self._host_tensor = torch.zeros((max_requests, max_len), dtype=torch.int32)
        self.host: np.ndarray = self._host_tensor.numpy()
        # Without a copy on a CPU: .to() returns the tensor itself.
        self.req_to_token = self._host_tensor.to(device)
        self._mirrored = self.req_to_token is not self._host_tensor
        self._free_rows = list(reversed(range(max_requests)))
        self._in_use = [False] * max_requests

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
        assert self._in_use[row], f"row {row} is written but not in use"
        assert 0 <= start and end <= self.max_len, f"positions {start}..{end} do not fit a row of {self.max_len}"
        self.host[row, start:end] = slots
        if self._mirrored:
            self.req_to_token[row, start:end] = self._host_tensor[row, start:end].to(self.req_to_token.device)
