"""The scheduler with a worker whose answers follow from arithmetic over the KV it is given."""

from __future__ import annotations

import logging

import pytest

from fixtures.toy_worker import EOS, VOCAB, ToyEngine, ToyWorker, expected, next_token
from sglang.srt.managers.io_struct import AbortReq, BatchTokenOut, ControlReply, ControlReq
from sglang.srt.model_executor.forward_batch_info import ForwardMode

WIDTHS = pytest.mark.parametrize("width", [1, 4])
PAGES = pytest.mark.parametrize("page_size", [1, 16])


def prompt(length: int, start: int = 1) -> list[int]:
    return [(start * 17 + i * 5) % VOCAB for i in range(length)]


class Words:
    special_ids = frozenset()
    thought_tokens = None

    def piece(self, token_id: int) -> bytes:
        return f"<{token_id}>".encode()


@WIDTHS
@PAGES
@pytest.mark.parametrize("chunk", [None, 16])
def test_staggered_arrivals_get_their_own_answers(width: int, page_size: int, chunk: int | None) -> None:
    engine = ToyEngine(ToyWorker(512, page_size, width), chunked_prefill_size=chunk)
    lengths = [1, 3, 40, 16, 17, 33]
    for i, length in enumerate(lengths):
        engine.add(f"r{i}", prompt(length, i), num_tokens=5 + 3 * i, stream=i % 2 == 0)
        for _ in range(2):
            engine.scheduler.step()
    engine.run()
    for i, length in enumerate(lengths):
        assert engine.tokens(f"r{i}") == expected(prompt(length, i), 5 + 3 * i)
        final = engine.final(f"r{i}")
        assert final.finish_reason.to_dict() == {"type": "length", "length": 5 + 3 * i}
        assert (final.prompt_tokens, final.completion_tokens) == (length, 5 + 3 * i)
    assert any(len(rids) > 2 for mode, rids, _ in engine.worker.batches if mode is ForwardMode.DECODE)
    engine.assert_balanced()


def test_chunks_of_one_prompt_take_turns_with_decoding() -> None:
    engine = ToyEngine(ToyWorker(512), chunked_prefill_size=8)
    engine.add("short", prompt(4), num_tokens=20)
    engine.run(until=lambda: bool(engine.scheduler.running.reqs))
    engine.add("long", prompt(37, 2), num_tokens=2)
    del engine.worker.batches[:]
    engine.run()
    E, D = ForwardMode.EXTEND, ForwardMode.DECODE
    assert [mode for mode, _, _ in engine.worker.batches[:9]] == [E, D, E, D, E, D, E, D, E]
    assert [lens for mode, _, lens in engine.worker.batches if mode is E] == [(8,), (8,), (8,), (8,), (5,)]
    assert engine.tokens("long") == expected(prompt(37, 2), 2)


def test_a_chunk_leaves_its_rest_of_the_step_to_others() -> None:
    engine = ToyEngine(ToyWorker(512), chunked_prefill_size=8)
    for i in range(3):
        engine.add(f"r{i}", prompt(10, i), num_tokens=1)
    engine.run()
    extends = [(rids, lens) for mode, rids, lens in engine.worker.batches if mode is ForwardMode.EXTEND]
    assert extends == [
        (("r0",), (8,)),
        (("r0", "r1"), (2, 6)),
        (("r1", "r2"), (4, 4)),
        (("r2",), (6,)),
    ]


def test_prefill_budget_and_a_prompt_beyond_it() -> None:
    engine = ToyEngine(ToyWorker(512), max_prefill_tokens=20)
    for i, length in enumerate([30, 8, 12, 1]):
        engine.add(f"r{i}", prompt(length, i), num_tokens=1)
    engine.run()
    extends = [lens for mode, _, lens in engine.worker.batches if mode is ForwardMode.EXTEND]
    assert extends == [(30,), (8, 12), (1,)]


