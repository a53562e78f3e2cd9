"""Every rank reads its part of a checkpoint, and the parts of all ranks are the whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fixtures.make_tiny_gemma4 import KINDS
from sglang.srt.configs.registries import MODELS, load_entry
from sglang.srt.distributed.parallel_state import TpGroup
from sglang.srt.distributed.sharding import ShardedSlot, shard_layout, slot_shape, slot_tensors
from sglang.srt.model_executor.weight_loader import load_weights
from sglang.srt.server_args import ServerArgs
from sglang.srt.server_args_parallel import check_shards
from sglang.srt.server_args_resolution import resolve_server_args
from sglang.srt.utils.hf_transformers.config import load_model_config


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", [*KINDS, "dense-assistant", "eseries-assistant"])
def test_parts_of_all_ranks_are_the_whole(name: str, size: int, tiny_checkpoints: Path) -> None:
    path = tiny_checkpoints / name
    whole = load_file(path / "model.safetensors")
    seen = {key: torch.zeros(tensor.shape) for key, tensor in whole.items()}
    loaded_bytes = []
    for rank in range(size):
        config = load_model_config(path, overrides={}, trust_remote_code=False)
        model = load_entry(MODELS, config.architecture)(
            config, torch.float32, torch.device("cpu"), group=TpGroup(rank, size)
        )
        plan = model.weight_plan(whole.keys())
        model.finish_loading = lambda: None  # type: ignore[method-assign]  # what is read stays as it was read
        loaded_bytes.append(load_weights(model, path).num_bytes)
        for key, slot in plan.slots.items():
            assert slot_shape(slot) == tuple(whole[key].shape)
            if isinstance(slot, ShardedSlot):
                for start, view in slot.parts:
                    part = whole[key].narrow(slot.dim, start, view.shape[slot.dim])
                    assert torch.equal(view, part), key
                    seen[key].narrow(slot.dim, start, view.shape[slot.dim]).add_(1)
            else:
                (tensor,) = slot_tensors(slot)
                assert torch.equal(tensor, whole[key]), key
                seen[key].add_(1 / size)
    for key in plan.slots:
        # parts that fewer ranks could share than there are, are on several
        assert seen[key].min() == seen[key].max() >= 1, key
    everything = sum(whole[key].numel() * whole[key].element_size() for key in plan.slots)
    assert len(set(loaded_bytes)) == 1
    # an assistant with centroids is the same on every rank
    assert (loaded_bytes[0] == everything) == (name == "eseries-assistant")


@pytest.mark.parametrize(
    ("total", "size", "expected"),
    [
        (4, 2, [[0, 1], [2, 3]]),
        (2, 2, [[0], [1]]),
        (1, 2, [[0], [0]]),
        (2, 4, [[0], [0], [1], [1]]),
        (1, 4, [[0], [0], [0], [0]]),
    ],
)
def test_kv_heads_of_ranks(total: int, size: int, expected: list[list[int]]) -> None:
    assert [list(TpGroup(rank, size).kv_heads(total)) for rank in range(size)] == expected


def test_a_rank_keeps_its_part_of_the_kv(tiny_checkpoints: Path) -> None:
    layout = load_model_config(tiny_checkpoints / "dense_keqv", overrides={}, trust_remote_code=False).text.kv_layout
    assert {(spec.kind, spec.num_kv_heads) for spec in layout.layers} == {
        ("sliding_attention", 2),
        ("full_attention", 1),
    }
    of_rank = shard_layout(layout, TpGroup(1, 2))
    assert {spec.num_kv_heads for spec in of_rank.layers} == {1}
    assert [spec.owner for spec in of_rank.layers] == [spec.owner for spec in layout.layers]


def test_sizes_that_do_not_divide_are_named(tiny_checkpoints: Path) -> None:
    text = load_model_config(tiny_checkpoints / "moe", overrides={}, trust_remote_code=False).text
    for size in (1, 2, 4):
        check_shards(text, size)
    with pytest.raises(ValueError) as error:
        check_shards(text, 5)
    message = str(error.value)
    for dimension in ("num_attention_heads 4", "vocab_size 512", "moe_intermediate_size 24", "KV heads of"):
        assert dimension in message
    assert "(layer 0) 48" in message and message.startswith("--tp-size 5 does not divide ")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tp_size": 3}, "--tp-size 3 does not divide num_attention_heads 4, vocab_size"),
        ({"tp_size": 2, "nnodes": 4}, "--tp-size 2 cannot be spread evenly over --nnodes 4"),
        ({"tp_size": 2, "nnodes": 2}, "--nnodes 2 needs --dist-init-addr"),
        ({"dp_size": 2, "nnodes": 2}, "--dp-size 2 makes replicas on one machine, and --nnodes is 2"),
        ({"dp_size": 2, "dist_init_addr": "a:1"}, "--dist-init-addr 'a:1' cannot be the address of --dp-size"),
        ({"node_rank": 1}, "--node-rank 1 must be below --nnodes 1"),
        ({"dist_init_addr": "somewhere"}, "--dist-init-addr 'somewhere' must be HOST:PORT"),
        ({"dist_init_addr": "a:99999"}, "--dist-init-addr 'a:99999' must be HOST:PORT"),
    ],
)
def test_what_does_not_fit_together(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_server_args(ServerArgs(model_path="tiny-gemma4", **settings))  # type: ignore[arg-type]
