"""Logits of every variant agree with transformers: prefill, chunks, cached decode, verification, in mixed batches."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fixtures.make_tiny_gemma4 import KINDS
from oracle.engine_probe import EngineProbe
from oracle.hf_reference import HFReference, PrefillResult
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.utils.embedded import EmbeddedModel

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-4
FLAT_KINDS = ("dense", "dense_keqv", "eseries", "moe")
# the window is 8: shorter, at its edges, and several windows long
PROMPT_LENS = (1, 5, 8, 27)
NUM_DECODE_STEPS = 14


def token_ids(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(100 * seed + length)
    return [2, *(rng.randrange(3, 300) for _ in range(length - 1))]


def assert_close(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    assert got.shape == want.shape, f"{what}: {tuple(got.shape)} instead of {tuple(want.shape)}"
    error = (got - want).abs().max().item()
    assert error <= TOLERANCE, f"{what}: largest difference {error:.2e}"


@pytest.fixture(
    scope="module", params=[*(("composite", k) for k in KINDS), *(("flat", k) for k in FLAT_KINDS)], ids="-".join
)
def checkpoint(request: pytest.FixtureRequest, tiny_checkpoints: Path, tiny_checkpoints_flat: Path) -> Path:
    layout, kind = request.param
    return (tiny_checkpoints if layout == "composite" else tiny_checkpoints_flat) / kind


@pytest.fixture(scope="module")
def hf(checkpoint: Path) -> HFReference:
    return HFReference(checkpoint)


@pytest.fixture(scope="module")
def reference(hf: HFReference) -> Callable[[list[int]], PrefillResult]:
    """Transformers' uncached forward over a sequence, computed once per sequence."""
    known: dict[tuple[int, ...], PrefillResult] = {}

    def prefill(ids: list[int]) -> PrefillResult:
        if tuple(ids) not in known:
            known[tuple(ids)] = hf.prefill(ids)
        return known[tuple(ids)]

    return prefill


Reference = Callable[[list[int]], PrefillResult]


@pytest.mark.parametrize("length", PROMPT_LENS)
def test_prefill_every_row(checkpoint: Path, reference: Reference, length: int) -> None:
    ids = token_ids(length)
    rows, want = EngineProbe(checkpoint).run({0: ids})[0], reference(ids)
    assert_close(rows.logits, want.logits, "logits")
    assert_close(rows.hidden, want.hidden, "hidden states")


@pytest.mark.parametrize("length", PROMPT_LENS)
def test_prefill_last_row(checkpoint: Path, reference: Reference, length: int) -> None:
    """What a prefill really asks for; layers that share KV compute one row. The KV must be whole: decode goes on."""
    ids, following = token_ids(length), token_ids(3, seed=9)
    probe, want = EngineProbe(checkpoint), reference(ids + following)
    rows = probe.run({0: ids}, last_only=True)[0]
    assert_close(rows.logits, want.logits[length - 1 : length], "last logits")
    assert_close(rows.hidden, want.hidden[length - 1 : length], "last hidden state")
    for i, token in enumerate(following):
        rows = probe.run({0: [token]}, ForwardMode.DECODE)[0]
        assert_close(rows.logits, want.logits[length + i][None], f"decode step {i}")


@pytest.mark.parametrize("chunk", [1, 3, 8, 13])
def test_chunked_prefill(checkpoint: Path, reference: Reference, chunk: int) -> None:
    """All rows of all chunks, and then once more with only the last row of each chunk."""
    ids = token_ids(27)
    probe, want = EngineProbe(checkpoint), reference(ids)
    for start in range(0, len(ids), chunk):
        piece = ids[start : start + chunk]
        end = start + len(piece)
        rows = probe.run({0: piece})[0]
        assert_close(rows.logits, want.logits[start:end], f"chunk at {start}")
        rows = probe.run({1: piece}, last_only=True)[1]
        assert_close(rows.logits, want.logits[end - 1 : end], f"last row of the chunk at {start}")


