"""Arguments of constrained answers: what is installed, and white space of JSON."""

from __future__ import annotations

import importlib.util

import pytest

from sglang.srt.server_args import ServerArgs
from sglang.srt.server_args_grammar import make_grammar_config, resolve_grammar_backend
from sglang.srt.server_args_slices import GrammarConfig


def hide(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if xgrammar were not installed."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "xgrammar" else found(name))


def test_the_default_is_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert resolve_grammar_backend(None) == resolve_grammar_backend("xgrammar") == "xgrammar"
    assert resolve_grammar_backend("none") == "none"
    hide(monkeypatch)
    assert resolve_grammar_backend(None) == resolve_grammar_backend("none") == "none"
    with pytest.raises(ValueError, match="^--grammar-backend xgrammar needs the package xgrammar, .* not installed"):
        resolve_grammar_backend("xgrammar")


@pytest.mark.parametrize(
    "pattern, any_whitespace, most",
    [
        (None, False, None),
        (r"[ \n\t]*", True, None),
        ("[ \n\t\r]*", True, None),
        (r"\s*", True, None),
        (r"\s?", True, 1),
        (r"[\n\t ]{0,4}", True, 4),
        (r"\s{0,0}", False, None),
    ],
)
def test_whitespace(pattern: str | None, any_whitespace: bool, most: int | None) -> None:
    config = make_grammar_config("xgrammar", pattern, disable_any=False)
    assert config == GrammarConfig("xgrammar", any_whitespace, most)


@pytest.mark.parametrize("pattern", ["x*", r"[ ]*", r"\s+", r"[ \n\t]", r"[a \n\t]*", r"\s{1,2}", "*"])
def test_whitespace_that_cannot_be_had(pattern: str) -> None:
    with pytest.raises(ValueError, match="^--constrained-json-whitespace-pattern .* is not supported: give space"):
        ServerArgs(model_path="x", constrained_json_whitespace_pattern=pattern)


def test_two_flags_that_say_the_opposite() -> None:
    with pytest.raises(ValueError, match="--constrained-json-disable-any-whitespace exclude each other"):
        ServerArgs(
            model_path="x",
            constrained_json_whitespace_pattern=r"\s*",
            constrained_json_disable_any_whitespace=True,
        )


def test_none_is_no_backend() -> None:
    assert make_grammar_config("none", None, disable_any=True).backend is None
    assert ServerArgs(model_path="x", grammar_backend="none").grammar_config().backend is None