@WIDTHS
@pytest.mark.parametrize(("page_size", "cached"), [(1, 40), (16, 32)])
def test_prefix_cache_hits_are_counted_and_change_nothing(width: int, page_size: int, cached: int) -> None:
    engine = ToyEngine(ToyWorker(512, page_size, width))
    engine.add("first", prompt(40), num_tokens=6)
    engine.run()
    longer = [*prompt(40), 50, 51, 52]
    engine.add("second", longer, num_tokens=6)
    engine.add("same", prompt(40), num_tokens=6)
    engine.run()
    assert engine.final("first").cached_tokens == 0
    assert engine.final("second").cached_tokens == cached
    assert engine.final("same").cached_tokens == min(39, cached)
    assert engine.tokens("second") == expected(longer, 6)
    assert engine.tokens("same") == engine.tokens("first") == expected(prompt(40), 6)
    assert engine.control("flush_cache").ok
    assert engine.worker.kv_manager.stats().free == 512


def test_without_the_cache_nothing_is_found() -> None:
    engine = ToyEngine(ToyWorker(256, disable_radix_cache=True))
    for rid in ("a", "b"):
        engine.add(rid, prompt(20))
        engine.run()
        assert engine.final(rid).cached_tokens == 0
        assert engine.tokens(rid) == expected(prompt(20), 8)
    engine.assert_balanced()


@WIDTHS
@PAGES
@pytest.mark.parametrize("chunk", [None, 16])
def test_retraction_does_not_change_answers(width: int, page_size: int, chunk: int | None) -> None:
    worker = ToyWorker(96, page_size, width)
    engine = ToyEngine(worker, conservativeness=0.01, chunked_prefill_size=chunk)
    for i in range(5):
        engine.add(f"r{i}", prompt(6 + 7 * i, i), num_tokens=40, sampling_seed=i)
    engine.run()
    for i in range(5):
        assert engine.tokens(f"r{i}") == expected(prompt(6 + 7 * i, i), 40, seed=i)
        assert engine.final(f"r{i}").cached_tokens == 0
    assert engine.scheduler.metrics.totals.num_retractions > 0
    engine.assert_balanced()


@WIDTHS
@pytest.mark.parametrize("old", [0, 1, 2])
def test_a_prompt_in_chunks_gives_way_and_comes_back(width: int, old: int) -> None:
    """The long prompt is the newest (old = 2), between the others, or the oldest after a retraction."""
    engine = ToyEngine(ToyWorker(64, 1, width), conservativeness=0.01, chunked_prefill_size=4)
    for i in range(old):
        engine.add(f"r{i}", prompt(5, i), num_tokens=45)
    engine.add("long", prompt(40, 7), num_tokens=10)
    for i in range(old, 2):
        engine.add(f"r{i}", prompt(5, i), num_tokens=45)
    chunked_and_retracted = 0
    while engine.scheduler.has_work:
        was_chunked = engine.scheduler.chunked
        engine.scheduler.step()
        chunked_and_retracted += was_chunked in engine.scheduler.waiting
    engine.run()
    if (old, width) == (2, 1):  # longer steps keep it waiting until there is room
        assert chunked_and_retracted > 0
    for i in range(2):
        assert engine.tokens(f"r{i}") == expected(prompt(5, i), 45)
    assert engine.tokens("long") == expected(prompt(40, 7), 10)
    engine.assert_balanced()


def test_the_only_running_request_gives_way_to_an_older_prompt_in_chunks() -> None:
    engine = ToyEngine(ToyWorker(64), policy="lof", conservativeness=0.01, chunked_prefill_size=4)
    engine.add("old", prompt(52), num_tokens=5)
    engine.add("new", prompt(5, 2), num_tokens=45)
    engine.run(until=lambda: engine.scheduler.metrics.totals.num_retractions > 0)
    assert not engine.scheduler.running.reqs
    assert engine.worker.batches[-1][:2] == (ForwardMode.EXTEND, ("old",))
    engine.run()
    assert engine.tokens("old") == expected(prompt(52), 5)
    assert engine.tokens("new") == expected(prompt(5, 2), 45)
    engine.assert_balanced()


