"""256 streams at once, half of them left in the middle, beside readers that read nothing while the rest goes on.
`scripts/many_streams.py` does the same for minutes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from fixtures.many_streams import (
    MAX_GROWTH_BYTES,
    SERVER_ARGS,
    Case,
    Clients,
    make_cases,
    make_slow_case,
    many_streams,
)
from fixtures.server_process import ServerProcess, ready_server

STREAMS = 256

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ready_server(tmp_path_factory.mktemp("streams"), *SERVER_ARGS) as running:
        yield running


def times(number: int) -> Callable[[], bool]:
    """True so many times."""
    left = iter(range(number))
    return lambda: next(left, None) is not None


def test_every_stream_gets_its_own_text(server: ServerProcess) -> None:
    clients = Clients(server, make_cases(server, 24, seed=3), seed=3)
    rounds = [times(STREAMS), times(STREAMS)]
    report = asyncio.run(many_streams(clients, STREAMS, make_slow_case(server, 384), 2, rounds))
    assert report.counts.whole + report.counts.left == 2 * STREAMS
    assert report.counts.whole > STREAMS / 2 and report.counts.left > STREAMS / 2, report
    assert report.growth_bytes < MAX_GROWTH_BYTES, report


def test_another_text_is_noticed() -> None:
    case = Case("/generate", {}, "abc")
    case.check("ab", is_whole=False)
    for text, is_whole in (("ab", True), ("ax", False), ("abcd", False)):
        with pytest.raises(AssertionError):
            case.check(text, is_whole=is_whole)
