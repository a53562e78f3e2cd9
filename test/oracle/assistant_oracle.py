"""A Gemma 4 MTP assistant's draft steps, written from the model's description in plain PyTorch, float32, one sequence.

For ``L`` committed tokens (the newest one, the bonus token at position ``L-1``, has no KV yet) every step of a round:

- queries at position ``L-1``;
- sees positions ``0 .. L-2`` on full layers and positions ``> L-1-W`` of those on sliding layers;
- takes ``[scaled target embedding of the token, hidden]``, where the first hidden is the target's after its final norm
  at the position that predicted the bonus token, and later ones come from the assistant's own post projection.

Shape letters: ``T`` cached positions (``L-1``), ``V`` vocabulary, ``D`` target width, ``A`` assistant width, ``H``
query heads, ``K`` KV heads, ``d`` head width.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open

SLIDING, FULL = "sliding_attention", "full_attention"
KVByKind = Mapping[str, tuple[torch.Tensor, torch.Tensor]]

_ROPE: dict[str, dict[str, Any]] = {
    SLIDING: {"rope_theta": 1e4, "partial_rotary_factor": 1.0},
    FULL: {"rope_theta": 1e6, "partial_rotary_factor": 0.25},
}


@dataclass(frozen=True, slots=True)
class DraftStep:
    """``logits`` [V] (-inf where the centroid head did not look), its argmax, and ``hidden`` [D] for the next step."""

    logits: torch.Tensor
    token: int
    hidden: torch.Tensor


class AssistantOracle:
    """Reads both checkpoints' safetensors itself; of the target only the embedding table."""

    def __init__(self, assistant_path: str | Path, target_path: str | Path):
        self.config = json.loads((Path(assistant_path) / "config.json").read_text())
        self.text = self.config["text_config"]
        self.weights = _read_tensors(Path(assistant_path))
        table = _read_tensors(Path(target_path), suffix="embed_tokens.weight")
        (self.target_embedding,) = table.values()
        self.kinds = [*self.text["layer_types"][:-1], FULL]
        self.window = self.text["sliding_window"]

    @torch.inference_mode()
    def draft(self, store_kv: KVByKind, hidden: torch.Tensor, token: int, num_steps: int) -> list[DraftStep]:
        """Draft ``num_steps`` tokens after the bonus ``token``.

        ``store_kv``: per layer kind (K, V) [K, T, d] of positions ``0 .. T-1``; ``hidden`` [D].
        """
        steps = []
        for _ in range(num_steps):
            step = self.step(store_kv, hidden, token)
            steps.append(step)
            hidden, token = step.hidden, step.token
        return steps

    @torch.inference_mode()
    def step(self, store_kv: KVByKind, hidden: torch.Tensor, token: int) -> DraftStep:
        """One draft step from ``token`` and ``hidden`` [D]."""
        embedding = self.target_embedding[token] * math.sqrt(self.target_embedding.shape[1])
        x = self._w("pre_projection.weight") @ torch.cat([embedding, hidden])
        for layer, kind in enumerate(self.kinds):
            x = self._layer(layer, kind, x, *store_kv[kind])
        g = self._norm(x, "model.norm.weight")
        logits = self._head(g)
        return DraftStep(logits, int(logits.argmax()), self._w("post_projection.weight") @ g)

    def _layer(self, layer: int, kind: str, x: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        p = f"model.layers.{layer}."
        h = self._attention(p + "self_attn.", kind, self._norm(x, p + "input_layernorm.weight"), k, v)
        x = x + self._norm(h, p + "post_attention_layernorm.weight")
        h = self._norm(x, p + "pre_feedforward_layernorm.weight")
        gate = F.gelu(self._w(p + "mlp.gate_proj.weight") @ h, approximate="tanh")
        h = self._w(p + "mlp.down_proj.weight") @ (gate * (self._w(p + "mlp.up_proj.weight") @ h))
        x = x + self._norm(h, p + "post_feedforward_layernorm.weight")
        return x * self._w(p + "layer_scalar")

    def _attention(self, p: str, kind: str, x: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        num_kv_heads, cached_len, head_dim = k.shape
        q = (self._w(p + "q_proj.weight") @ x).view(-1, head_dim)
        q = self._rotate(self._norm(q, p + "q_norm.weight"), kind, position=cached_len)
        first = max(0, cached_len - self.window + 1) if kind == SLIDING else 0
        repeat = q.shape[0] // num_kv_heads
        k = k[:, first:].repeat_interleave(repeat, dim=0)
        v = v[:, first:].repeat_interleave(repeat, dim=0)
        weights = torch.softmax((k @ q[:, :, None])[..., 0], dim=-1)
        out = (weights[:, None, :] @ v)[:, 0]
        return self._w(p + "o_proj.weight") @ out.flatten()

    def _rotate(self, q: torch.Tensor, kind: str, position: int) -> torch.Tensor:
        """Rotary embedding of q [H, d]: pairs (j, j + d/2); on full layers only the first quarter of the pairs turn."""
        rope = {**_ROPE[kind], **self.text.get("rope_parameters", {}).get(kind, {})}
        half = q.shape[1] // 2
        turning = int(rope["partial_rotary_factor"] * half)
        j = torch.arange(half, dtype=torch.float32)
        angle = position * (1.0 / rope["rope_theta"] ** (2 * j / q.shape[1]))
        angle = torch.where(j < turning, angle, torch.zeros(())) / rope.get("factor", 1.0)
        a, b = q[:, :half], q[:, half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=1)

    def _head(self, g: torch.Tensor) -> torch.Tensor:
        logits = self._w("model.embed_tokens.weight") @ g
        if not self.config["use_ordered_embeddings"]:
            return logits
        order = self._w("masked_embedding.token_ordering").view(self.config["num_centroids"], -1)
        scores = self._w("masked_embedding.centroids.weight") @ g
        ids = order[scores.topk(self.config["centroid_intermediate_top_k"]).indices].flatten()
        return torch.full_like(logits, -torch.inf).index_copy(0, ids, logits[ids])

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.text["rms_norm_eps"]) * self._w(name)

    def _w(self, name: str) -> torch.Tensor:
        return self.weights[name]


def _read_tensors(folder: Path, suffix: str = "") -> dict[str, torch.Tensor]:
    """Tensors whose name ends with ``suffix`` from every shard; floating ones as float32."""
    tensors = {}
    for shard in sorted(folder.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as f:
            for name in f.keys():
                if name.endswith(suffix):
                    value = f.get_tensor(name)
                    tensors[name] = value.float() if value.is_floating_point() else value
    return tensors
