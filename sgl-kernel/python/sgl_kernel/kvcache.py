"""The only operation that changes a KV buffer.

Shapes: ``slots`` token slots of the pool, ``T`` tokens written, ``KH`` KV heads, ``D`` head width.
"""

from __future__ import annotations

import torch


def store_kv(k_buf: torch.Tensor, v_buf: torch.Tensor, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Write one layer's new keys and values into its buffers: ``k_buf[loc] = k``, ``v_buf[loc] = v``.

    ``k_buf``, ``v_buf``: [slots, KH, D], mutated. ``loc``: [T] int64 slots on the buffers' device; repeated slots are
    allowed only where nobody reads them (the dummy page). ``k``, ``v``: [T, KH, D], cast to the buffers' dtype.

    Raises ValueError that names every tensor when shapes, dtypes, devices or slots do not fit. The buffers' contents
    are undefined after that.
    """
    if k.dtype is not k_buf.dtype:
        k = k.to(k_buf.dtype)
    if v.dtype is not v_buf.dtype:
        v = v.to(v_buf.dtype)
    try:
        # index_copy_ checks rank, shape, index type, range and device itself. Checking here first would double the
        # cost of a one-token write, which happens once per layer and decode step.
        k_buf.index_copy_(0, loc, k)
        v_buf.index_copy_(0, loc, v)
    except (RuntimeError, IndexError) as error:
        tensors = {"k_buf": k_buf, "v_buf": v_buf, "loc": loc, "k": k, "v": v}
        described = ", ".join(f"{name} {list(t.shape)} {t.dtype} {t.device}" for name, t in tensors.items())
        raise ValueError(f"store_kv cannot write these tensors ({error}): {described}") from error
