"""Log lines of requests: when they arrive, and when they end. What they hold grows with the level."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import fields
from datetime import datetime, timezone
from typing import Any

from sglang.srt.managers.generate_output import GenerateOutput
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.log import bare_logger

logger = logging.getLogger(__name__)

# level -> what lines hold beside ids, lengths, times and finish reasons
LEVEL_PARAMS, LEVEL_SHORT_TEXTS, LEVEL_TEXTS = 1, 2, 3
_SHORT = 2048


def make_request_logger(server_args: ServerArgs) -> RequestLogger | None:
    """What ``--log-requests`` and its companions ask for."""
    if not server_args.log_requests:
        return None
    return RequestLogger(server_args.log_requests_level, as_json=server_args.log_requests_format == "json")


class RequestLogger:
    """Writes a line for each arrival and each end of a sequence.

    Level 0: ids, lengths, times, finish reason. 1: sampling controls too. 2: the first characters of prompts and
    answers too. 3: all of them. Values that users chose are quoted, so that none can look like a line of its own.
    """

    def __init__(self, level: int, *, as_json: bool) -> None:
        self._level = level
        self._bare = bare_logger("sglang.requests") if as_json else None

    @property
    def keeps_texts(self) -> bool:
        """Whether ``finished`` should get the text of the whole answer."""
        return self._level >= LEVEL_SHORT_TEXTS

    def received(self, req: TokenizedGenerateReqInput, prompt: str | Sequence[int]) -> None:
        record: dict[str, Any] = {"rid": req.rid, "prompt_tokens": len(req.input_ids), "stream": req.stream}
        if self._level >= LEVEL_PARAMS:
            record["sampling_params"] = _chosen(req.sampling_params)
        if self.keeps_texts:
            record["text" if isinstance(prompt, str) else "input_ids"] = self._cut(prompt)
        self._write("received", "Receive", record)

    def finished(self, output: GenerateOutput, text: str) -> None:
        """``output``: the last one of a sequence; ``text``: its whole answer, where texts are kept."""
        record = {key: value for key, value in output.meta_info().items() if key in _META}
        record = {"rid": output.rid, **record}
        if self.keeps_texts:
            record["output_text"] = self._cut(text)
        self._write("finished", "Finish", record)

    def left(self, rid: str, num_tokens: int, after_s: float) -> None:
        """The user of a sequence went away, and it was aborted."""
        reason = {"type": "abort", "message": "the client went away", "status_code": None}
        record = {"rid": rid, "completion_tokens": num_tokens, "e2e_latency": after_s, "finish_reason": reason}
        self._write("finished", "Finish", record)

    def _cut(self, prompt: str | Sequence[int]) -> str | list[int]:
        part = prompt if self._level >= LEVEL_TEXTS else prompt[:_SHORT]
        return part if isinstance(part, str) else list(part)

    def _write(self, event: str, title: str, record: dict[str, Any]) -> None:
        if self._bare is None:
            logger.info("%s: %s", title, ", ".join(f"{name}={json.dumps(value)}" for name, value in record.items()))
            return
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        self._bare.info("%s", json.dumps({"timestamp": now, "event": f"request.{event}", **record}))


# of ``meta_info``: counts, times and the finish reason, but no log-probabilities or states
_META = frozenset(
    ("finish_reason", "prompt_tokens", "completion_tokens", "cached_tokens", "e2e_latency", "ttft", "queue_time")
) | {"spec_verify_ct", "spec_accept_length"}


def _chosen(params: SamplingParams) -> dict[str, Any]:
    """Sampling controls that differ from what they are when nobody chooses."""
    usual = SamplingParams()
    pairs = ((field.name, getattr(params, field.name)) for field in fields(params))
    return {name: value for name, value in pairs if value != getattr(usual, name)}