@pytest.mark.parametrize("length", PROMPT_LENS)
def test_cached_decode_past_the_window(checkpoint: Path, hf: HFReference, reference: Reference, length: int) -> None:
    ids, following = token_ids(length), token_ids(NUM_DECODE_STEPS, seed=1)
    cached = hf.decode(ids, following)
    want = reference(ids + following)
    probe = EngineProbe(checkpoint)
    probe.run({0: ids})
    for i, token in enumerate(following):
        rows = probe.run({0: [token]}, ForwardMode.DECODE)[0]
        assert_close(rows.logits[0], cached[i], f"logits of step {i} against transformers' cache")
        assert_close(rows.hidden[0], want.hidden[length + i], f"hidden state of step {i}")


def test_mixed_batch(checkpoint: Path, reference: Reference) -> None:
    """Requests of unlike lengths prefill, decode and verify together; each gets what it would get alone."""
    prompts = {0: token_ids(5), 1: token_ids(27), 2: token_ids(1), 3: token_ids(8)}
    following = {r: token_ids(9, seed=20 + r) for r in prompts}
    want = {r: reference(prompts[r] + following[r]) for r in prompts}
    probe = EngineProbe(checkpoint)
    done = dict.fromkeys(prompts, 0)

    def step(inputs: dict[int, list[int]], mode: ForwardMode) -> None:
        for request, rows in probe.run(inputs, mode).items():
            first, done[request] = done[request], done[request] + len(inputs[request])
            expected = want[request].logits[first : done[request]]
            assert_close(rows.logits, expected, f"request {request}, {mode.name}, rows {first}..{done[request]}")

    def piece(request: int, num_tokens: int) -> list[int]:
        return (prompts[request] + following[request])[done[request] : done[request] + num_tokens]

    step({0: prompts[0], 1: prompts[1]}, ForwardMode.EXTEND)
    step({3: prompts[3], 2: prompts[2]}, ForwardMode.EXTEND)
    step({r: piece(r, 1) for r in (2, 0, 3, 1)}, ForwardMode.DECODE)
    step({r: piece(r, 4) for r in (0, 1, 2, 3)}, ForwardMode.TARGET_VERIFY)
    step({r: piece(r, 1) for r in (1, 3)}, ForwardMode.DECODE)
    step({0: piece(0, 3), 2: piece(2, 2), 1: piece(1, 3)}, ForwardMode.TARGET_VERIFY)


def test_media_placeholders(checkpoint: Path, reference: Reference) -> None:
    """An image, audio or video token without its medium is padding to a composite checkpoint, text to a flat one."""
    ids = [*token_ids(5), 500, 501, *token_ids(3, seed=4), 502, 503, 7]
    assert_close(EngineProbe(checkpoint).run({0: ids})[0].logits, reference(ids).logits, "logits")


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_verify_then_reject(checkpoint: Path, reference: Reference, kept: int) -> None:
    """Rejected drafts leave stale KV behind; what is written over them later must hide it completely."""
    ids, drafts, after = token_ids(11), token_ids(6, seed=2), token_ids(7, seed=3)
    probe = EngineProbe(checkpoint)
    probe.run({0: ids})
    rows = probe.run({0: drafts}, ForwardMode.TARGET_VERIFY)[0]
    assert_close(rows.logits, reference(ids + drafts).logits[len(ids) :], "verified rows")
    probe.rewind(0, len(ids) + kept)
    rows = probe.run({0: after}, ForwardMode.TARGET_VERIFY)[0]
    assert_close(
        rows.logits, reference(ids + drafts[:kept] + after).logits[len(ids) + kept :], "rows after a rejection"
    )


def test_trained_pair(trained_pair: EmbeddedModel) -> None:
    """Window 64: a prompt of 90 tokens in two chunks, then decode."""
    ids, following = token_ids(90), token_ids(12, seed=1)
    want = HFReference(trained_pair.target).prefill(ids + following).logits
    probe = EngineProbe(trained_pair.target)
    assert_close(probe.run({0: ids[:50]})[0].logits, want[:50], "first chunk")
    assert_close(probe.run({0: ids[50:]})[0].logits, want[50:90], "second chunk")
    for i, token in enumerate(following):
        assert_close(probe.run({0: [token]}, ForwardMode.DECODE)[0].logits[0], want[90 + i], f"decode step {i}")
