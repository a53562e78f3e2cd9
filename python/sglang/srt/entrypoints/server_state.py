"""What the HTTP server and the in-process engine say about themselves, load, and change while they run, alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from sglang.srt.managers.profiler import ProfileOptions
from sglang.srt.managers.request_logger import make_request_logger
from sglang.srt.managers.tokenizer_manager import TokenizerManager, first_refusal
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_transformers.tokenizer import load_tokenizer
from sglang.version import __version__

# arguments that may change while a server runs; the rest shapes memory, models or processes
_OF_SCHEDULER = (
    "max_running_requests",
    "max_queued_requests",
    "schedule_conservativeness",
    "stream_interval",
    "decode_log_interval",
)
_OF_LOG = ("log_requests", "log_requests_level")
SETTABLE = (*_OF_SCHEDULER, *_OF_LOG)
# a trace of many steps takes long to write
_PROFILE_S = 600.0


def load_server_tokenizer(server_args: ServerArgs) -> PreTrainedTokenizerFast:
    """The tokenizer, with the chat template that the arguments ask for. Takes resolved arguments."""
    assert server_args.tokenizer_path is not None, "resolve_server_args has not run"
    tokenizer = load_tokenizer(Path(server_args.tokenizer_path), trust_remote_code=server_args.trust_remote_code)
    if server_args.chat_template is not None:
        tokenizer.chat_template = Path(server_args.chat_template).read_text(encoding="utf-8")
    return tokenizer


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """Outcome of an update. ``message`` says why it was not done; ``num_paused``: sequences that were running."""

    message: str
    num_paused: int


class ServerState:
    """A running server as a whole: its arguments as they are now, and its scheduler."""

    def __init__(self, server_args: ServerArgs, manager: TokenizerManager) -> None:
        self._args = server_args
        self._manager = manager

    @property
    def args(self) -> ServerArgs:
        """As the server was started, but for what was changed since."""
        return self._args

    async def info(self) -> dict[str, Any]:
        """Settings without secrets, facts of the scheduler now, and the result of an integrity check of its memory."""
        integrity = await self._manager.control("check_integrity")
        return {
            **self._args.public_dict(),
            **self._manager.scheduler_info,
            "internal_states": await self.internal_states(),
            "lost_replicas": {str(replica): cause for replica, cause in self._manager.lost_replicas.items()},
            "integrity": {
                "ok": all(reply.ok for reply in integrity),
                "message": first_refusal(integrity),
                **_sums([reply.data for reply in integrity]),
            },
            "num_pending_requests": self._manager.num_pending,
            "version": __version__,
        }

    async def internal_states(self) -> list[dict[str, Any]]:
        """Counts and load of each scheduler that lives; ``dp_rank`` tells which replica it is."""
        return [{"dp_rank": reply.replica, **reply.data} for reply in await self._manager.control("server_info")]

    async def loads(self) -> list[dict[str, int]]:
        """What each scheduler that lives has before it, for whoever spreads requests over servers."""
        return [
            {
                "dp_rank": state["dp_rank"],
                "num_reqs": state["num_running_reqs"] + state["num_queue_reqs"],
                "num_waiting_reqs": state["num_queue_reqs"],
                "num_tokens": state["kv_cache"]["owned"] + state["kv_cache"]["protected"] + state["num_queue_tokens"],
            }
            for state in await self.internal_states()
        ]

    async def set_internal_state(self, changes: Mapping[str, Any]) -> None:
        """Change arguments of ``SETTABLE``. ``ValueError`` for another name, or a value that its flag does not take."""
        for name in changes:
            if name not in SETTABLE:
                raise ValueError(f"server_args.{name!s:.100} cannot be changed now, only {', '.join(SETTABLE)} can")
        changed = self._args.derive(**changes)
        before, after = asdict(self._args.schedule_config()), asdict(changed.schedule_config())
        await self._control("reconfigure", {name: value for name, value in after.items() if value != before[name]})
        if any(name in changes for name in _OF_LOG):
            self._manager.request_logger = make_request_logger(changed)
        self._args = changed

    async def start_profile(self, options: ProfileOptions) -> str:
        """Begin a trace of scheduler steps; the folder it will be in. ``ValueError`` when that cannot be."""
        return str((await self._control("start_profile", asdict(options)))[0]["output_dir"])

    async def stop_profile(self) -> list[str]:
        """End the trace; its file, or one of each replica. ``ValueError`` when none runs."""
        return [str(data["output_file"]) for data in await self._control("stop_profile", {})]

    async def update_weights(self, model_path: Path, draft_model_path: Path | None, *, abort: bool) -> WeightUpdate:
        """Serve other weights of the same shape, once what runs has ended, or after its ``abort``."""
        draft = None if draft_model_path is None else str(draft_model_path)
        num_paused, message = await self._manager.update_weights(str(model_path), draft, abort=abort)
        if not message:
            self._args = self._args.derive(model_path=str(model_path))
            if draft is not None:
                self._args = self._args.derive(speculative_draft_model_path=draft)
        return WeightUpdate(message, num_paused)

    async def _control(self, action: Any, data: dict[str, Any]) -> list[dict[str, Any]]:
        replies = await self._manager.control(action, _PROFILE_S, data)
        message = first_refusal(replies)
        if message:
            raise ValueError(message)
        return [reply.data for reply in replies]


def _sums(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    names = dict.fromkeys(name for count in counts for name in count)
    return {name: sum(count.get(name, 0) for count in counts) for name in names}
