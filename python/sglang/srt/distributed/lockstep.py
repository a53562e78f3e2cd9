"""One decision for all ranks: whatever a rank cannot know by itself, rank 0 settles and the others are told.

Rank 0 has a connection to every other rank and sends down it; nothing comes back but a goodbye. Whoever waits sleeps in
the kernel, for as long as it takes. The connections also tell a rank at once that another one, on whatever machine, has
ended without a goodbye, even while it waits on its device for what that one will never send.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import select
import socket
import threading
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

logger = logging.getLogger(__name__)

# exit status of a process that ended because another rank did
RANK_LOST_EXIT_STATUS = 87
_LOCAL = "127.0.0.1"
_TOKEN_BYTES = 16
_LENGTH_BYTES = 4
_GOODBYE = b"."
# for a rank to end by itself when rank 0 has ended
_NOTICE_S = 3.0
# a machine that fell silent is given up after 2 + 3 * 2 seconds
_KEEPALIVE = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}


class RankLostError(RuntimeError):
    """Another rank has ended, so this one cannot go on."""


class Lockstep:
    """Rank 0's end has ``followers``, any other rank's a ``leader``; a group of one has neither."""

    def __init__(self, followers: Sequence[socket.socket] = (), leader: socket.socket | None = None) -> None:
        self._followers = tuple(followers)
        self._leader = leader
        self._noticed = threading.Event()

    def share(self, make: Callable[[], bytes]) -> bytes:
        """What ``make`` returns on rank 0; it is called nowhere else. All ranks must ask alike, in the same order."""
        if self._leader is not None:
            try:
                return self._receive(self._leader)
            except RankLostError:
                self._noticed.set()
                raise
        made = make()
        for number, follower in enumerate(self._followers, start=1):
            try:
                follower.sendall(len(made).to_bytes(_LENGTH_BYTES, "big") + made)
            except OSError as error:
                raise RankLostError(f"rank {number} has ended ({error})") from error
        return made

    def close(self) -> None:
        """For an end in order, which all ranks have agreed on."""
        if self._leader is not None:
            self._noticed.set()
            self._leader.sendall(_GOODBYE)
            self._leader.shutdown(socket.SHUT_RDWR)  # which ``watch`` sees, too
            self._leader.close()

    def watch(self) -> None:
        """Ends this process when rank 0 has ended and ``share`` does not hear of it, in a collective for one."""
        assert self._leader is not None
        poll = select.poll()
        poll.register(self._leader, select.POLLRDHUP)
        poll.poll()
        if not self._noticed.wait(_NOTICE_S):
            _end("rank 0 has ended or is out of reach while this rank waits for it: this rank cannot go on")

    def _receive(self, leader: socket.socket) -> bytes:
        return _read(leader, int.from_bytes(_read(leader, _LENGTH_BYTES), "big"))


def open_lockstep(
    rank: int, size: int, rendezvous: str, timeout_s: float, first_of_all: Callable[[bytes], bytes]
) -> Lockstep:
    """Connect the ranks, which meet at ``rendezvous``. ``first_of_all`` is a slow ``share`` for the beginning."""
    host = urlsplit(rendezvous).hostname or _LOCAL
    if rank == 0:
        return _lead(size, host, timeout_s, first_of_all)
    address, token = first_of_all(b"").split(b" ", 1)
    name, port = address.decode().rsplit(":", 1)
    leader = socket.create_connection((name, int(port)), timeout_s)
    leader.sendall(token + rank.to_bytes(_LENGTH_BYTES, "big"))
    _settle(leader)
    lockstep = Lockstep(leader=leader)
    threading.Thread(target=lockstep.watch, name="sglang-rank-0", daemon=True).start()
    return lockstep


def _lead(size: int, host: str, timeout_s: float, first_of_all: Callable[[bytes], bytes]) -> Lockstep:
    token = secrets.token_bytes(_TOKEN_BYTES)
    followers: dict[int, socket.socket] = {}
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    with socket.create_server((host, 0), family=family, backlog=size) as listener:
        listener.settimeout(timeout_s)
        first_of_all(f"{host}:{listener.getsockname()[1]} ".encode() + token)
        while len(followers) < size - 1:
            connection, _ = listener.accept()
            connection.settimeout(timeout_s)
            hello = _read(connection, _TOKEN_BYTES + _LENGTH_BYTES)
            if not hmac.compare_digest(hello[:_TOKEN_BYTES], token):
                connection.close()  # somebody else's
                continue
            _settle(connection)
            followers[int.from_bytes(hello[_TOKEN_BYTES:], "big")] = connection
    for number, connection in followers.items():
        threading.Thread(target=_watch, args=(number, connection), name=f"sglang-rank-{number}", daemon=True).start()
    return Lockstep([followers[number] for number in range(1, size)])


def _settle(connection: socket.socket) -> None:
    """No delays, no time limit, and an error when the other machine is gone."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _read(connection: socket.socket, num_bytes: int) -> bytes:
    read = bytearray()
    while len(read) < num_bytes:
        try:
            piece = connection.recv(num_bytes - len(read))
        except OSError as error:
            raise RankLostError(f"rank 0 is out of reach ({error})") from error
        if not piece:
            raise RankLostError("rank 0 has ended")
        read += piece
    return bytes(read)


def _watch(number: int, follower: socket.socket) -> None:
    """Ends this process when another rank ends without a goodbye: the main thread may wait for it in a collective."""
    try:
        last_words = follower.recv(len(_GOODBYE))
    except OSError:
        last_words = b""
    if last_words != _GOODBYE:
        _end(f"rank {number} has ended or is out of reach: this rank cannot go on")


def _end(why: str) -> None:
    logger.critical("%s", why)
    logging.shutdown()
    os._exit(RANK_LOST_EXIT_STATUS)
