"""What the HTTP server and the in-process engine say about themselves, and load alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_transformers.tokenizer import load_tokenizer
from sglang.version import __version__


def load_server_tokenizer(server_args: ServerArgs) -> PreTrainedTokenizerFast:
    """The tokenizer, with the chat template that the arguments ask for. Takes resolved arguments."""
    assert server_args.tokenizer_path is not None, "resolve_server_args has not run"
    tokenizer = load_tokenizer(Path(server_args.tokenizer_path), trust_remote_code=server_args.trust_remote_code)
    if server_args.chat_template is not None:
        tokenizer.chat_template = Path(server_args.chat_template).read_text(encoding="utf-8")
    return tokenizer


async def get_server_info(server_args: ServerArgs, manager: TokenizerManager) -> dict[str, Any]:
    """Settings without secrets, facts of the scheduler now, and the result of an integrity check of its memory."""
    state = await manager.control("server_info")
    integrity = await manager.control("check_integrity")
    return {
        **server_args.public_dict(),
        **manager.scheduler_info,
        "internal_states": [state.data],
        "integrity": {"ok": integrity.ok, "message": integrity.message, **integrity.data},
        "num_pending_requests": manager.num_pending,
        "version": __version__,
    }
