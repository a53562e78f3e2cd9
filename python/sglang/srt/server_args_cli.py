"""The command line, made from the arguments' own descriptions."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING
from typing import Any, NoReturn

from sglang.srt.server_args_config import CONFIG_FLAG, CONFIG_HELP, read_config_file
from sglang.srt.server_args_fields import ArgSpec
from sglang.srt.server_args_unsupported import UNSUPPORTED_FLAGS

_UNSUPPORTED, _CONFIG = "unsupported", "config"


def parse_command_line(
    argv: Sequence[str], specs: Mapping[str, ArgSpec], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Field name -> value of every argument that ``argv`` gives. ``defaults`` are shown in the help.

    Raises ``ValueError`` in one sentence for an unknown flag, one that is known but not supported, or text that is no
    value of its kind; ``--help`` prints the help and exits.
    """
    namespace, extra = _make_parser(specs, defaults).parse_known_args(list(argv))
    for text in extra:
        flag = text.partition("=")[0]
        if flag.startswith("-"):
            hint = closest(flag, [CONFIG_FLAG, *(name for spec in specs.values() for name in spec.names)])
            raise ValueError(f"unknown flag {flag!r:.100}{hint}")
    if extra:
        raise ValueError(f"unexpected argument {extra[0]!r:.100}: every argument follows a flag")
    given = vars(namespace)
    for flag, values in given.pop(_UNSUPPORTED, []):
        UNSUPPORTED_FLAGS[flag].check(" ".join(values))
    config = given.pop(_CONFIG, None)
    from_file = {} if config is None else read_config_file(config, specs, closest)
    on_line = {name: value if value is True else specs[name].parse(value) for name, value in given.items()}
    return from_file | on_line


def closest(name: str, known: Iterable[str]) -> str:
    """End of an error message about an unknown ``name``: what may have been meant."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f": did you mean {close[0]}?" if close else ": see --help for what there is"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


class _NoteUnsupported(argparse.Action):
    """Collects (flag, values) of flags that are known and not supported."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        vars(namespace).setdefault(self.dest, []).append((self.option_strings[0], values))


def _make_parser(specs: Mapping[str, ArgSpec], defaults: Mapping[str, Any]) -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m sglang.launch_server", allow_abbrev=False, argument_default=argparse.SUPPRESS)
    groups = {title: parser.add_argument_group(title) for title in dict.fromkeys(s.group for s in specs.values())}
    for name, spec in specs.items():
        options: dict[str, Any] = {"dest": name, "help": spec.help}
        if spec.kind == "flag":
            options["action"] = "store_true"
        else:
            note = spec.default_note or ("required" if defaults[name] is MISSING else str(defaults[name]))
            options["help"] += f" (default: {note})"
            if spec.kind == "integers":
                options["nargs"] = "+"
            options["metavar"] = "{" + ",".join(spec.choices) + "}" if spec.choices else spec.kind.upper()
        options["help"] = options["help"].replace("%", "%%")
        groups[spec.group].add_argument(*spec.names, **options)
    parser.add_argument(CONFIG_FLAG, dest=_CONFIG, metavar="FILE", help=CONFIG_HELP)
    for flag in UNSUPPORTED_FLAGS:
        parser.add_argument(flag, dest=_UNSUPPORTED, nargs="*", action=_NoteUnsupported, help=argparse.SUPPRESS)
    return parser
