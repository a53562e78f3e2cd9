"""Speculation changes no token: every batch size, draft length, page size, chunking, arrival order, seed and abort."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from fixtures.make_tiny_gemma4 import KINDS
from fixtures.scheduler_driver import SchedulerDriver
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.embedded import EmbeddedModel
from sglang.srt.utils.hf_transformers.tokenizer import load_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_TOKENS = 20
BATCHES = STEPS = range(1, 7)
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=NUM_TOKENS, ignore_eos=True)


def prompts_of(vocab: int, num: int, seed: int = 5) -> list[list[int]]:
    rng = random.Random(seed)
    lengths = [1, 7, 23, 8, 40, 3, 17, 9]
    return [[rng.randrange(4, vocab) for _ in range(lengths[i % len(lengths)])] for i in range(num)]


def mixed_params(num: int) -> list[SamplingParams]:
    """Greedy and sampled rows side by side, of different lengths, so that rows leave the batch at different times."""
    kinds = [
        {"temperature": 0.0},
        {"temperature": 1.0, "sampling_seed": 11},
        {"temperature": 0.7, "top_k": 20, "sampling_seed": 12},
        {"temperature": 1.3, "top_p": 0.8, "sampling_seed": 13},
        {"temperature": 0.9, "min_p": 0.05, "sampling_seed": 14},
        {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "min_p": 0.02, "sampling_seed": 15},
    ]
    return [
        SamplingParams(max_new_tokens=NUM_TOKENS - 3 * (i % 4), ignore_eos=True, **kinds[i % len(kinds)])  # type: ignore[arg-type]
        for i in range(num)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_grid_of_batch_and_draft_length(kind: str, tiny_checkpoints: Path) -> None:
    target, assistant = tiny_checkpoints / kind, tiny_checkpoints / f"{kind}-assistant"
    prompts = prompts_of(512, len(BATCHES))
    plain = SchedulerDriver(target, None, 0)
    alone = [plain.tokens([prompt], [GREEDY])[0] for prompt in prompts]
    assert all(len(tokens) == NUM_TOKENS for tokens in alone)
    accepted = 0
    for steps in STEPS:
        driver = SchedulerDriver(target, assistant, steps)
        for batch in BATCHES:
            driver.flush()
            outs = driver.run(prompts[:batch], [GREEDY] * batch)
            assert [out.token_ids for out in outs] == alone[:batch], f"{steps=} {batch=}"
            accepted += sum(out.spec.accepted_tokens for out in outs if out.spec is not None)
    assert accepted > 0, "no draft was ever accepted, so nothing was tested"


TREES = [(1, 2, 3), (1, 3, 4), (2, 2, 4), (3, 2, 11), (3, 3, 3), (4, 3, 9), (6, 2, 7), (6, 3, 16), (5, 3, 20)]


@pytest.mark.parametrize("kind", KINDS)
def test_grid_of_batch_and_tree(kind: str, tiny_checkpoints: Path) -> None:
    """Steps, branches and nodes; more nodes than the compiled attention takes among them."""
    target, assistant = tiny_checkpoints / kind, tiny_checkpoints / f"{kind}-assistant"
    prompts, params = prompts_of(512, len(BATCHES)), mixed_params(len(BATCHES))
    plain = SchedulerDriver(target, None, 0)
    alone = [plain.tokens([prompt], [param])[0] for prompt, param in zip(prompts, params, strict=True)]
    branched = 0
    for steps, topk, nodes in TREES:
        for page_size in (1, 16):
            options = {"speculative_eagle_topk": topk, "speculative_num_draft_tokens": nodes, "page_size": page_size}
            driver = SchedulerDriver(target, assistant, steps, **options)
            for batch in BATCHES[:: 2 if page_size == 1 else 5]:
                driver.flush()
                outs = driver.run(prompts[:batch], params[:batch])
                assert [out.token_ids for out in outs] == alone[:batch], f"{steps=} {topk=} {nodes=} {batch=}"
            branched += int((driver.worker._buffers.parents[:, 1:].diff(dim=1) == 0).sum())
    assert branched > 0, "no node had two children, so nothing but chains was tested"


@pytest.mark.parametrize(("topk", "page_size"), [(1, 1), (1, 4), (1, 16), (2, 1), (3, 4), (2, 16)])
@pytest.mark.parametrize("chunk", [5, 2048])
@pytest.mark.parametrize("kind", ["eseries", "dense_keqv"])
def test_pages_chunks_prefixes_arrivals_and_sampling(
    kind: str, chunk: int, topk: int, page_size: int, tiny_checkpoints: Path
) -> None:
    target, assistant = tiny_checkpoints / kind, tiny_checkpoints / f"{kind}-assistant"
    shared = prompts_of(512, 1, seed=9)[0] * 30
    prompts = [*prompts_of(512, 4), *[shared + tail for tail in prompts_of(512, 3, seed=8)]]
    params = mixed_params(len(prompts))
    plain = SchedulerDriver(target, None, 0, disable_radix_cache=True)
    alone = [plain.tokens([prompt], [param])[0] for prompt, param in zip(prompts, params, strict=True)]
    chunk = -(-chunk // page_size) * page_size
    driver = SchedulerDriver(
        target, assistant, 4, speculative_eagle_topk=topk, page_size=page_size, chunked_prefill_size=chunk
    )
    for arrivals in ([0] * 7, [0, 1, 2, 3, 5, 8, 13]):
        assert driver.tokens(prompts, params, arrivals=arrivals) == alone
    outs = driver.run(prompts, params)
    assert [out.token_ids for out in outs] == alone
    assert sum(out.cached_tokens for out in outs) > 0, "the second time the prompts come from the prefix cache"


@pytest.mark.parametrize("topk", [1, 2])
def test_requests_that_leave_disturb_nobody(topk: int, tiny_checkpoints: Path) -> None:
    target, assistant = tiny_checkpoints / "eseries", tiny_checkpoints / "eseries-assistant"
    prompts, params = prompts_of(512, 8), mixed_params(8)
    plain = SchedulerDriver(target, None, 0)
    alone = [plain.tokens([prompt], [param])[0] for prompt, param in zip(prompts, params, strict=True)]
    rng = random.Random(3)
    for _ in range(6):
        driver = SchedulerDriver(
            target, assistant, 3, speculative_eagle_topk=topk, chunked_prefill_size=11, max_total_tokens=220
        )
        arrivals = [rng.randrange(6) for _ in prompts]
        aborts = {i: arrivals[i] + rng.randrange(1, 9) for i in rng.sample(range(8), 3)}
        outs = driver.run(prompts, params, arrivals=arrivals, aborts=aborts)
        for i, out in enumerate(outs):
            assert out.finish_reason is not None
            if out.finish_reason.type == "abort":
                assert i in aborts and out.token_ids == alone[i][: len(out.token_ids)]
            else:
                assert out.token_ids == alone[i]


def test_trained_pair_on_the_diagonal(trained_pair: EmbeddedModel) -> None:
    """B = N is where a batch dimension and a draft width can be mixed up unseen."""
    tokenizer = load_tokenizer(trained_pair.target, trust_remote_code=False)
    texts = ["Count from 1 to 20.", "Tell me a story.", "What is 7 + 8?", "Spell the word river.", "Capital of Peru?"]
    prompts = [
        list(tokenizer.apply_chat_template([{"role": "user", "content": t}], add_generation_prompt=True)["input_ids"])
        for t in texts
    ]
    params = [SamplingParams(temperature=t, sampling_seed=4, max_new_tokens=30) for t in (0.0, 0.9, 0.0, 1.0, 0.0)]
    plain = SchedulerDriver(trained_pair.target, None, 0)
    alone = [plain.tokens([prompt], [param])[0] for prompt, param in zip(prompts, params, strict=True)]
    for size in range(2, 6):
        driver = SchedulerDriver(trained_pair.target, trained_pair.assistant, size - 1)
        assert driver.tokens(prompts[:size], params[:size]) == alone[:size]


def test_seeded_request_reproduces_at_any_batch(tiny_checkpoints: Path) -> None:
    target, assistant = tiny_checkpoints / "dense", tiny_checkpoints / "dense-assistant"
    prompt = prompts_of(512, 3)[2]
    seeded = SamplingParams(temperature=1.0, sampling_seed=77, max_new_tokens=NUM_TOKENS, ignore_eos=True)
    other = SamplingParams(temperature=1.0, sampling_seed=78, max_new_tokens=NUM_TOKENS, ignore_eos=True)
    driver = SchedulerDriver(target, assistant, 3)
    alone = driver.tokens([prompt], [seeded])[0]
    for batch in (2, 5):
        outs = driver.tokens([prompt] * batch, [other] * (batch - 1) + [seeded])
        assert outs[-1] == alone and outs[0] != alone