def test_the_oldest_never_gives_way() -> None:
    engine = ToyEngine(ToyWorker(64), conservativeness=0.01)
    for i in range(4):
        engine.add(f"r{i}", prompt(5, i), num_tokens=50)
    while engine.scheduler.has_work:
        oldest = min([*engine.scheduler.running.reqs, *engine.scheduler.waiting], key=lambda req: req.arrival_s)
        before = len(oldest.token_ids)
        engine.scheduler.step()
        assert len(oldest.token_ids) > before or engine.worker.batches[-1][0] is ForwardMode.EXTEND
        assert oldest not in engine.scheduler.waiting
    assert engine.scheduler.metrics.totals.num_retractions > 0


def test_admission_keeps_room_for_answers() -> None:
    """Four requests of 5 + 50 tokens in a pool of 128: reserving all, two run at once and none is ever retracted."""
    engine = ToyEngine(ToyWorker(128), conservativeness=2.0)
    for i in range(4):
        engine.add(f"r{i}", prompt(5, i), num_tokens=50)
    engine.run()
    assert max(len(rids) for _, rids, _ in engine.worker.batches) == 2
    assert engine.scheduler.metrics.totals.num_retractions == 0


@WIDTHS
@PAGES
def test_a_request_that_takes_the_whole_pool(width: int, page_size: int) -> None:
    engine = ToyEngine(ToyWorker(64, page_size, width, context_len=128), conservativeness=1.0)
    longest = engine.scheduler.limits.max_req_input_len
    assert longest == 64 - width - 1
    engine.add("grows", prompt(5), num_tokens=None)
    engine.add("longest", prompt(longest, 3), num_tokens=100)
    engine.run()
    assert engine.tokens("grows") == expected(prompt(5), 64 - width - 5)
    assert engine.tokens("longest") == expected(prompt(longest, 3), 1)
    engine.assert_balanced()


def test_context_end_and_a_prompt_one_short_of_it() -> None:
    for width in (1, 4):
        engine = ToyEngine(ToyWorker(512, 1, width, context_len=64))
        engine.add("whole", prompt(63), num_tokens=None)
        engine.add("end", prompt(40, 2), num_tokens=None)
        engine.run()
        assert engine.tokens("whole") == expected(prompt(63), 1)
        assert engine.tokens("end") == expected(prompt(40, 2), 24)


@WIDTHS
def test_no_token_and_one_token(width: int) -> None:
    engine = ToyEngine(ToyWorker(width=width))
    engine.add("none", prompt(5), num_tokens=0)
    engine.add("one", prompt(5), num_tokens=1)
    engine.run()
    assert engine.tokens("none") == ()
    assert engine.final("none").finish_reason.to_dict() == {"type": "length", "length": 0}
    assert engine.tokens("one") == expected(prompt(5), 1)
    engine.assert_balanced()


@pytest.mark.parametrize("width", [1, 2, 3, 5, 8])
def test_runs_are_cut_at_the_earliest_stop(width: int) -> None:
    answer = expected(prompt(5), 30)
    for end in range(1, 20):
        stop_id = answer[end - 1]
        kept = answer[: answer.index(stop_id) + 1]
        engine = ToyEngine(ToyWorker(width=width), pieces=Words())
        engine.add("id", prompt(5), num_tokens=30, stop_token_ids=(stop_id,))
        engine.add("string", prompt(5), num_tokens=30, stop=(f"<{stop_id}>",))
        engine.add("length", prompt(5), num_tokens=end)
        engine.run()
        assert engine.tokens("id") == engine.tokens("string") == kept
        assert engine.final("id").finish_reason.matched == stop_id
        assert engine.final("string").finish_reason.matched == f"<{stop_id}>"
        assert engine.tokens("length") == answer[:end]
        engine.assert_balanced()


@pytest.mark.parametrize("num_tokens", range(1, 14))
def test_accepted_drafts_count_only_emitted_tokens(num_tokens: int) -> None:
    engine = ToyEngine(ToyWorker(width=4))
    engine.add("r", prompt(5), num_tokens=num_tokens)
    engine.run()
    spec = engine.final("r").spec
    assert (spec.verify_ct, spec.draft_tokens, spec.accepted_by_position) == _replay(5, num_tokens, 4)
    assert spec.accepted_tokens == sum(spec.accepted_by_position)
    totals = engine.scheduler.metrics.totals
    assert (totals.verify_ct, tuple(totals.accepted_by_position)) == (spec.verify_ct, spec.accepted_by_position)


