"""Environment variables: parsed by type, named when wrong, all documented."""

from __future__ import annotations

import pytest

from fixtures.source_tree import ROOT
from sglang.srt.utils.env import ENVIRONMENT, EnvVar, parse_bool

SWITCH = EnvVar(name="SGLANG_TEST_SWITCH", default=False, parse=parse_bool, help="a switch")
COUNT = EnvVar(name="SGLANG_TEST_COUNT", default=3, parse=int, help="a number")


@pytest.mark.parametrize(("text", "value"), [("1", True), ("TRUE", True), (" on ", True), ("0", False), ("No", False)])
def test_switch_is_read_each_time(monkeypatch, text, value) -> None:
    assert SWITCH.get() is False
    monkeypatch.setenv(SWITCH.name, text)
    assert SWITCH.get() is value


def test_empty_means_default(monkeypatch) -> None:
    monkeypatch.setenv(COUNT.name, "")
    assert COUNT.get() == 3
    monkeypatch.setenv(COUNT.name, "12")
    assert COUNT.get() == 12


@pytest.mark.parametrize("variable", [SWITCH, COUNT], ids=lambda variable: variable.name)
def test_wrong_text_names_the_variable(monkeypatch, variable) -> None:
    monkeypatch.setenv(variable.name, "maybe")
    with pytest.raises(ValueError, match=f"{variable.name}='maybe'"):
        variable.get()


def test_every_variable_is_documented() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
    assert [variable.name for variable in ENVIRONMENT if f"`{variable.name}`" not in pages] == []
    assert all(variable.name.startswith("SGLANG_") for variable in ENVIRONMENT)
