"""The only operations that change a KV buffer.

Shapes: ``slots`` token slots of the pool, ``T`` tokens written, ``KH`` KV heads, ``D`` head width.
"""

from __future__ import annotations

import torch

from sgl_kernel.head_norm_rope import head_norm_rope
from sgl_kernel.launch import triton_kernels


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


def norm_rope_store(
    k_buf: torch.Tensor,
    v_buf: torch.Tensor,
    loc: torch.Tensor,
    heads: torch.Tensor,
    weights: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Norm and rotate queries and keys, norm values, write keys and values at ``loc``; the queries [T, H, D].

    ``heads``: [T, Hin, D] or parts [S, T, Hin, D] of the merged projection; the other arguments as in
    ``head_norm_rope`` and ``store_kv``. ``k_buf`` and ``v_buf`` are mutated.
    """
    num_kv = k_buf.shape[1]
    if heads.is_cuda:
        kernel = triton_kernels("head_norm_rope")
        return kernel.head_norm_rope(heads, weights, cos, sin, num_kv, eps, k_buf, v_buf, loc)
    rotated, values = head_norm_rope(heads, weights, cos, sin, num_kv, eps)
    num_queries = rotated.shape[1] - num_kv
    store_kv(k_buf, v_buf, loc, rotated[:, num_queries:], values)
    return rotated[:, :num_queries]
