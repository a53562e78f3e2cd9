"""What a request to profile asks for, over HTTP or inside a program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.srt.entrypoints.native_protocol import check_fields
from sglang.srt.managers.profiler import ProfileOptions

PROFILE_FIELDS = ("num_steps", "start_step", "activities", "with_stack", "record_shapes")
_ACTIVITIES = ("CPU", "GPU")
_MAX_STEPS = 1_000_000


def parse_profile(body: Mapping[str, Any]) -> ProfileOptions:
    """What ``/start_profile`` asks for; ``ValueError`` names the field."""
    if body.get("output_dir") is not None:
        raise ValueError(
            "output_dir cannot be chosen by a request: traces go to the SGLANG_TORCH_PROFILER_DIR that the server was "
            "started with"
        )
    check_fields(body, (*PROFILE_FIELDS, "output_dir"), {"profile_by_stage": (), "merge_profiles": ()})
    activities = body.get("activities")
    if activities is None:
        activities = list(_ACTIVITIES)
    if not isinstance(activities, list) or not activities or not all(name in _ACTIVITIES for name in activities):
        raise ValueError(f"activities must be a list of {' and '.join(_ACTIVITIES)}, got {activities!r:.200}")
    return ProfileOptions(
        num_steps=_steps(body, "num_steps", 1),
        start_step=_steps(body, "start_step", 0) or 0,
        activities=tuple(activities),
        with_stack=flag(body, "with_stack"),
        record_shapes=flag(body, "record_shapes"),
    )


def flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r:.200}")
    return bool(value)


def _steps(body: Mapping[str, Any], name: str, low: int) -> int | None:
    value = body.get(name)
    if value is not None and (type(value) is not int or not low <= value <= _MAX_STEPS):
        raise ValueError(f"{name} must be an integer from {low} to {_MAX_STEPS}, got {value!r:.200}")
    return None if value is None else int(value)
