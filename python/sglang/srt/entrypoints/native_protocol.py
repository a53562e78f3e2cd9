"""The native ``/generate`` request and reply, shared by the HTTP server and the in-process engine."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import Any

from sglang.srt.managers.generate_output import GenerateOutput
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.sampling.sampling_params import SamplingParams

_FIELDS = ("text", "input_ids", "sampling_params", "stream", "rid")
# fields that select what is not supported yet, and values of them that select nothing
_LATER: Mapping[str, tuple[Any, ...]] = {
    "audio_data": (),
    "custom_logit_processor": (),
    "image_data": (),
    "input_embeds": (),
    "logprob_start_len": (-1,),
    "lora_path": (),
    "modalities": (),
    "priority": (),
    "return_hidden_states": (),
    "return_logprob": (),
    "return_text_in_logprobs": (True,),
    "session_params": (),
    "token_ids_logprob": (),
    "top_logprobs_num": (0,),
    "video_data": (),
}


def check_fields(body: Mapping[str, Any], known: Iterable[str], later: Mapping[str, tuple[Any, ...]]) -> None:
    """``ValueError`` for a field that is unknown, or that asks for something in ``later``."""
    for name, value in body.items():
        if name in known or name in later and (selects_nothing(value) or value in later[name]):
            continue
        if name in later:
            raise ValueError(f"{name} is not supported yet, got {value!r:.200}: leave it out")
        raise ValueError(f"{name!s:.100} is not a known field: known fields are {', '.join(sorted(known))}")


def selects_nothing(value: Any) -> bool:
    """Whether a field with this value is as good as left out."""
    return value is None or value is False or value == "" or value == [] or value == {}


def parse_generate_request(body: Mapping[str, Any]) -> GenerateReqInput:
    """Check and normalise a request. ``ValueError`` names the field, its value and the fix."""
    check_fields(body, _FIELDS, _LATER)
    stream = body.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise ValueError(f"stream must be true or false, got {stream!r:.200}")
    text, input_ids = body.get("text"), body.get("input_ids")
    if (text is None) == (input_ids is None):
        raise ValueError("text or input_ids must be given, and not both")
    prompts: Sequence[str | tuple[int, ...]]
    if text is not None:
        prompts, is_single = parse_texts("text", text)
    else:
        prompts, is_single = parse_ids("input_ids", input_ids)
    given = body.get("sampling_params")
    return GenerateReqInput(
        prompts=tuple(prompts),
        sampling_params=_parse_sampling(given, len(prompts)),
        stream=bool(stream),
        rids=_parse_rids(body.get("rid"), len(prompts)),
        is_single=is_single,
        clamp_length=not any(
            "max_new_tokens" in item for item in (given if isinstance(given, list) else [given or {}])
        ),
        param="input_ids" if text is None else "text",
    )


def parse_texts(param: str, value: Any) -> tuple[list[str], bool]:
    """Texts, and whether it was one and not a list."""
    if isinstance(value, str):
        return [value], True
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return value, False
    raise ValueError(f"{param} must be a string or a list of strings that is not empty, got {value!r:.200}")


def parse_ids(param: str, value: Any) -> tuple[list[tuple[int, ...]], bool]:
    """Prompts as token ids, and whether it was one and not a list. The vocabulary is checked later."""
    if isinstance(value, (list, tuple)) and value:
        is_single = not isinstance(value[0], (list, tuple))
        prompts = [value] if is_single else value
        if all(isinstance(ids, (list, tuple)) and all(type(token) is int for token in ids) for ids in prompts):
            return [tuple(ids) for ids in prompts], is_single
    raise ValueError(f"{param} must be a list of token ids, or a list of such lists, not empty, got {value!r:.200}")


def _parse_sampling(value: Any, num_prompts: int) -> tuple[SamplingParams, ...]:
    if value is None:
        value = {}
    if isinstance(value, Mapping):
        return (SamplingParams.from_dict(value),) * num_prompts
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise ValueError(f"sampling_params must be an object or a list of objects, got {value!r:.200}")
    if len(value) != num_prompts:
        raise ValueError(f"sampling_params has {len(value)} entries for {num_prompts} prompts: give one for each")
    return tuple(SamplingParams.from_dict(item) for item in value)


def _parse_rids(value: Any, num_prompts: int) -> tuple[str, ...] | None:
    if value is None:
        return None
    rids = [value] if isinstance(value, str) else value
    if not isinstance(rids, list) or not all(isinstance(rid, str) and rid for rid in rids):
        raise ValueError(f"rid must be a string that is not empty, or a list of such, got {value!r:.200}")
    if len(rids) != num_prompts or len(set(rids)) != num_prompts:
        raise ValueError(f"rid has {len(set(rids))} different ids for {num_prompts} prompts: give one for each")
    return tuple(rids)


def generate_reply(req: GenerateReqInput, outputs: Sequence[GenerateOutput]) -> Any:
    """Reply without streaming: an object for one sequence, a list for several."""
    replies = [{"text": out.text, "output_ids": list(out.output_ids), "meta_info": out.meta_info()} for out in outputs]
    return replies[0] if is_one_sequence(req) else replies


def is_one_sequence(req: GenerateReqInput) -> bool:
    """Whether the reply is one object; otherwise replies are told apart by their place in a list, or ``index``."""
    return req.is_single and req.sampling_params[0].n == 1


async def generate_events(manager: TokenizerManager, req: GenerateReqInput) -> AsyncGenerator[dict[str, Any], None]:
    """Run a request; yields replies that each hold the whole text and all ids of their sequence so far."""
    one_sequence = is_one_sequence(req)
    texts: dict[int, str] = {}
    ids: dict[int, list[int]] = {}
    async with contextlib.aclosing(manager.generate_request(req)) as outputs:
        async for out in outputs:
            texts[out.index] = texts.get(out.index, "") + out.text
            ids.setdefault(out.index, []).extend(out.output_ids)
            reply = {"text": texts[out.index], "output_ids": list(ids[out.index]), "meta_info": out.meta_info()}
            yield reply if one_sequence else reply | {"index": out.index}
