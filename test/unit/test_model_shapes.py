"""The benchmark's five sizes: their parameter counts are the models', and the byte counts follow from them."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from sglang.srt.configs.registries import MODELS, load_entry
from sglang.srt.models.gemma4_mtp import check_pair
from sglang.srt.server_args_speculative import default_num_steps

ROOT = Path(__file__).resolve().parents[2]
# published sizes of the text parts, in billions of parameters, and of the assistants in millions
PUBLISHED = {
    "e2b": (4.63, 77.99),
    "e4b": (7.46, 78.78),
    "12b": (11.91, 422.86),
    "26b-a4b": (25.23, 419.71),
    "31b": (30.70, 469.52),
}


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmark"))
    import model_shapes

    return model_shapes


def built_parameters(config: object) -> int:
    """Elements of every tensor the model expects, from a model without memory."""
    model = load_entry(MODELS, config.architecture)(config, torch.bfloat16, torch.device("meta"))
    return sum(slot.numel() for slot in model.weight_plan(()).slots.values())


@pytest.mark.parametrize("name", [*PUBLISHED, "tiny-gemma4"])
def test_parameters_are_the_models(shapes: ModuleType, name: str, tmp_path: Path) -> None:
    pair = shapes.make_pair(name, tmp_path)
    check_pair(pair.target, pair.assistant)
    assert default_num_steps(pair.target.text)[0] == pair.num_steps
    counts = [shapes.parameter_count(config) for config in (pair.target, pair.assistant)]
    assert counts == [built_parameters(config) for config in (pair.target, pair.assistant)]
    if name in PUBLISHED:
        assert (round(counts[0] / 1e9, 2), round(counts[1] / 1e6, 2)) == PUBLISHED[name]


def test_a_pass_reads_every_weight_but_the_tables(shapes: ModuleType, tmp_path: Path) -> None:
    pair = shapes.make_pair("e4b", tmp_path)
    text = pair.target.text
    one = shapes.pass_traffic(pair.target, 1, 1, 1000, 2)
    tables = text.vocab_size * text.num_layers * text.per_layer_input_size
    assert one.weights + one.head == 2 * (shapes.parameter_count(pair.target) - tables)
    assert one.tables == 2 * (2560 + 42 * 256)
    # 35 sliding layers see 512 tokens of 2 heads of 256, 7 full layers all 1001 of 2 heads of 512
    assert one.kv_read == 2 * 2 * (35 * 512 * 2 * 256 + 7 * 1001 * 2 * 512)
    assert one.kv_write == 2 * 2 * (20 * 2 * 256 + 4 * 2 * 512)
    assert shapes.pass_traffic(pair.target, 8, 4, 1000, 2).weights == one.weights


def test_experts_that_rows_share_are_read_once(shapes: ModuleType, tmp_path: Path) -> None:
    assert shapes.expected_distinct(128, 8, 1) == pytest.approx(8.0)
    assert shapes.expected_distinct(128, 8, 2) == pytest.approx(8 + 8 * 120 / 128)
    pair = shapes.make_pair("26b-a4b", tmp_path)
    expert = 30 * 3 * 2816 * 704 * 2
    one, two = (shapes.pass_traffic(pair.target, 1, rows, 100, 2).weights for rows in (1, 2))
    assert two - one == pytest.approx(expert * 7.5)


def test_a_round_is_its_drafts_and_one_pass(shapes: ModuleType, tmp_path: Path) -> None:
    pair = shapes.make_pair("e2b", tmp_path)
    drafts, whole = shapes.draft_traffic(pair, 2, 600, 2), shapes.round_traffic(pair, 3, 2, 600, 2)
    assert whole.total == pytest.approx(3 * drafts.total + shapes.pass_traffic(pair.target, 2, 4, 600, 2).total)
    # of the assistant's 262144 head rows only 2048 centroids and at most 2 x 32 clusters of 128 rows are read
    assert 2 * 256 * (2048 + 32 * 128) < drafts.head < 2 * 256 * (2048 + 64 * 128)


def test_skipping_rows_saves_what_sharing_layers_cost(shapes: ModuleType, tmp_path: Path) -> None:
    dense, sharing = shapes.make_pair("12b", tmp_path), shapes.make_pair("e2b", tmp_path)
    assert shapes.prefill_flops(dense.target.text, 2048) == shapes.prefill_flops(
        dense.target.text, 2048, skip_sharing=False
    )
    few, all_rows = (shapes.prefill_flops(sharing.target.text, 2048, skip_sharing=skip) for skip in (True, False))
    assert 2.5 < all_rows / few < 3.5
    # a dense model: about 2 FLOPs per weight and token
    weights = shapes.parameter_count(dense.target) - 262144 * 3840
    assert shapes.prefill_flops(dense.target.text, 2048) == pytest.approx(2 * weights * 2048, rel=0.1)


def test_an_unknown_size_is_refused(shapes: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="e4b"):
        shapes.make_pair("e5b", tmp_path)
