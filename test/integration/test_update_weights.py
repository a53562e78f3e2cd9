"""Weights that change while an engine runs: answers are those of an engine that was started with them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fixtures.changed_checkpoint import change_checkpoint
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.utils.embedded import EmbeddedModel

PROMPTS = [
    f"<bos><|turn>user\n{question}<turn|>\n<|turn>model\n" for question in ("Count from 3 to 20.", "What is 7 + 5?")
]
GREEDY = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
SPEC = {"speculative_algorithm": "FROZEN_KV_MTP", "speculative_num_steps": 4}
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def others(trained_pair: EmbeddedModel, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Another target and another assistant of the shipped pair's shape."""
    folder = tmp_path_factory.mktemp("others")
    return change_checkpoint(trained_pair.target, folder / "target"), change_checkpoint(
        trained_pair.assistant, folder / "assistant"
    )


def _engine(**kwargs: Any) -> Engine:
    return Engine(**{"model_path": "tiny-gemma4", "device": "cpu", "log_level": "warning", **kwargs})


def _answers(engine: Engine) -> tuple[list[list[int]], int]:
    """Tokens of both answers, one asked for after the other, and how much of the first prompt was in the cache."""
    replies = [engine.generate(prompt, GREEDY) for prompt in PROMPTS]
    return [reply["output_ids"] for reply in replies], replies[0]["meta_info"]["cached_tokens"]


@pytest.fixture(scope="module")
def expected(others: tuple[Path, Path]) -> Iterator[tuple[list[list[int]], list[list[int]]]]:
    """Answers of plain engines that were started with the shipped weights, and with the others."""
    with _engine() as shipped, _engine(model_path=str(others[0]), tokenizer_path="tiny-gemma4") as other:
        answers = _answers(shipped)[0], _answers(other)[0]
    assert answers[0] != answers[1]
    yield answers


def _accept_length(engine: Engine) -> float:
    return float(engine.generate(PROMPTS[0], GREEDY)["meta_info"]["spec_accept_length"])


@pytest.mark.parametrize("graphs", [{}, {"cuda_graph_bs": [1, 2]}], ids=["eager", "fixed shapes"])
@pytest.mark.parametrize("spec", [{}, SPEC], ids=["plain", "speculative"])
def test_answers_follow_the_weights(
    spec: dict[str, Any],
    graphs: dict[str, Any],
    others: tuple[Path, Path],
    expected: tuple[list[list[int]], list[list[int]]],
    trained_pair: EmbeddedModel,
) -> None:
    with _engine(**spec, **graphs) as engine:
        assert _answers(engine)[0] == expected[0]
        assert engine.update_weights_from_disk(str(others[0])) == (True, "")
        assert engine.get_server_info()["model_path"] == str(others[0])
        # what was cached before belongs to other weights
        assert _answers(engine) == (expected[1], 0)
        assert engine.update_weights_from_disk(str(trained_pair.target)) == (True, "")
        assert _answers(engine) == (expected[0], 0)


def test_another_assistant_changes_what_is_accepted_and_no_answer(
    others: tuple[Path, Path], expected: tuple[list[list[int]], list[list[int]]], trained_pair: EmbeddedModel
) -> None:
    target, home = str(trained_pair.target), str(trained_pair.assistant)
    with _engine(**SPEC) as engine:
        before = _accept_length(engine)
        assert engine.update_weights_from_disk(target, str(others[1])) == (True, "")
        assert engine.get_server_info()["speculative_draft_model_path"] == str(others[1])
        assert _accept_length(engine) != before and _answers(engine)[0] == expected[0]
        assert engine.update_weights_from_disk(target, home) == (True, "")
        assert _accept_length(engine) == before


def test_what_does_not_fit_leaves_everything_as_it_was(
    others: tuple[Path, Path],
    expected: tuple[list[list[int]], list[list[int]]],
    trained_pair: EmbeddedModel,
    tiny_checkpoints: Path,
    tmp_path: Path,
) -> None:
    cut = Path(shutil.copytree(others[0], tmp_path / "cut"))
    shard = max(cut.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])
    own_code = Path(shutil.copytree(others[0], tmp_path / "own_code"))
    config = json.loads((own_code / "config.json").read_text())
    (own_code / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoConfig": "x.Y"}}))
    bad: list[tuple[tuple[Any, ...], str]] = [
        ((str(tmp_path / "none"),), "has no config.json"),
        ((str(tiny_checkpoints / "dense"),), "is not of the shape that is served: "),
        ((str(cut),), "is not a complete safetensors file"),
        ((str(own_code),), "--trust-remote-code"),
        ((str(trained_pair.assistant),), "is not of the shape that is served: architecture is"),
        # both are looked at before either is read
        ((str(others[0]), str(tiny_checkpoints / "dense-assistant")), "is not of the shape that is served: "),
    ]
    with _engine(**SPEC) as engine:
        for paths, message in bad:
            done, said = engine.update_weights_from_disk(*paths)
            assert not done and message in said, (paths, said)
            assert _answers(engine)[0] == expected[0], paths
        assert engine.get_server_info()["model_path"] == str(trained_pair.target.resolve())
    with _engine() as plain:
        done, said = plain.update_weights_from_disk(str(others[0]), str(others[1]))
        assert not done and "this server drafts nothing" in said and _answers(plain)[0] == expected[0]


def test_what_the_engine_is_not() -> None:
    with _engine() as engine:
        with pytest.raises(ValueError, match=r"Engine\.encode is not supported"):
            engine.encode("Hello")
        with pytest.raises(ValueError, match="SGLANG_TORCH_PROFILER_DIR"):
            engine.start_profile()
        with pytest.raises(ValueError, match="no profile is running"):
            engine.stop_profile()
