"""``--config FILE``: arguments of a server in a YAML file, under the names of their flags."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from sglang.srt.server_args_fields import ArgSpec
from sglang.srt.server_args_unsupported import UNSUPPORTED_FLAGS

CONFIG_FLAG = "--config"
CONFIG_HELP = (
    "YAML file with arguments under the names of their flags, like 'page-size: 16' or 'enable-metrics: true'. Flags on "
    "the command line win."
)


def read_config_file(
    path: str, specs: Mapping[str, ArgSpec], closest: Callable[[str, Iterable[str]], str]
) -> dict[str, Any]:
    """Field name -> value of every argument that the file gives; the values still have to be checked.

    Raises ``ValueError`` in one sentence that names the file, and the key where one is at fault. ``closest`` ends a
    sentence about an unknown name.
    """
    fields = {name.removeprefix("--"): field for field, spec in specs.items() for name in spec.names}
    given: dict[str, Any] = {}
    for key, value in _load(path).items():
        name = str(key).replace("_", "-")
        refused = UNSUPPORTED_FLAGS.get(f"--{name}")
        if refused is not None:
            if value is not None and value is not False:
                refused.check("" if value is True else str(value))
            continue
        if name not in fields:
            raise ValueError(f"{CONFIG_FLAG} {path} has an unknown key {str(key)!r:.100}{closest(name, fields)}")
        field = fields[name]
        if field in given:
            raise ValueError(f"{CONFIG_FLAG} {path} gives {specs[field].flag} twice: leave one out")
        # JSON that a flag takes as text may be written as YAML
        given[field] = json.dumps(value) if isinstance(value, dict) and specs[field].kind == "text" else value
    return given


def _load(path: str) -> dict[Any, Any]:
    # optional at run time: only a configuration file needs it
    import yaml

    file = Path(path).expanduser()
    try:
        value = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{CONFIG_FLAG} {path!r} cannot be read: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{CONFIG_FLAG} {path!r} is not valid YAML: {' '.join(str(error).split())[:300]}") from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{CONFIG_FLAG} {path!r} must hold names and values, got a {type(value).__name__}")
    return value
