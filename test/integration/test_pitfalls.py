"""What goes wrong in servers with speculation and is shown nowhere else; `docs/pitfalls.md` has the whole list."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from fixtures.scheduler_driver import SchedulerDriver
from sglang.srt.managers.worker_factory import create_worker
from sglang.srt.sampling.logprobs import LogprobOptions
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.server_args_resolution import resolve_server_args

pytestmark = pytest.mark.usefixtures("one_thread")

CHAIN: dict[str, Any] = {}
TREE: dict[str, Any] = {"speculative_eagle_topk": 2}


def prompt(num: int, start: int = 4) -> list[int]:
    return [4 + (start + 37 * j + 11 * start * j) % 490 for j in range(num)]


@pytest.mark.parametrize("options", [{}, {"cuda_graph_bs": (4,)}, TREE], ids=["chain", "padded", "tree"])
def test_a_hundred_identical_runs_give_identical_bytes(options: dict[str, Any], tiny_checkpoints: Path) -> None:
    driver = SchedulerDriver(tiny_checkpoints / "eseries", tiny_checkpoints / "eseries-assistant", 3, **options)
    params = [SamplingParams(temperature=t, sampling_seed=3, max_new_tokens=6, ignore_eos=True) for t in (0, 1, 0.7)]
    prompts, wishes = [prompt(n, n) for n in (9, 1, 5)], [{"logprobs": LogprobOptions(top_num=1)}, {}, {}]
    seen = set()
    for _ in range(100):
        driver.flush()
        outs = driver.run(prompts, params, wishes=wishes)
        seen.add(repr([(out.token_ids, out.logprobs, out.spec, out.cached_tokens) for out in outs]))
    assert len(seen) == 1


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("options", [CHAIN, TREE], ids=["chain", "tree"])
def test_prefix_hits_are_the_same_on_and_off(options: dict[str, Any], page_size: int, tiny_checkpoints: Path) -> None:
    """Turns of two conversations: prompts and answers of earlier turns are found, as much of them as without drafts."""
    target, assistant = tiny_checkpoints / "dense", tiny_checkpoints / "dense-assistant"
    counts = []
    for steps, extra in ((0, {}), (4, options)):
        driver = SchedulerDriver(target, assistant, steps, page_size=page_size, **extra)
        talks, found = [prompt(20), prompt(20)[:10] + prompt(15, 9)], []
        for turn in range(4):
            params = SamplingParams(temperature=0.0, max_new_tokens=7 + 3 * turn, ignore_eos=True)
            outs = driver.run(talks, [params] * 2, arrivals=[0, 3])
            found.append([out.cached_tokens for out in outs])
            talks = [[*talk, *out.token_ids, *prompt(3, turn)] for talk, out in zip(talks, outs, strict=True)]
        counts.append(found)
    assert counts[0] == counts[1]
    assert min(counts[0][-1]) >= 40, "answers are found as well as prompts"


@pytest.mark.parametrize("steps", [1, 3, 6])
@pytest.mark.parametrize("options", [CHAIN, TREE, {"cuda_graph_bs": (1, 4)}], ids=["chain", "tree", "padded"])
def test_the_end_of_the_context(options: dict[str, Any], steps: int, tiny_checkpoints: Path) -> None:
    """A prompt one token short of it, an answer that reaches it, and answers of one token, beside one another."""
    target, assistant = tiny_checkpoints / "eseries", tiny_checkpoints / "eseries-assistant"
    common = {"context_length": 48, "max_running_requests": 4}
    prompts = [prompt(47), prompt(30, 5), prompt(3, 6), prompt(40, 7)]
    limits = [None, None, 1, None]
    params = [SamplingParams(temperature=0.0, max_new_tokens=limit, ignore_eos=True) for limit in limits]
    plain = SchedulerDriver(target, None, 0, **common)
    alone = [plain.run([p], [q])[0] for p, q in zip(prompts, params, strict=True)]
    assert [len(out.token_ids) for out in alone] == [1, 18, 1, 8]
    outs = SchedulerDriver(target, assistant, steps, **common, **options).run(prompts, params)
    for out, ref in zip(outs, alone, strict=True):
        assert (out.token_ids, out.finish_reason) == (ref.token_ids, ref.finish_reason)
        assert out.finish_reason is not None and out.finish_reason.type == "length"


def test_a_wrong_pair_is_told_before_weights_are_read(tiny_checkpoints: Path, tmp_path: Path) -> None:
    for name in ("dense", "moe-assistant"):
        shutil.copytree(tiny_checkpoints / name, tmp_path / name)
        for file in (tmp_path / name).glob("*.safetensors"):
            file.write_bytes(b"never read")
    config = tmp_path / "moe-assistant" / "config.json"
    values = json.loads(config.read_text()) | {"backbone_hidden_size": 96}
    config.write_text(json.dumps(values))
    args = resolve_server_args(
        ServerArgs(
            model_path=str(tmp_path / "dense"),
            speculative_algorithm="FROZEN_KV_MTP",
            speculative_draft_model_path=str(tmp_path / "moe-assistant"),
            device="cpu",
            max_total_tokens=256,
        )
    )
    with pytest.raises(ValueError, match="--speculative-draft-model-path") as caught:
        create_worker(args)
    assert "96" in str(caught.value)


def test_an_assistant_of_a_shorter_context_drafts_beyond_it(tiny_checkpoints: Path, tmp_path: Path) -> None:
    """Its own bound says how it was trained; positions are the target's."""
    target, assistant = tiny_checkpoints / "dense", tmp_path / "assistant"
    shutil.copytree(tiny_checkpoints / "dense-assistant", assistant)
    config = assistant / "config.json"
    values = json.loads(config.read_text())
    inner = values.get("text_config", values)
    assert inner["max_position_embeddings"] > 60
    inner["max_position_embeddings"] = 32
    config.write_text(json.dumps(values))
    params = SamplingParams(temperature=0.0, max_new_tokens=30, ignore_eos=True)
    outs = [
        SchedulerDriver(target, path, 3).run([prompt(40)], [params])[0]
        for path in (tiny_checkpoints / "dense-assistant", assistant)
    ]
    assert (outs[0].token_ids, outs[0].spec) == (outs[1].token_ids, outs[1].spec)