def _replay(prompt_len: int, num_tokens: int, width: int) -> tuple[int, int, tuple[int, ...]]:
    """Rounds, drafts and accepted drafts by position, from the toy's rule of what it accepts where."""
    emitted, rounds, by_position = 1, 0, [0] * (width - 1)
    while emitted < num_tokens:
        drafts = ((prompt_len + emitted - 1) * 5 + 1) % width
        kept = min(drafts + 1, num_tokens - emitted)
        for position in range(min(kept, drafts)):
            by_position[position] += 1
        emitted += kept
        rounds += 1
    return rounds, rounds * (width - 1), tuple(by_position)


def test_stream_interval_and_whole_replies() -> None:
    engine = ToyEngine(stream_interval=3)
    engine.add("stream", prompt(5), num_tokens=9)
    engine.add("whole", prompt(5), num_tokens=9, stream=False)
    engine.run()
    assert [len(out.token_ids) for out in engine.outs("stream")] == [1, 3, 3, 2]
    assert [len(out.token_ids) for out in engine.outs("whole")] == [9]


@WIDTHS
def test_abort_at_every_stage(width: int) -> None:
    engine = ToyEngine(ToyWorker(96, 1, width), chunked_prefill_size=8, max_running_requests=3, conservativeness=0.01)
    stay = prompt(5)
    engine.add("stay", stay, num_tokens=30)
    engine.add("running", prompt(4, 2), num_tokens=60)
    engine.run(until=lambda: len(engine.scheduler.running.reqs) == 2)
    engine.abort("running")
    engine.add("chunked", prompt(30, 3))
    engine.run(until=lambda: engine.scheduler.chunked is not None)
    engine.add("waiting", prompt(30, 4))
    assert [req.rid for req in engine.scheduler.waiting] == ["waiting"]
    engine.abort("waiting")
    assert engine.scheduler.chunked.rid == "chunked"
    engine.abort("chunked")
    engine.abort("unknown")
    engine.run()
    for rid in ("running", "chunked", "waiting"):
        assert engine.final(rid).finish_reason.type == "abort"
        assert engine.final(rid).finish_reason.status is None
    assert engine.tokens("stay") == expected(stay, 30)
    assert engine.scheduler.metrics.totals.num_aborted == 3
    engine.assert_balanced()


@WIDTHS
def test_abort_of_a_retracted_request(width: int) -> None:
    engine = ToyEngine(ToyWorker(64, 1, width), conservativeness=0.01)
    for i in range(3):
        engine.add(f"r{i}", prompt(6, i), num_tokens=40)
    engine.run(until=lambda: engine.scheduler.metrics.totals.num_retractions > 0)
    (retracted, *_) = [req for req in engine.scheduler.waiting if req.first_run_s is not None]
    sent = engine.tokens(retracted.rid)
    engine.abort(retracted.rid)
    engine.run()
    assert sent and engine.tokens(retracted.rid) == sent
    for rid in {"r0", "r1", "r2"} - {retracted.rid}:
        assert len(engine.tokens(rid)) == 40
    engine.assert_balanced()


def test_abort_all() -> None:
    engine = ToyEngine(max_running_requests=2)
    for i in range(4):
        engine.add(f"r{i}", prompt(6, i))
    engine.scheduler.step()
    engine.abort(None, abort_all=True)
    engine.run()
    assert [engine.final(f"r{i}").finish_reason.type for i in range(4)] == ["abort"] * 4
    engine.assert_balanced()


def test_full_queue_is_answered_with_503() -> None:
    engine = ToyEngine(max_queued_requests=2, max_running_requests=1)
    for i in range(4):
        engine.add(f"r{i}", prompt(6, i))
    engine.run()
    assert [engine.final(f"r{i}").finish_reason.status for i in range(4)] == [None, None, 503, 503]
    assert engine.tokens("r1") == expected(prompt(6, 1), 8)


