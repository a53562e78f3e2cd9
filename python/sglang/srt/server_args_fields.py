"""What one server argument is: its help, its allowed values, and how text becomes its value."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["text", "integer", "integers", "number", "flag"]

_INTEGER = re.compile(r"[+-]?\d{1,18}")


@dataclass(frozen=True, slots=True)
class ArgSpec:
    """One argument. ``names`` are its flags, the canonical one first; bounds are inclusive unless ``above`` is given.

    ``also`` is one integer allowed besides the range; ``synonyms`` are pairs of an accepted spelling and its choice;
    ``default_note`` replaces the default in the docs where it is derived; a ``secret`` stays out of logs and replies.
    """

    names: tuple[str, ...]
    kind: Kind
    group: str
    help: str
    choices: tuple[str, ...] = ()
    synonyms: tuple[tuple[str, str], ...] = ()
    low: float | None = None
    high: float | None = None
    above: float | None = None
    also: int | None = None
    optional: bool = False
    default_note: str = ""
    secret: bool = False

    @property
    def flag(self) -> str:
        return self.names[0]

    def parse(self, text: str | list[str]) -> Any:
        """The value that ``text`` on the command line means; ``check`` still has to see it. Several texts are given for
        the kind "integers" only."""
        if isinstance(text, list):
            if not all(_INTEGER.fullmatch(item) for item in text):
                raise self.bad(" ".join(text))
            return tuple(int(item) for item in text)
        if self.kind == "integer":
            if not _INTEGER.fullmatch(text):
                raise self.bad(text)
            return int(text)
        if self.kind == "number":
            try:
                return float(text)
            except ValueError:
                raise self.bad(text) from None
        return text

    def normalise(self, value: Any) -> Any:
        """Replace a synonym by the choice it stands for, and a whole number by the same float where one is meant."""
        if self.kind == "integers" and isinstance(value, (list, tuple)):
            return tuple(value)
        if isinstance(value, str):
            return dict(self.synonyms).get(value, value)
        if self.kind == "number" and isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 53:
            return float(value)
        return value

    def check(self, value: Any) -> None:
        """``ValueError`` naming flag, value and what is allowed, unless ``value`` is allowed."""
        if not self._allows(value):
            raise self.bad(value)

    def bad(self, value: Any) -> ValueError:
        got = "another value, which is not repeated here" if self.secret else f"{value!r:.200}"
        return ValueError(f"{self.flag} must be {self.describe()}, got {got}")

    def describe(self) -> str:
        """What values are allowed, as a phrase."""
        if self.kind == "flag":
            return "true or false"
        if self.choices:
            return "one of " + ", ".join((*self.choices, *dict(self.synonyms)))
        if self.kind == "text":
            return "a non-empty string"
        parts = []
        if self.above is not None:
            parts.append(f"above {self.above:.15g}")
        if self.low is not None:
            parts.append(f"at least {self.low:.15g}")
        if self.high is not None:
            parts.append(f"at most {self.high:.15g}")
        noun = {"integer": "an integer", "integers": "a list of integers"}.get(self.kind, "a finite number")
        also = f", or {self.also}" if self.also is not None else ""
        return f"{noun} {' and '.join(parts)}{also}"

    def _allows(self, value: Any) -> bool:
        if value is None:
            return self.optional
        if self.kind == "flag":
            return isinstance(value, bool)
        if self.kind == "text":
            return isinstance(value, str) and (value in self.choices if self.choices else bool(value.strip()))
        if self.kind == "integers":
            return isinstance(value, tuple) and bool(value) and all(map(self._allows_number, value))
        return self._allows_number(value)

    def _allows_number(self, value: Any) -> bool:
        number = isinstance(value, float if self.kind == "number" else int) and not isinstance(value, bool)
        if not number or not math.isfinite(value):
            return False
        if self.also is not None and value == self.also:
            return True
        too_low = self.low is not None and value < self.low or self.above is not None and value <= self.above
        return not too_low and (self.high is None or value <= self.high)


def arg(default: Any, spec_help: str, kind: Kind, group: str, *, names: tuple[str, ...] = (), **limits: Any) -> Any:
    """A dataclass field of ``ServerArgs``. Without ``names`` the flag is the field's name (see ``specs_of``).

    ``limits`` are further fields of ``ArgSpec``. ``dataclasses.MISSING`` as default makes the argument required.
    """
    spec = ArgSpec(names=names, kind=kind, group=group, help=spec_help, optional=default is None, **limits)
    return dataclasses.field(default=default, repr=not spec.secret, metadata={"arg": spec})


def specs_of(cls: type) -> dict[str, ArgSpec]:
    """Field name -> argument, in the order of declaration, for a dataclass whose fields were made by ``arg``."""
    specs = {}
    for field in dataclasses.fields(cls):
        spec: ArgSpec = field.metadata["arg"]
        flag = "--" + field.name.replace("_", "-")
        specs[field.name] = dataclasses.replace(spec, names=(flag, *spec.names))
    return specs
