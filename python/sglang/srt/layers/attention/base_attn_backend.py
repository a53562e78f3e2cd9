"""What an attention backend has to offer."""

from __future__ import annotations

from typing import Protocol

import torch

from sglang.srt.model_executor.forward_batch_info import AttnGeometry, AttnPlan


class AttentionBackend(Protocol):
    """Plans attention. Conformance is defined by ``TorchNativeAttnBackend``."""

    def __init__(self, req_to_token: torch.Tensor) -> None:
        """``req_to_token`` [max_requests, max_len] int32: slot of each position."""
        ...

    def init_forward_metadata(self, geometry: AttnGeometry) -> AttnPlan:
        """A plan that is valid while the pool's visible contents stay as they are after this forward's own stores."""
        ...