@pytest.mark.parametrize(
    ("ids", "params", "word"),
    [
        ([], {}, "input_ids"),
        ([VOCAB], {}, "input_ids"),
        ([-1], {}, "input_ids"),
        ([1] * 128, {}, "input_ids"),
        ([1], {"stop_token_ids": (VOCAB,)}, "stop_token_ids"),
        ([1], {"logit_bias": ((VOCAB, 1.0),)}, "logit_bias"),
        ([1], {"stop": ("x",)}, "stop"),
    ],
)
def test_bad_input_is_answered_with_400(ids: list[int], params: dict[str, object], word: str) -> None:
    engine = ToyEngine()
    engine.add("bad", ids, **params)
    engine.add("good", prompt(3))
    engine.run()
    reason = engine.final("bad").finish_reason
    assert (reason.type, reason.status) == ("abort", 400)
    assert word in reason.message
    assert engine.tokens("good") == expected(prompt(3), 8)


def test_eos_ends_a_request_unless_it_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_eos(token_ids, seed=0):
        return EOS if len(token_ids) % 10 == 0 else next_token(token_ids, seed)

    monkeypatch.setattr("fixtures.toy_worker.next_token", with_eos)
    engine = ToyEngine()
    engine.add("eos", prompt(6), num_tokens=20)
    engine.add("ignored", prompt(6), num_tokens=20, ignore_eos=True)
    engine.run()
    assert len(engine.tokens("eos")) == 5
    assert engine.final("eos").finish_reason.matched == EOS
    assert len(engine.tokens("ignored")) == 20


def test_requests_without_a_seed_draw_theirs_in_order_of_arrival() -> None:
    answers = []
    for _ in range(2):
        engine = ToyEngine()
        engine.add("a", prompt(6), sampling_seed=None)
        engine.add("b", prompt(6), sampling_seed=None)
        engine.run()
        answers.append((engine.tokens("a"), engine.tokens("b")))
    assert answers[0] == answers[1]
    assert answers[0][0] != answers[0][1]


@pytest.mark.parametrize(
    ("policy", "order"), [("fcfs", ["a", "b", "c"]), ("lpm", ["c", "b", "a"]), ("lof", ["b", "c", "a"])]
)
def test_policies_order_the_queue(policy: str, order: list[str]) -> None:
    engine = ToyEngine(policy=policy, max_running_requests=1)
    engine.add("warm", prompt(20))
    engine.run()
    engine.add("a", [90, 91, 92], num_tokens=3)
    engine.add("b", [*prompt(10), 90, 91], num_tokens=9)
    engine.add("c", [*prompt(20), 90, 91], num_tokens=5)
    del engine.worker.batches[:]
    engine.run()
    assert [rids[0] for mode, rids, _ in engine.worker.batches if mode is ForwardMode.EXTEND] == order


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "lof", "random"])
def test_requests_that_gave_way_come_first(policy: str) -> None:
    engine = ToyEngine(ToyWorker(64), policy=policy, conservativeness=0.01, max_running_requests=3)
    for i in range(3):
        engine.add(f"r{i}", prompt(6, i), num_tokens=40)
    engine.run(until=lambda: bool(engine.scheduler.running.reqs))
    for i in range(20):
        engine.add(f"late{i}", prompt(6, 1), num_tokens=50)
    engine.run(until=lambda: engine.scheduler.metrics.totals.num_retractions > 0)
    del engine.worker.batches[:]
    engine.run()
    extends = [rids for mode, rids, _ in engine.worker.batches if mode is ForwardMode.EXTEND]
    assert extends[0][0] in ("r1", "r2")


def test_sampling_tensors_follow_the_rows() -> None:
    """Requests of one batch end at different times; each draws with its own seed to its end."""
    engine = ToyEngine(ToyWorker(512, width=2))
    made = []
    begin = engine.worker.begin

    def check_rows(batch):
        assert batch.sampling_info.seeds.tolist() == [req.seed for req in batch.reqs]
        made.append((batch.mode, len(batch.reqs), id(batch.sampling_info)))
        begin(batch)

    engine.worker.begin = check_rows
    for i in range(5):
        engine.add(f"r{i}", prompt(4, i), num_tokens=10 + 7 * (i % 3), sampling_seed=100 + i)
        engine.scheduler.step()
    engine.run()
    decodes = [(rows, info) for mode, rows, info in made if mode is ForwardMode.DECODE]
    assert len(set(decodes)) < len(decodes)


