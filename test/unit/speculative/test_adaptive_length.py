"""Draft lengths by expected tokens per second, against a simulated machine and simulated acceptance."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from sglang.srt.model_executor.draft_length import FixedLength, least_length
from sglang.srt.server_args import ServerArgs
from sglang.srt.server_args_resolution import resolve_server_args
from sglang.srt.speculative.adaptive_length import Acceptance, AdaptiveLength, draft_lengths
from sglang.srt.speculative.round_times import RoundTimes

LENGTHS = tuple(range(8))
ANY = 1 << 30
RIDS = [str(i) for i in range(64)]


class Machine:
    """Rounds of ``fixed + per_draft * n + per_row * rows`` ms beside ``overhead`` ms of the host."""

    def __init__(self, fixed: float, per_draft: float, per_row: float, overhead: float = 0.0) -> None:
        self.fixed, self.per_draft, self.per_row, self.overhead = fixed, per_draft, per_row, overhead

    def round_s(self, num_rows: int, n: int) -> float:
        return (self.fixed + self.per_draft * n + self.per_row * num_rows * (n + 1)) / 1e3

    def rate(self, num_rows: int, n: int, rates: Sequence[float]) -> float:
        """Tokens per second."""
        gained, reach = 1.0, 1.0
        for rate in rates[:n]:
            reach *= rate
            gained += reach
        return num_rows * gained / (self.round_s(num_rows, n) + self.overhead / 1e3)


def serve(
    policy: AdaptiveLength, machine: Machine, rates: Sequence[float], num_rows: int, rounds: int, rng: random.Random
) -> tuple[float, list[int]]:
    """Tokens per second of simulated rounds, and their lengths."""
    tokens, seconds, chosen = 0, 0.0, []
    for _ in range(rounds):
        n = policy.choose(RIDS[:num_rows], [ANY] * num_rows)
        lens = []
        for _ in range(num_rows):
            accepted = 0
            while accepted < n and rng.random() < rates[accepted]:
                accepted += 1
            lens.append(accepted + 1)
        took = machine.round_s(num_rows, n) + machine.overhead / 1e3
        policy.observe(n, RIDS[:num_rows], lens, [ANY] * num_rows)
        policy.observe_time(num_rows, n, machine.round_s(num_rows, n), machine.overhead / 1e3)
        tokens, seconds = tokens + sum(lens), seconds + took
        chosen.append(n)
    return tokens / seconds, chosen


def measured(machine: Machine, lengths: Sequence[int] = LENGTHS) -> AdaptiveLength:
    """A policy that has measured ``machine``."""
    now = [0.0]

    def run(num_rows: int, num_drafts: int) -> None:
        now[0] += machine.round_s(num_rows, num_drafts)

    policy = AdaptiveLength(lengths)
    policy.times.measure(run, 64, budget_s=3.0, clock=lambda: now[0])
    return policy


CPU = Machine(2.0, 0.4, 0.2, overhead=1.0)
GPU = Machine(3.0, 0.15, 0.002)
EXPENSIVE = Machine(1.0, 2.0, 1.0)


@pytest.mark.parametrize("machine", [CPU, GPU, EXPENSIVE])
@pytest.mark.parametrize("rates", [(0.97,) * 7, (0.8,) * 7, (0.5,) * 7, (0.05,) * 7, (0.95, 0.9, 0.3, 0.1, 0, 0, 0)])
@pytest.mark.parametrize("num_rows", [1, 3, 8, 16, 32])
def test_close_to_the_best_fixed_length(machine: Machine, rates: Sequence[float], num_rows: int) -> None:
    policy = measured(machine)
    rate, chosen = serve(policy, machine, rates, num_rows, 1500, random.Random(1))
    best = max(machine.rate(num_rows, n, rates) for n in LENGTHS)
    assert rate > 0.95 * best, (rate, best, chosen[-100:])
    assert rate > 0.98 * machine.rate(num_rows, 0, rates), (rate, chosen[-100:])


def test_a_change_of_the_load_is_noticed() -> None:
    policy, rng = measured(CPU), random.Random(2)
    for rates, num_rows in (((0.95,) * 7, 1), ((0.05,) * 7, 16), ((0.95,) * 7, 1), ((0.1,) * 7, 1)):
        _, chosen = serve(policy, CPU, rates, num_rows, 300, rng)
        best = max(LENGTHS, key=lambda n, rates=rates, num_rows=num_rows: CPU.rate(num_rows, n, rates))  # type: ignore[misc]
        settled = sorted(chosen[100:])
        assert abs(settled[len(settled) // 2] - best) <= 1, (best, chosen)


def test_a_wrong_measurement_is_corrected() -> None:
    """Measured while something else slowed the long rounds down, or the short ones."""
    rates = (0.75, 0.7, 0.6, 0.5, 0.3, 0.3, 0.3)
    for wrong in (Machine(2.0, 1.6, 0.2), Machine(6.0, 0.05, 0.2)):
        policy = measured(wrong)
        serve(policy, CPU, rates, 4, 3000, random.Random(3))
        rate, chosen = serve(policy, CPU, rates, 4, 1000, random.Random(4))
        assert rate > 0.93 * max(CPU.rate(4, n, rates) for n in LENGTHS), chosen[-50:]


def test_no_more_drafts_than_requests_can_use() -> None:
    policy = measured(GPU)
    assert policy.choose(RIDS[:3], [0, 0, 0]) == 0
    assert policy.choose(RIDS[:2], [2, 1]) <= 2
    assert policy.choose(RIDS[:1], [ANY]) > 2
    # one of many rows that can use drafts does not pay for all of them
    expensive = measured(EXPENSIVE)
    assert expensive.choose(RIDS[:16], [ANY, *[0] * 15]) == 0


def chain(*shares: float) -> list[float]:
    """Tokens that rounds of 0, 1, .. drafts gain, where ``shares`` of drafts are accepted."""
    gained, reach = [1.0], 1.0
    for share in shares:
        reach *= share
        gained.append(gained[-1] + reach)
    return gained


def promise(acceptance: Acceptance, rid: str) -> float:
    return acceptance.gained([rid], [ANY])[-1]


def test_drafts_that_a_request_cannot_use_say_nothing_about_acceptance() -> None:
    acceptance, without = Acceptance(3), Acceptance(3)
    for _ in range(40):
        acceptance.observe(3, RIDS[:3], [4, 1, 2], [3, 0, 1])
        without.observe(3, RIDS[:3], [4, 4, 2], [3, 0, 1])
    for rid in ("new", *RIDS[:3]):
        assert acceptance.gained([rid], [ANY]) == without.gained([rid], [ANY])
    acceptance.observe(3, ["cut"], [0], [9])
    assert promise(acceptance, "cut") == promise(acceptance, "new"), "a round whose tokens were not kept says nothing"


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_acceptance_is_counted_by_position(accepted: int) -> None:
    """Drafts behind the first rejected one were not reached: they are taken to be like the ones before them."""
    acceptance = Acceptance(3)
    for turn in range(3000):
        acceptance.observe(3, [str(turn)], [accepted + 1], [9])
    shares = [1.0] * accepted + [0.0] * (3 - accepted)
    assert acceptance.gained(["new"], [ANY]) == pytest.approx(chain(*shares), rel=0.02)
    assert acceptance.gained(["new", "other"], [ANY, 0])[-1] == pytest.approx(1.0 + promise(acceptance, "new"))


def test_a_request_is_judged_by_itself_but_a_new_one_by_the_others() -> None:
    acceptance, caps = Acceptance(4), [ANY, ANY]
    for _ in range(20):
        acceptance.observe(4, ["good", "bad"], [5, 1], caps)
    usual = promise(acceptance, "new")
    assert promise(acceptance, "good") > 1.2 * usual > 1.4 * promise(acceptance, "bad")
    both = acceptance.gained(["good", "bad"], caps)
    assert both[-1] == pytest.approx(promise(acceptance, "good") + promise(acceptance, "bad"))
    before, good = promise(acceptance, "bad"), promise(acceptance, "good")
    for _ in range(60):
        acceptance.observe(0, ["good", "bad"], [1, 1], caps)
    assert promise(acceptance, "bad") > before and promise(acceptance, "good") < good
    assert promise(acceptance, "bad") == pytest.approx(promise(acceptance, "good"), rel=0.05), "one like the others"
    acceptance.observe(4, ["good"], [5], [ANY])
    assert promise(acceptance, "bad") == promise(acceptance, "new"), "who has left is forgotten"


def test_new_requests_are_like_other_new_ones() -> None:
    """A few long answers that go on well do not speak for many short ones."""
    acceptance = Acceptance(4)
    for turn in range(400):
        acceptance.observe(4, ["long", str(turn)], [5, 1], [ANY, ANY])
    assert promise(acceptance, "new") < 1.1
    assert promise(acceptance, "long") > 4.5


def test_the_last_of_lengths_that_promise_the_same() -> None:
    policy = measured(Machine(1.0, 0.8, 0.0))
    assert policy.choose(RIDS[:1], [ANY]) > 0
    # one draft costs what it brings
    even = measured(Machine(1.0, 0.95, 0.0))
    assert even.choose(RIDS[:1], [ANY]) == 0
    assert measured(Machine(1.0, 0.01, 0.0)).choose(RIDS[:1], [ANY]) == 7


def test_a_neighbour_is_tried_now_and_then() -> None:
    policy, best = measured(GPU), 7
    chosen = [policy.choose(RIDS[:1], [ANY]) for _ in range(1000)]
    assert set(chosen) == {best, best - 1}
    assert 10 < chosen.count(best - 1) < 100


def test_times_between_measured_numbers_of_requests() -> None:
    policy = measured(CPU)
    for num_rows in (1, 3, 13, 64):
        expected = [CPU.round_s(num_rows, n) for n in LENGTHS]
        assert policy.times.of(num_rows) == pytest.approx(expected)
    assert policy.times.of(500)[3] == pytest.approx(CPU.round_s(500, 3))


def test_the_host_is_part_of_a_round() -> None:
    times = measured(CPU).times
    for _ in range(100):  # at half the pace that was measured
        times.observe(4, 3, 2 * CPU.round_s(4, 3), 2e-3)
    assert times.of(4) == pytest.approx([CPU.round_s(4, n) + 1e-3 for n in LENGTHS], rel=0.01)


def test_the_first_round_of_another_length_says_nothing() -> None:
    times = measured(CPU).times
    before = times.of(4)
    for n in (3, 3, 3, 4, 3, 4, 5, 3, 3):
        slow = 1.0 if n == 3 else 2.0
        times.observe(4, n, slow * CPU.round_s(4, n), None)
    assert times.of(4) == pytest.approx(before)
    for n in (4, 4):
        times.observe(4, n, 2.0 * CPU.round_s(4, n), None)
    now = times.of(4)
    changes = [after / then for after, then in zip(now, before, strict=True)]
    assert changes[4] == pytest.approx(changes[7]) and changes[4] > 1.02, "longer ones are slower than was measured"
    assert changes[3] == pytest.approx(changes[0]) and changes[3] < 0.98


def test_measuring_ends_with_its_budget() -> None:
    runs: list[tuple[int, int]] = []
    now = [0.0]

    def run(num_rows: int, num_drafts: int) -> None:
        runs.append((num_rows, num_drafts))
        now[0] += 1.0

    RoundTimes(LENGTHS).measure(run, 64, budget_s=2.0, clock=lambda: now[0])
    assert {num_rows for num_rows, _ in runs} == {1}


def test_lengths() -> None:
    assert draft_lengths(5, coarse=True) == (0, 2, 5)
    assert draft_lengths(1, coarse=True) == (0, 1)
    assert draft_lengths(3, coarse=False) == (0, 1, 2, 3)
    assert draft_lengths(18, coarse=False) == (0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 18)
    assert [least_length((0, 2, 5), n) for n in (0, 1, 2, 3, 9)] == [0, 2, 2, 5, 5]
    fixed = FixedLength((0, 2, 5))
    assert [fixed.choose(RIDS[: len(caps)], caps) for caps in ([0, 0], [0, 1], [ANY])] == [0, 2, 5]


def test_trees_have_one_shape() -> None:
    args = ServerArgs(
        model_path="tiny-gemma4",
        speculative_algorithm="FROZEN_KV_MTP",
        speculative_eagle_topk=2,
        speculative_adaptive=True,
    )
    with pytest.raises(ValueError, match="--speculative-adaptive .* --speculative-eagle-topk 2"):
        resolve_server_args(args)


def test_rounds_without_drafts_let_a_request_be_like_the_others_again() -> None:
    acceptance, rids = Acceptance(3), ["bad", *RIDS[:7]]
    for _ in range(200):
        acceptance.observe(3, rids, [1] + [4] * 7, [9] * 8)
    rejected = promise(acceptance, "bad")
    for _ in range(60):
        acceptance.observe(0, rids, [1] * 8, [9] * 8)
    assert rejected < 0.6 * promise(acceptance, "bad")
    assert promise(acceptance, "bad") == pytest.approx(promise(acceptance, RIDS[0]), rel=0.05)


def test_a_few_of_many_requests_may_change_before_the_next_decision() -> None:
    policy, decided = measured(CPU), []
    decide = policy._decide
    policy._decide = lambda rids, caps: (decided.append(len(rids)), decide(rids, caps))  # type: ignore[method-assign]
    for rids in (RIDS[:32], RIDS[1:33], RIDS[2:32], RIDS[:20], RIDS[:20], RIDS[:3], RIDS[1:4]):
        policy.choose(rids, [ANY] * len(rids))
    assert decided == [32, 20, 3, 3]
