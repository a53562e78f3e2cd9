"""Drafting borrows: it changes no byte of KV, and rejected drafts leave no trace in later drafts."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
import torch

from fixtures.make_tiny_gemma4 import KINDS
from fixtures.scheduler_driver import SchedulerDriver
from sglang.srt.configs.model_config import SLIDING
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.mem_cache.kv_pool import KVCache
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.models.gemma4_mtp import build_frozen_kv_mtp_context, check_pair
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.frozen_kv_mtp_info import FrozenKVMTPVerifyInput
from sglang.srt.speculative.frozen_kv_mtp_utils import expand_for_topk_draft, frozen_kv_target_view
from sglang.srt.speculative.frozen_kv_mtp_worker import FrozenKVMTPWorker
from sglang.srt.speculative.frozen_kv_mtp_worker_v2 import FrozenKVMTPWorkerV2
from sglang.srt.utils.hf_transformers.config import load_model_config

pytestmark = pytest.mark.usefixtures("one_thread")
PARAMS = SamplingParams(temperature=0.0, max_new_tokens=64, ignore_eos=True)


class Rounds:
    """One request, taken through extends and rounds by hand."""

    def __init__(self, worker: FrozenKVMTPWorker, ids: list[int]) -> None:
        self.worker = worker
        self.req = Req("r", array("i", ids), len(ids), PARAMS, 64, frozenset(), 0, False, 0.0)
        self.req.kv = worker.kv_manager.open(self.req.token_ids)
        self.sampling = SamplingBatchInfo.from_params([PARAMS], [0], torch.device("cpu"))

    def prefill(self) -> None:
        kv, total = self.req.kv, len(self.req.token_ids)
        assert kv is not None and self.worker.kv_manager.grow(kv, total)
        batch = ScheduleBatch(ForwardMode.EXTEND, (self.req,), (total - kv.committed_len,), self.sampling, None)
        self.seed = self.worker.forward_batch_generation(batch).next_draft_input
        self.worker.kv_manager.commit(kv, total)
        assert self.seed is not None
        self.req.token_ids.append(int(self.seed.bonus_tokens[0]))

    def batch(self) -> ScheduleBatch:
        kv = self.req.kv
        assert kv is not None
        assert self.worker.kv_manager.grow(kv, kv.committed_len + self.worker.capabilities.max_tokens_per_step)
        return ScheduleBatch(ForwardMode.DECODE, (self.req,), (), self.sampling, self.seed)

    def draft(self) -> FrozenKVMTPVerifyInput:
        with torch.inference_mode():
            return self.worker.draft(self.batch())

    def round(self, drafts: torch.Tensor | None = None) -> int:
        """One round, with these drafts instead of the assistant's if given; returns the tokens gained."""
        chain = self.draft()
        if drafts is not None:
            tokens = torch.cat([chain.draft_tokens[:, :1], drafts[None]], dim=1)
            chain = FrozenKVMTPVerifyInput(tokens, chain.positions, chain.parents)
        with torch.inference_mode():
            result = self.worker.verify(self.batch(), chain)
        gained = int(result.accept_lens[0])
        self.req.token_ids.extend(result.next_token_ids[0, :gained].tolist())
        self.worker.kv_manager.commit(self.req.kv, len(self.req.token_ids) - 1)
        self.seed = result.next_draft_input
        return gained


def make_worker(folder: Path, kind: str, steps: int = 4, **options: object) -> FrozenKVMTPWorker:
    worker = SchedulerDriver(folder / kind, folder / f"{kind}-assistant", steps, **options).worker
    assert isinstance(worker, FrozenKVMTPWorker)
    return worker


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_changes_no_byte(kind: str, tiny_checkpoints: Path) -> None:
    worker = make_worker(tiny_checkpoints, kind)
    rounds = Rounds(worker, list(range(10, 33)))
    rounds.prefill()
    pool = worker.target.memory.pool
    for _ in range(3):
        before = pool.digest()
        rounds.draft()
        assert pool.digest() == before
        rounds.round()
        assert pool.digest() != before, "the verify pass does write"