def test_random_policy_serves_everyone_and_repeats_with_its_seed() -> None:
    orders = []
    for _ in range(2):
        engine = ToyEngine(policy="random", max_running_requests=1)
        for i in range(6):
            engine.add(f"r{i}", prompt(4, i), num_tokens=2)
        engine.run()
        orders.append([rids[0] for mode, rids, _ in engine.worker.batches if mode is ForwardMode.EXTEND])
    assert orders[0] == orders[1]
    assert sorted(orders[0]) == [f"r{i}" for i in range(6)] != orders[0]


@WIDTHS
def test_a_failed_step_ends_its_requests_and_no_others(width: int, caplog: pytest.LogCaptureFixture) -> None:
    engine = ToyEngine(ToyWorker(width=width))
    engine.add("old", prompt(5), num_tokens=20)
    engine.run(until=lambda: bool(engine.scheduler.running.reqs))
    engine.worker.fail_rids.add("bad")
    engine.add("bad", prompt(5, 2))
    engine.run()
    assert engine.final("bad").finish_reason.status == 500
    assert engine.tokens("old") == expected(prompt(5), 20)
    assert "told to fail" in caplog.text
    engine.worker.fail_rids.clear()
    engine.add("bad", prompt(5, 2))
    engine.run()
    assert engine.outs("bad")[-1].finish_reason.type == "length"
    engine.assert_balanced()


def test_a_failed_step_that_lost_memory_ends_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ToyEngine()

    def lose() -> None:
        raise RuntimeError("KV slots do not balance")

    monkeypatch.setattr(engine.worker.kv_manager, "check_integrity", lose)
    engine.worker.fail_rids.add("bad")
    engine.add("bad", prompt(5))
    with pytest.raises(RuntimeError, match="balance"):
        engine.run()


def test_control_messages() -> None:
    engine = ToyEngine(ToyWorker(width=3))
    assert engine.control("ping").ok
    engine.add("r", prompt(5), num_tokens=12)
    engine.scheduler.step()
    assert not engine.control("flush_cache").ok
    running = engine.control("server_info").data
    assert (running["num_running_reqs"], running["num_queue_reqs"]) == (1, 0)
    assert engine.control("check_integrity").ok
    engine.run()
    info = engine.control("server_info").data
    assert info["totals"]["prompt_tokens"] == 5
    assert info["totals"]["completion_tokens"] == 12
    assert info["avg_spec_accept_length"] > 1
    assert len(info["spec_accept_by_position"]) == 2
    assert info["worker"]["vocab_size"] == VOCAB
    assert engine.control("flush_cache").ok
    assert info["kv_cache"]["evictable"] > engine.control("check_integrity").data["evictable"] == 0


def test_event_loop_sleeps_when_idle_and_shuts_down_with_an_answer_for_everyone() -> None:
    engine = ToyEngine()
    engine.channel.inbox = [[], [ControlReq("1", "ping")], [AbortReq("unknown")]]
    engine.add("a", prompt(5), num_tokens=3)
    engine.add("b", prompt(5), num_tokens=100)
    engine.channel.inbox += [[]] * 4 + [[ControlReq("2", "shutdown")]]
    engine.scheduler.event_loop()
    assert engine.tokens("a") == expected(prompt(5), 3)
    assert engine.final("b").finish_reason.type == "abort"
    replies = [msg for msg in engine.channel.sent if not isinstance(msg, BatchTokenOut)]
    assert replies == [ControlReply("1", True, "", {}), ControlReply("2", True, "", {})]
    assert isinstance(engine.channel.sent[-1], ControlReply)
    engine.assert_balanced()


def test_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    engine = ToyEngine(ToyWorker(width=3), decode_log_interval=2)
    engine.add("r", prompt(5), num_tokens=12)
    engine.run()
    assert "Prefill batch. #new-seq: 1, #new-token: 5, #cached-token: 0" in caplog.text
    assert "Decode batch. #running-req: 1, #token: " in caplog.text
    assert "accept len: " in caplog.text


def test_a_pool_too_small_for_any_request_is_a_sentence() -> None:
    with pytest.raises(ValueError, match="--max-total-tokens"):
        ToyEngine(ToyWorker(4, 1, width=3))
