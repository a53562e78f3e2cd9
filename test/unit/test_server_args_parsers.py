"""Which parsers run: those of the model, unless others are asked for."""

from __future__ import annotations

import pytest

from sglang.srt.configs.registries import MODELS, OUTPUT_FORMATS, load_entry
from sglang.srt.entrypoints.parsers.base import OutputFormat
from sglang.srt.server_args_parsers import resolve_parsers


@pytest.mark.parametrize("architecture", MODELS)
def test_a_model_brings_its_parsers(architecture: str) -> None:
    assert resolve_parsers(None, None, architecture) == {"reasoning_parser": "gemma4", "tool_call_parser": "gemma4"}
    assert resolve_parsers("none", None, architecture)["tool_call_parser"] == "gemma4"
    assert resolve_parsers("none", "none", architecture) == {"reasoning_parser": "none", "tool_call_parser": "none"}


def test_another_model_has_none_unless_asked_for() -> None:
    assert set(resolve_parsers(None, None, "Llama").values()) == {"none"}
    assert resolve_parsers("gemma4", None, "Llama") == {"reasoning_parser": "gemma4", "tool_call_parser": "none"}


def test_two_families_exclude_each_other() -> None:
    with pytest.raises(
        ValueError, match="--reasoning-parser a and --tool-call-parser gemma4 read answers of different"
    ):
        resolve_parsers("a", None, "Gemma4ForCausalLM")


@pytest.mark.parametrize("name", OUTPUT_FORMATS)
def test_every_format_has_markers_and_a_parser(name: str) -> None:
    output_format: OutputFormat = load_entry(OUTPUT_FORMATS, name)()
    opened, closed = output_format.thought_markers
    parser = output_format.make_parser(reasoning=True, tools=True)
    assert opened != closed and len(output_format.call_markers) >= 2
    assert parser.feed("a") and not parser.finish()
