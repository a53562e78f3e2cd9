"""The native ``/generate`` request and reply, shared by the HTTP server and the in-process engine."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from sglang.srt.managers.generate_output import GenerateOutput
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.sampling.logprobs import LogprobOptions, OutputOptions
from sglang.srt.sampling.sampling_params import SamplingParams

T = TypeVar("T")
_MAX_COUNT = (1 << 31) - 1

GENERATE_FIELDS = (
    "text",
    "input_ids",
    "sampling_params",
    "stream",
    "rid",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "token_ids_logprob",
    "return_text_in_logprobs",
    "return_hidden_states",
    "return_accept_lens",
    "custom_logit_processor",
)
# fields that select what is not supported yet, and values of them that select nothing
_LATER: Mapping[str, tuple[Any, ...]] = {
    "audio_data": (),
    "background": (),
    "image_data": (),
    "input_embeds": (),
    "log_metrics": (True,),
    "lora_path": (),
    "modalities": (),
    "model": (),
    "no_logs": (),
    "priority": (),
    "return_bytes": (),
    "return_entropy": (),
    "session_params": (),
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
    check_fields(body, GENERATE_FIELDS, _LATER)
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
        output_options=parse_output_options(body, len(prompts)),
    )


def parse_output_options(body: Mapping[str, Any], num_prompts: int) -> tuple[OutputOptions, ...]:
    """What each prompt's reply shall hold beside text. A field has one value for all prompts, or a list of values."""
    with_text = _flag("return_text_in_logprobs", body.get("return_text_in_logprobs"))
    wanted = _each("return_logprob", body, num_prompts, _flag)
    starts = _each("logprob_start_len", body, num_prompts, partial(_count, default=-1))
    tops = _each("top_logprobs_num", body, num_prompts, partial(_count, default=0))
    hidden = _each("return_hidden_states", body, num_prompts, _flag)
    accept_lens = _each("return_accept_lens", body, num_prompts, _flag)
    processors = _each("custom_logit_processor", body, num_prompts, _text)
    asked = body.get("token_ids_logprob")
    is_one_list = not isinstance(asked, list) or not any(isinstance(item, (list, type(None))) for item in asked)
    asked = [asked] * num_prompts if is_one_list else asked
    ids = _each("token_ids_logprob", {"token_ids_logprob": asked}, num_prompts, _token_ids)
    return tuple(
        OutputOptions(
            logprobs=LogprobOptions(starts[i], tops[i], ids[i]) if wanted[i] else None,
            text_in_logprobs=with_text,
            hidden_states=hidden[i],
            custom_logit_processor=processors[i],
            accept_lens=accept_lens[i],
        )
        for i in range(num_prompts)
    )


def _each(name: str, body: Mapping[str, Any], num_prompts: int, parse: Callable[[str, Any], T]) -> list[T]:
    value = body.get(name)
    if not isinstance(value, list):
        return [parse(name, value)] * num_prompts
    if len(value) != num_prompts:
        raise ValueError(f"{name} has {len(value)} entries for {num_prompts} prompts: give one for each or for all")
    return [parse(name, item) for item in value]


def _flag(name: str, value: Any) -> bool:
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r:.200}")
    return bool(value)


def _count(name: str, value: Any, default: int) -> int:
    if value is None:
        return default
    if type(value) is not int or not default <= value <= _MAX_COUNT:
        raise ValueError(f"{name} must be an integer from {default} to {_MAX_COUNT}, got {value!r:.200}")
    return value


def _text(name: str, value: Any) -> str | None:
    if value is not None and (not isinstance(value, str) or not value):
        raise ValueError(f"{name} must be a string that is not empty, got {value!r:.200}")
    return value


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)) or not all(type(token) is int for token in value):
        raise ValueError(f"{name} must be a list of token ids, got {value!r:.200}")
    return tuple(value)


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
    replies = [_reply(out) for out in outputs]
    return replies[0] if is_one_sequence(req) else replies


def _reply(out: GenerateOutput) -> dict[str, Any]:
    return {"text": out.text, "output_ids": list(out.output_ids), "meta_info": out.meta_info()}


def is_one_sequence(req: GenerateReqInput) -> bool:
    """Whether the reply is one object; otherwise replies are told apart by their place in a list, or ``index``."""
    return req.is_single and req.sampling_params[0].n == 1


async def generate_events(manager: TokenizerManager, req: GenerateReqInput) -> AsyncGenerator[dict[str, Any], None]:
    """Run a request; yields replies that each hold the whole text and all ids of their sequence so far."""
    one_sequence = is_one_sequence(req)
    so_far: dict[int, GenerateOutput] = {}
    async with contextlib.aclosing(manager.generate_request(req)) as outputs:
        async for out in outputs:
            if out.index in so_far:
                out = out.after(so_far[out.index])
            so_far[out.index] = out
            reply = _reply(out)
            yield reply if one_sequence else reply | {"index": out.index}
