"""Thinking budgets, token by token."""

from __future__ import annotations

from array import array

import pytest
import torch

from sglang.srt.layers.logit_controls import apply_logit_controls
from sglang.srt.managers.detokenizer_manager import TokenPieces
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.sampling.thought_budget import ThoughtBudget, ThoughtTokens
from sglang.srt.utils.embedded import EmbeddedModel
from sglang.srt.utils.hf_transformers.tokenizer import load_tokenizer

OPEN, CLOSE, HEAD, NL, WORD = 7, 8, 1, 2, 3
TOKENS = ThoughtTokens(OPEN, CLOSE, header_len=2)


def closes(prompt: list[int], output: list[int], budget: int) -> list[bool]:
    """Whether the end of the thought is forced behind each prefix of the output."""
    found = []
    for length in range(len(output) + 1):
        state = ThoughtBudget(TOKENS, budget, prompt)
        found.append(state.must_close(state.state([*prompt, *output[:length]], len(prompt))))
    return found


@pytest.mark.parametrize(
    ("prompt", "output", "budget", "forced_at"),
    [
        ([5], [OPEN, HEAD, NL, WORD, WORD, WORD], 2, {5, 6}),
        ([5], [OPEN, HEAD, NL], 0, {3}),
        ([5], [WORD] * 9, 0, set()),
        # the prompt opened the thought, with its header or a part of it; what the prompt thought does not count
        ([OPEN, HEAD, NL, WORD, WORD], [WORD, WORD], 1, {1, 2}),
        ([OPEN], [HEAD, NL, WORD], 1, {3}),
        ([OPEN, HEAD, NL, CLOSE], [WORD, WORD], 0, set()),
        # after the end nothing is forced; a second thought may only have what is left
        ([5], [OPEN, HEAD, NL, WORD, CLOSE, WORD, OPEN, HEAD, NL, WORD], 2, {10}),
        ([5], [OPEN, HEAD, NL, WORD, WORD, CLOSE, WORD, OPEN, HEAD, NL], 2, {5, 10}),
    ],
)
def test_where_the_end_is_forced(prompt: list[int], output: list[int], budget: int, forced_at: set[int]) -> None:
    assert {i for i, forced in enumerate(closes(prompt, output, budget)) if forced} == forced_at


def test_rows_see_their_own_drafts_and_leave_no_trace() -> None:
    req = Req("r", array("i", [5, OPEN, HEAD, NL, WORD]), 1, SamplingParams(), 99, frozenset(), 0, False, 0.0)
    req.thought_budget = ThoughtBudget(TOKENS, 2, [5])
    for _ in range(2):  # what was drafted the first time must not count the second time
        logits = torch.zeros(4, 10)
        apply_logit_controls(logits, [req], torch.tensor([[WORD, WORD, WORD, CLOSE]]))
        only_close = [row.isfinite().nonzero().flatten().tolist() == [CLOSE] for row in logits]
        assert only_close == [False, True, True, False]
    tree = torch.zeros(4, 10)
    apply_logit_controls(tree, [req], torch.tensor([[WORD, WORD, CLOSE, 4]]), torch.tensor([[0, 0, 0, 2]]))
    assert [bool(row.isinf().any()) for row in tree] == [False, True, False, False]


def test_marks_of_the_shipped_tokenizer(trained_pair: EmbeddedModel) -> None:
    tokenizer = load_tokenizer(trained_pair.target, trust_remote_code=False)
    tokens = TokenPieces(tokenizer).thought_tokens
    ids = tokenizer.encode("<|channel>thought\nx<channel|>", add_special_tokens=False)
    assert tokens == ThoughtTokens(ids[0], ids[-1], header_len=2) and len(ids) == 5
