"""`/tokenize` and `/detokenize`: texts to token ids and back, without the scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from sglang.srt.entrypoints.native_protocol import check_fields, parse_ids, parse_texts
from sglang.srt.managers.tokenizer_manager import TokenizerManager

TOKENIZE_FIELDS = ("model", "prompt", "add_special_tokens")
DETOKENIZE_FIELDS = ("model", "tokens", "skip_special_tokens")


async def tokenize_reply(manager: TokenizerManager, body: Mapping[str, Any]) -> dict[str, Any]:
    """Ids and their number for ``prompt``, a text or a list of texts."""
    check_fields(body, TOKENIZE_FIELDS, {})
    texts, is_single = parse_texts("prompt", body.get("prompt"))
    special = _flag(body, "add_special_tokens")
    tokens = [list(await manager.tokenize(text, "prompt", add_special_tokens=special)) for text in texts]
    counts = [len(ids) for ids in tokens]
    return {
        "tokens": tokens[0] if is_single else tokens,
        "count": counts[0] if is_single else counts,
        "max_model_len": manager.limits.context_len,
    }


async def detokenize_reply(manager: TokenizerManager, body: Mapping[str, Any]) -> dict[str, Any]:
    """The text of ``tokens``, a list of ids or a list of such lists."""
    check_fields(body, DETOKENIZE_FIELDS, {})
    lists, is_single = parse_ids("tokens", body.get("tokens"))
    for ids in lists:
        manager.limits.check_vocabulary("tokens", ids)
    # off the event loop: the lists may be long
    texts = await asyncio.to_thread(_decode, manager, lists, _flag(body, "skip_special_tokens"))
    return {"text": texts[0] if is_single else texts}


def _decode(manager: TokenizerManager, lists: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
    decode = manager.tokenizer.decode
    return [decode(list(ids), skip_special_tokens=skip_special_tokens) for ids in lists]


def _flag(body: Mapping[str, Any], name: str) -> bool:
    """A field that is true when left out."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r:.200}")
    return value is not False