@pytest.mark.parametrize("kind", KINDS)
def test_draft_after_rejection_equals_draft_after_fresh_prefill(kind: str, tiny_checkpoints: Path) -> None:
    worker = make_worker(tiny_checkpoints, kind)
    rounds = Rounds(worker, list(range(40, 61)))
    rounds.prefill()
    best = rounds.draft().draft_tokens[0, 1:]
    for num_good in range(3):
        wrong = (best.clone() + 1) % 512  # almost surely rejected; any number of accepted ones will do
        if num_good:
            wrong[:num_good] = rounds.draft().draft_tokens[0, 1 : 1 + num_good]
        rounds.round(wrong)
    after = rounds.draft().draft_tokens
    tokens = list(rounds.req.token_ids)
    worker.kv_manager.close(rounds.req.kv, rounds.req.token_ids)
    assert worker.kv_manager.flush()
    fresh = Rounds(worker, tokens[:-1])
    fresh.prefill()
    assert list(fresh.req.token_ids) == tokens
    assert torch.equal(fresh.draft().draft_tokens, after)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_an_accepted_branch_leaves_the_kv_of_plain_decode(kind: str, page_size: int, tiny_checkpoints: Path) -> None:
    """The tokens to come, on branches that are never the first, among wrong ones."""
    prompt = list(range(40, 61))
    params = SamplingParams(temperature=0.0, max_new_tokens=4, ignore_eos=True)
    _, *right = SchedulerDriver(tiny_checkpoints / kind, None, 0).tokens([prompt], [params])[0]
    tree = {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 7, "page_size": page_size}
    worker = make_worker(tiny_checkpoints, kind, 3, **tree)
    rounds = Rounds(worker, prompt)
    rounds.prefill()
    parents = torch.tensor([[0, 0, 0, 1, 2, 2, 5]])
    depths = torch.tensor([[0, 1, 1, 2, 2, 2, 3]])
    nodes = torch.tensor(
        [[rounds.req.token_ids[-1], right[0] ^ 1, right[0], right[1], right[1] ^ 1, right[1], right[2]]]
    )
    with torch.inference_mode():
        result = worker.verify(rounds.batch(), FrozenKVMTPVerifyInput(nodes, len(prompt) + depths, parents))
    assert result.accept_lens.tolist() == [4] and result.next_token_ids[0, :3].tolist() == list(right)
    kv, pool = rounds.req.kv, worker.target.memory.pool
    rounds.req.token_ids.extend(result.next_token_ids[0].tolist())
    worker.kv_manager.commit(kv, len(rounds.req.token_ids) - 1)
    rounds.seed = result.next_draft_input
    after, tokens = rounds.draft().draft_tokens, list(rounds.req.token_ids)
    slots = torch.from_numpy(worker.kv_manager.locs(kv, 0, kv.committed_len))
    written = [buffer[slots] for spec in pool.layout.owners for buffer in pool.get_kv_buffer(spec.layer_id)]
    worker.kv_manager.close(kv, tokens)
    assert worker.kv_manager.flush()
    fresh = Rounds(worker, tokens[:-1])
    fresh.prefill()
    assert list(fresh.req.token_ids) == tokens and torch.equal(fresh.draft().draft_tokens, after)
    slots = torch.from_numpy(worker.kv_manager.locs(fresh.req.kv, 0, len(tokens) - 1))
    expected = [buffer[slots] for spec in pool.layout.owners for buffer in pool.get_kv_buffer(spec.layer_id)]
    for got, wanted in zip(written, expected, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def test_uncommitted_slots_are_invisible(tiny_checkpoints: Path) -> None:
    """Whatever stands in slots behind the committed tokens, the draft does not see it."""
    worker = make_worker(tiny_checkpoints, "dense")
    rounds = Rounds(worker, list(range(40, 61)))
    rounds.prefill()
    expected = rounds.draft().draft_tokens
    kv, pool = rounds.req.kv, worker.target.memory.pool
    assert kv is not None and isinstance(pool, KVCache)
    reserve = torch.from_numpy(worker.kv_manager.locs(kv, kv.committed_len, kv.allocated_len))
    assert len(reserve) >= 4
    for spec in pool.layout.owners:
        key, value = pool.get_kv_buffer(spec.layer_id)
        key[reserve], value[reserve] = float("nan"), float("nan")
    assert torch.equal(rounds.draft().draft_tokens, expected)


def test_the_worker_holds_no_writer(tiny_checkpoints: Path) -> None:
    worker = make_worker(tiny_checkpoints, "dense")
    assert not isinstance(worker.memory.pool, KVCache)
    assert not isinstance(worker.context.target_token_to_kv_pool, KVCache)
    with pytest.raises(RuntimeError, match="bound"):
        other = build_frozen_kv_mtp_context(worker.target.runner.config, worker.runner.config, worker.kv_reader().pool)
        worker.runner.model.bind_frozen_kv_context(other, worker.target.runner.model.embed_tokens)


def test_a_wrong_pair_is_one_error_with_every_mismatch(tiny_checkpoints: Path) -> None:
    def config(name: str):
        return load_model_config(tiny_checkpoints / name, overrides={}, trust_remote_code=False)

    check_pair(config("moe"), config("moe-assistant"))
    wrong = load_model_config(
        tiny_checkpoints / "dense-assistant",
        overrides={"backbone_hidden_size": 96, "text_config": {"sliding_window": 16, "num_key_value_heads": 4}},
        trust_remote_code=False,
    )
    with pytest.raises(ValueError) as error:
        check_pair(config("dense"), wrong)
    text = str(error.value)
    assert "--speculative-draft-model-path" in text and "96" in text
    assert f"{SLIDING} window: target 8, assistant 16" in text and f"{SLIDING} KV heads: target 2, assistant 4" in text


@pytest.mark.parametrize("on_host", [None, (5, 9)])
def test_branches_are_rows_of_their_request(on_host: tuple[int, ...] | None) -> None:
    geometry = frozen_kv_target_view(torch.tensor([0, 1]), torch.tensor([5, 9]), on_host, 64)
    assert geometry.max_kv_len == (64 if on_host is None else 9)
    assert geometry.kv_lens.tolist() == [5, 9] and geometry.positions.tolist() == [5, 9]
    wide = expand_for_topk_draft(geometry, 2)
    assert wide.kv_lens.tolist() == [5, 9] and wide.q_lens_cpu == (2, 2), "so that keys are read once for both"
    assert wide.positions.tolist() == [5, 5, 9, 9] and wide.host == geometry.host


@pytest.mark.parametrize("overlap", [False, True])
def test_worker_of_each_order(tiny_checkpoints: Path, overlap: bool) -> None:
    worker = make_worker(tiny_checkpoints, "dense", disable_overlap_schedule=not overlap)
    assert isinstance(worker, FrozenKVMTPWorkerV2) == worker.capabilities.supports_overlap == overlap
