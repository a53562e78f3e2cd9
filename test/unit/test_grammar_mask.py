"""Grammars over logits, with a grammar whose next token follows from the last one."""

from __future__ import annotations

from array import array

import torch

from sglang.srt.layers.grammar_mask import GrammarDrafts, apply_grammar_masks
from sglang.srt.layers.sampler import sample_tokens
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams

VOCAB, INF = 45, float("inf")


class Next:
    """After token t come t + 1 and t + 2, up to 44, which ends it."""

    def __init__(self, last: int) -> None:
        self.path = [last]

    @property
    def is_terminated(self) -> bool:
        return self.path[-1] == 44

    def allowed(self) -> set[int]:
        return {t for t in (self.path[-1] + 1, self.path[-1] + 2) if t < VOCAB}

    def accept(self, token_id: int) -> bool:
        if token_id not in self.allowed():
            return False
        self.path.append(token_id)
        return True

    def fill_mask(self, masks: torch.Tensor, row: int) -> None:
        words = [sum(1 << (t % 32) for t in self.allowed() if t // 32 == word) for word in range(2)]
        masks[row] = torch.tensor([w - (1 << 32) if w >> 31 else w for w in words], dtype=torch.int32)

    def rollback(self, num_tokens: int) -> None:
        del self.path[-num_tokens:]

    def fork(self) -> Next:
        raise AssertionError("not asked for")


def make(last: int | None) -> Req:
    req = Req("r", array("i", [1]), 1, SamplingParams(), 99, frozenset(), 0, False, 0.0)
    req.grammar = None if last is None else Next(last)
    return req


def allowed(row: torch.Tensor) -> set[int]:
    return {t for t in range(VOCAB) if row[t] > -INF}


def test_each_row_has_the_mask_of_its_own_prefix() -> None:
    reqs = [make(None), make(30), make(3)]
    logits = torch.randn(9, VOCAB)
    before = logits.clone()
    apply_grammar_masks(logits, reqs, torch.tensor([[1, 2, 3], [30, 31, 33], [3, 9, 10]]))
    assert torch.equal(logits[:3], before[:3])
    assert [allowed(row) for row in logits[3:6]] == [{31, 32}, {32, 33}, {34, 35}]
    assert allowed(logits[6]) == {4, 5}, "the draft 9 is illegal: it cannot be chosen here"
    assert torch.equal(logits[7:], before[7:])
    for row, kept in ((3, [31, 32]), (6, [4, 5])):
        assert torch.equal(logits[row, kept], before[row, kept])
    assert [req.grammar.path for req in reqs[1:]] == [[30], [3]]  # type: ignore[union-attr]


def test_rows_of_a_tree() -> None:
    logits = torch.randn(5, VOCAB)
    rows, parents = torch.tensor([[30, 31, 32, 33, 33]]), torch.tensor([[0, 0, 0, 1, 2]])
    apply_grammar_masks(logits, [make(30)], rows, parents)
    assert [allowed(row) for row in logits] == [{31, 32}, {32, 33}, {33, 34}, {34, 35}, {34, 35}]


def test_the_grammar_comes_before_edits_that_left_nothing() -> None:
    logits = torch.full((1, VOCAB), -INF)
    logits[0, 7] = 3.0
    apply_grammar_masks(logits, [make(30)], torch.tensor([[30]]))
    assert allowed(logits[0]) == {31, 32} and logits[0, 31] == logits[0, 32] == 0.0


def test_rows_behind_the_end_stay() -> None:
    logits = torch.randn(3, VOCAB)
    before = logits.clone()
    apply_grammar_masks(logits, [make(43)], torch.tensor([[43, 44, 1]]))
    assert allowed(logits[0]) == {44} and torch.equal(logits[1:], before[1:])


def test_half_precision_keeps_its_type() -> None:
    logits = torch.randn(1, VOCAB).to(torch.bfloat16)
    apply_grammar_masks(logits, [make(30)], torch.tensor([[30]]))
    assert logits.dtype is torch.bfloat16 and allowed(logits[0]) == {31, 32}


def test_drafts_follow_the_grammars_and_leave_them_where_they_were() -> None:
    reqs = [make(None), make(30), make(42)]
    grammars = GrammarDrafts.of(reqs)
    assert grammars is not None and GrammarDrafts.of(reqs[:1]) is None
    seen = []
    for drafts in ([1, 32, 44], [1, 33, 7], [1, 9, 7]):
        logits = torch.zeros(3, VOCAB)
        grammars.mask(logits)
        seen.append([allowed(row) for row in logits])
        grammars.accept(torch.tensor(drafts))
    logits = torch.zeros(3, VOCAB)
    grammars.mask(logits)
    everything = set(range(VOCAB))
    assert seen[0] == [everything, {31, 32}, {43, 44}]
    assert seen[1] == [everything, {33, 34}, everything], "behind the end anything may be drafted"
    assert seen[2] == [everything, {34, 35}, everything]
    assert not torch.isinf(logits).any(), "behind a draft that was not legal as well"
    grammars.close()
    assert [req.grammar.path for req in reqs[1:]] == [[30], [42]]  # type: ignore[union-attr]


def test_sampled_tokens_have_the_model_s_probabilities_among_the_allowed() -> None:
    num = 20_000
    logits = torch.randn(VOCAB) * 2
    row = logits.clone()[None]
    apply_grammar_masks(row, [make(30)], torch.tensor([[30]]))
    params = SamplingParams(temperature=0.7)
    info = SamplingBatchInfo.from_params([params] * num, list(range(num)), torch.device("cpu"))
    drawn = sample_tokens(row.repeat(num, 1), info, torch.full((num,), 5))
    wanted = torch.softmax(logits[[31, 32]] / 0.7, dim=0)
    counts = torch.bincount(drawn, minlength=VOCAB)
    assert counts[[31, 32]].sum() == num
    error = (wanted[0] * wanted[1] / num).sqrt()
    assert abs(counts[31] / num - wanted[0]) < 4 * error
