"""How many processes a model is spread over, where they are, and whether it can be."""

from __future__ import annotations

from typing import Literal

from sglang.srt.configs.model_config import TextConfig

LoadBalanceMethod = Literal["auto", "round_robin"]


def check_parallel(
    text: TextConfig, *, tp_size: int, dp_size: int, nnodes: int, node_rank: int, dist_init_addr: str | None
) -> None:
    """``ValueError`` for what does not fit together, or not to the model."""
    if dp_size > 1 and nnodes > 1:
        raise ValueError(
            f"--dp-size {dp_size} makes replicas on one machine, and --nnodes is {nnodes}: start a server on each, "
            "and a router in front of them"
        )
    if dp_size > 1 and dist_init_addr is not None:
        raise ValueError(
            f"--dist-init-addr {dist_init_addr!r} cannot be the address of --dp-size {dp_size} replicas: leave it out, "
            "processes of one machine find each other without it"
        )
    if tp_size % nnodes:
        raise ValueError(f"--tp-size {tp_size} cannot be spread evenly over --nnodes {nnodes}: choose a multiple of it")
    if node_rank >= nnodes:
        raise ValueError(f"--node-rank {node_rank} must be below --nnodes {nnodes}: machines are counted from 0")
    if nnodes > 1 and dist_init_addr is None:
        raise ValueError(f"--nnodes {nnodes} needs --dist-init-addr HOST:PORT, the same on every machine")
    if dist_init_addr is not None:
        host, _, port = dist_init_addr.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ValueError(f"--dist-init-addr {dist_init_addr!r} must be HOST:PORT, an address of machine 0")
    check_shards(text, tp_size)


def check_shards(text: TextConfig, size: int) -> None:
    """``ValueError`` naming every dimension of the model that cannot be cut into ``size`` parts."""
    dims = {"num_attention_heads": text.num_heads, "vocab_size": text.vocab_size}
    dims |= {f"intermediate_size (layer {i})": text.mlp_width(i) for i in reversed(range(text.num_layers))}
    if text.moe is not None:
        dims["moe_intermediate_size"] = text.moe.intermediate_size
    if text.per_layer_input_size:
        dims["vocab_size_per_layer_input"] = text.per_layer_vocab_size
    # equal widths of many layers are one dimension to the reader
    wrong = list({total: f"{name} {total}" for name, total in dims.items() if total % size}.values())
    for kind, heads in sorted({(spec.kind, spec.num_kv_heads) for spec in text.kv_layout.layers}):
        if heads % size and size % heads:
            wrong.append(f"KV heads of {kind} {heads}")
    if wrong:
        raise ValueError(f"--tp-size {size} does not divide {', '.join(wrong)} of this model: choose another size")
