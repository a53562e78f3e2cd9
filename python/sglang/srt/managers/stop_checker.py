"""Where a request ends inside the run of tokens a step gained: the earliest end event wins."""

from __future__ import annotations

from collections.abc import Sequence

from sglang.srt.managers.detokenizer_manager import TokenPieces
from sglang.srt.managers.io_struct import FinishReason
from sglang.srt.managers.schedule_batch import Req


def check_stop(req: Req, run: Sequence[int], pieces: TokenPieces | None) -> tuple[int, FinishReason | None]:
    """How many tokens of ``run`` the request keeps, and why it ends there (None: it goes on and keeps them all).

    ``run`` follows ``req.token_ids`` and is not yet part of it. At the same token a stop id comes before a stop string,
    that before a stop regex, and that before the end of its grammar and the length; nothing but these two ends a
    request before ``min_new_tokens``. ``pieces`` may be None only when the request has no stop strings or regexes. The
    request's grammar and regexes go on by the tokens that are kept.
    """
    if req.max_new_tokens == 0:
        return 0, FinishReason("length", length=0)
    scanner = _StopStrings(req, pieces) if req.params.stop else None
    for kept, token_id in enumerate(run, start=1):
        output_len = req.output_len + kept
        if req.grammar is not None and not req.grammar.accept(token_id):
            # masks forbid it, unless the logits were no numbers
            return kept - 1, FinishReason("abort", message="the answer left its grammar", status=500)
        stop = None if scanner is None else scanner.advance(token_id)
        match = None if req.regex_stops is None else req.regex_stops.feed_bytes(_shown_piece(req, token_id, pieces))
        if output_len >= req.params.min_new_tokens:
            if token_id in req.stop_ids:
                return kept, FinishReason("stop", matched=token_id)
            if stop is not None:
                return kept, FinishReason("stop", matched=stop)
            if match is not None:
                return kept, FinishReason("stop", matched=match.pattern)
        if req.grammar is not None and req.grammar.is_terminated:
            return kept, FinishReason("stop", matched=token_id)
        if output_len >= req.max_new_tokens:
            return kept, FinishReason("length", length=output_len)
    return len(run), None


def _shown_piece(req: Req, token_id: int, pieces: TokenPieces | None) -> bytes:
    """The bytes that a token adds to the text a user sees."""
    assert pieces is not None, f"request {req.rid} ends by its text, and there is no tokenizer to see it with"
    is_hidden = req.params.skip_special_tokens and token_id in pieces.special_ids
    return b"" if is_hidden else pieces.piece(token_id)


class _StopStrings:
    """Looks for stop strings in the output as it grows; a match may begin in tokens that came before the run.

    It compares bytes, not characters: UTF-8 is self-synchronising, so a string is found in the bytes exactly where it
    is found in the text, and a character cut in two by tokens needs no care.
    """

    def __init__(self, req: Req, pieces: TokenPieces | None) -> None:
        self._req = req
        self._pieces = pieces
        self._stops = tuple((stop, stop.encode()) for stop in req.params.stop)
        self._window_len = max(len(encoded) for _, encoded in self._stops) - 1
        self._tail = self._tail_of(req)

    def advance(self, token_id: int) -> str | None:
        """Take one token; the stop string that it completes, the one that begins first if there are several."""
        before_len = len(self._tail)
        text = self._tail + _shown_piece(self._req, token_id, self._pieces)
        self._tail = text[max(0, len(text) - self._window_len) :]
        found = []
        for order, (stop, encoded) in enumerate(self._stops):
            # only matches that end in the new piece: an earlier one was passed over on purpose
            at = text.find(encoded, max(0, before_len - len(encoded) + 1))
            if at >= 0:
                found.append((at, order, stop))
        return min(found)[2] if found else None

    def _tail_of(self, req: Req) -> bytes:
        """The last bytes of the output so far, as many as an unfinished match can have."""
        tail, index = b"", len(req.token_ids)
        while len(tail) < self._window_len and index > req.prompt_len:
            index -= 1
            tail = _shown_piece(req, req.token_ids[index], self._pieces) + tail
        return tail[max(0, len(tail) - self._window_len) :]
