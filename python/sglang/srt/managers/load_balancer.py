"""Which of several replicas takes a request: the one that is soonest done with it, as far as tokens tell.

A replica's load is the tokens it still owes: prompts not begun, and what requests may still generate. A prompt costs a
replica only what its prefix cache has not seen, by a record of the prompts sent there. So requests that share a prefix
meet at one replica until the others are that much less busy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sglang.srt.managers.io_struct import TokenizedGenerateReqInput, TokenOut
from sglang.srt.server_args_parallel import LoadBalanceMethod

_BLOCK = 32  # tokens of a prompt that are remembered as one
_MAX_BLOCKS = 1 << 16


@dataclass(slots=True)
class _Sent:
    """A request on its way: where it is, and what it still owes."""

    replica: int
    req: TokenizedGenerateReqInput
    max_new_tokens: int
    owed: int
    last: TokenOut | None = None


class PrefixRecord:
    """Prompts sent to each replica, block by block, the least recently used forgotten first."""

    def __init__(self, max_blocks: int = _MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._replicas: OrderedDict[int, set[int]] = OrderedDict()

    def matches(self, input_ids: Sequence[int], num_replicas: int) -> list[int]:
        """For each replica, leading tokens of the prompt that were sent there before."""
        found = [0] * num_replicas
        still = set(range(num_replicas))
        for end, key in _block_keys(input_ids):
            still &= self._replicas.get(key, set())
            if not still:
                break
            for replica in still:
                found[replica] = end
        return found

    def add(self, input_ids: Sequence[int], replica: int) -> None:
        for _, key in _block_keys(input_ids):
            self._replicas.setdefault(key, set()).add(replica)
            self._replicas.move_to_end(key)
        while len(self._replicas) > self._max_blocks:
            self._replicas.popitem(last=False)

    def forget(self, replica: int) -> None:
        """Nothing sent to ``replica`` is there any more."""
        for replicas in self._replicas.values():
            replicas.discard(replica)


class LoadBalancer:
    """Chooses, and keeps the books. One event loop."""

    def __init__(self, num_replicas: int, method: LoadBalanceMethod = "auto") -> None:
        self._method = method
        self._alive = set(range(num_replicas))
        self._num_replicas = num_replicas
        self._owed = [0] * num_replicas
        self._last_chosen = num_replicas - 1
        self._sent: dict[str, _Sent] = {}
        self._prefixes = PrefixRecord()

    @property
    def alive(self) -> list[int]:
        return sorted(self._alive)

    @property
    def owed(self) -> list[int]:
        """Tokens that each replica still owes."""
        return list(self._owed)

    def choose(self, req: TokenizedGenerateReqInput) -> int:
        """The replica that takes ``req``, which counts as sent there. Needs one that is alive."""
        following = [(self._last_chosen + 1 + i) % self._num_replicas for i in range(self._num_replicas)]
        turn = [replica for replica in following if replica in self._alive]
        chosen = turn[0]
        if self._method == "auto":
            known = self._prefixes.matches(req.input_ids, self._num_replicas)
            chosen = min(turn, key=lambda replica: self._owed[replica] - known[replica])
            self._prefixes.add(req.input_ids, chosen)
        self._last_chosen = chosen
        max_new_tokens = req.sampling_params.max_new_tokens
        assert max_new_tokens is not None, "request limits have set it"
        sent = self._sent[req.rid] = _Sent(chosen, req, max_new_tokens, len(req.input_ids) + max_new_tokens)
        self._owed[chosen] += sent.owed
        return chosen

    def replica_of(self, rid: str) -> int | None:
        """Where a request is; None for one that ended or never was."""
        sent = self._sent.get(rid)
        return None if sent is None else sent.replica

    def received(self, out: TokenOut) -> None:
        """A reply came: what it brought is owed no more."""
        sent = self._sent.get(out.rid)
        if sent is None:
            return
        if out.finish_reason is not None:
            del self._sent[out.rid]
            self._owed[sent.replica] -= sent.owed
            return
        left = sent.max_new_tokens - out.completion_tokens
        self._owed[sent.replica] -= sent.owed - left
        sent.owed, sent.last = left, out

    def forget_prefixes(self, replica: int) -> None:
        """The prefix cache of ``replica`` is empty."""
        self._prefixes.forget(replica)

    def lose(self, replica: int) -> list[tuple[TokenizedGenerateReqInput, TokenOut | None]]:
        """``replica`` is gone: the requests that were there, each with its last reply."""
        self._alive.discard(replica)
        self._prefixes.forget(replica)
        lost = [(sent.req, sent.last) for sent in self._sent.values() if sent.replica == replica]
        for req, _ in lost:
            del self._sent[req.rid]
        self._owed[replica] = 0
        return lost


def _block_keys(input_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The end of each whole block, and a key of all tokens up to there."""
    key = 0
    for end in range(_BLOCK, len(input_ids) + 1, _BLOCK):
        key = hash((key, tuple(input_ids[end - _BLOCK : end])))
        yield end, key
