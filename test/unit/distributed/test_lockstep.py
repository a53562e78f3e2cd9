"""What rank 0 settles reaches the others in order, and nobody waits for a rank that has ended."""

from __future__ import annotations

import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import pytest

from sglang.srt.distributed.lockstep import RANK_LOST_EXIT_STATUS, Lockstep, RankLostError, open_lockstep
from sglang.srt.distributed.parallel_state import TpGroup
from sglang.srt.managers.io_struct import AbortReq, BatchTokenOut, ControlReq, SchedulerReady
from sglang.srt.managers.tp_channel import FollowingChannel, LeadingChannel

DEADLINE_S = 20.0


def connect(size: int) -> list[Lockstep]:
    """The ends of all ranks, in one process."""
    texts = [SimpleQueue[bytes]() for _ in range(size)]

    def first_of_all(rank: int, text: bytes) -> bytes:
        if rank == 0:
            for queue in texts:
                queue.put(text)
        return texts[rank].get(timeout=DEADLINE_S)

    def open_end(rank: int) -> Lockstep:
        return open_lockstep(rank, size, "file:///x", DEADLINE_S, lambda text: first_of_all(rank, text))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(open_end, range(size)))


def test_everybody_gets_what_rank_0_makes() -> None:
    leader, *followers = connect(3)
    made = [b"", b"one", b"x" * 300_000]

    def never() -> bytes:
        raise AssertionError("only rank 0 decides")

    with ThreadPoolExecutor(3) as pool:
        heard = [pool.submit(lambda end=end: [end.share(never) for _ in made]) for end in followers]
        assert [leader.share(lambda text=text: text) for text in made] == made
        assert all(future.result(DEADLINE_S) == made for future in heard)
    for end in (*followers, leader):
        end.close()


def test_numbers_are_exact() -> None:
    leader, follower = connect(2)
    groups = TpGroup(0, 2, lockstep=leader), TpGroup(1, 2, lockstep=follower)
    for number in (0.1, 7, 2**53, -1e-300):
        assert groups[0].share_number(lambda number=number: number) == number
        assert groups[1].share_number(lambda: 0) == number
    assert TpGroup().share_number(lambda: 0.1) == 0.1
    follower.close()


@pytest.mark.parametrize("sent", [b"", b"\0\0", b"\0\0\0\5abc"])
def test_a_follower_ends_with_its_leader(sent: bytes) -> None:
    here, there = socket.socketpair()
    with ThreadPoolExecutor(1) as pool, here:
        waiting = pool.submit(Lockstep(leader=here).share, lambda: b"")
        there.sendall(sent)
        there.close()
        with pytest.raises(RankLostError, match="rank 0 has ended"):
            waiting.result(DEADLINE_S)


ENDS = """
import sys
sys.path[:0] = {path!r}
from concurrent.futures import ThreadPoolExecutor
from test_lockstep import connect
leader, first, second = connect(3)
{end}
import time
time.sleep(20)
"""


def run_leader(end: str) -> subprocess.CompletedProcess[str]:
    code = ENDS.format(path=[*sys.path, __file__.rpartition("/")[0]], end=end)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


def test_a_leader_ends_with_any_follower() -> None:
    done = run_leader("second._leader.shutdown(2)")
    assert done.returncode == RANK_LOST_EXIT_STATUS
    assert "rank 2 has ended" in done.stderr


def test_a_follower_that_does_not_listen_ends_with_its_leader() -> None:
    """As one that waits on its device for what rank 0 will never send."""
    done = run_leader("leader._followers[0].shutdown(1)")
    assert done.returncode == RANK_LOST_EXIT_STATUS
    assert "rank 0 has ended or is out of reach while this rank waits for it" in done.stderr


def test_a_follower_that_knows_is_left_to_end_by_itself() -> None:
    here, there = socket.socketpair()
    there.close()
    with here:
        end = Lockstep(leader=here)
        with pytest.raises(RankLostError):
            end.share(lambda: b"")
        end.watch()


class Outside:
    """The tokenizer manager's side, as lists."""

    def __init__(self, *batches: list[object]) -> None:
        self.batches = list(batches)
        self.sent: list[object] = []

    def recv(self, timeout_s: float | None) -> list[object]:
        return self.batches.pop(0)

    def send(self, msg: object) -> None:
        self.sent.append(msg)


def test_schedulers_of_all_ranks_get_the_same_messages_and_one_replies() -> None:
    leader, follower = connect(2)
    batches = [[AbortReq("a"), ControlReq("1", "ping")], [], [AbortReq(None, abort_all=True)]]
    outside, outbox = Outside(*batches), Outside()
    leading = LeadingChannel(outside, TpGroup(0, 2, lockstep=leader))  # type: ignore[arg-type]
    following = FollowingChannel(outbox, TpGroup(1, 2, lockstep=follower))  # type: ignore[arg-type]
    for batch in batches[:]:
        assert leading.recv(0) == batch
        assert following.recv(None) == batch
    for channel in (leading, following):
        channel.send(SchedulerReady({}))
        channel.send(BatchTokenOut(()))
        channel.send(SchedulerReady({}, error="no memory"))
    assert len(outside.sent) == 3
    assert outbox.sent == [SchedulerReady({}, error="rank 1: no memory")]
    follower.close()
