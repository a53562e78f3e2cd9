"""The console command and the report on the environment."""

from __future__ import annotations

import platform
import re

import pytest
import torch

from fixtures.source_tree import ROOT
from sglang import check_env, cli
from sglang.version import __version__


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out == f"sglang {__version__}\n"
    assert cli.main(["--help"]) == 0
    commands = re.findall(r"^  (\w+) ", capsys.readouterr().out, flags=re.MULTILINE)
    assert commands == ["serve", "check_env", "version"]


@pytest.mark.parametrize(("argv", "message"), [([], "usage: sglang"), (["srve"], "error: 'srve' is not a command")])
def test_no_such_command(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 2
    assert message in capsys.readouterr().err


def test_serve_takes_the_flags_of_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--model-path", "tiny-gemma4", "--prot", "3"]) == 2
    assert capsys.readouterr().err == "error: unknown flag '--prot': did you mean --port?\n"


def test_the_command_is_installed() -> None:
    assert '[project.scripts]\nsglang = "sglang.cli:main"\n' in (ROOT / "pyproject.toml").read_text()


def test_check_env(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_env.main() == 0
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines["sglang"].startswith(__version__) and lines["Python"].startswith(platform.python_version())
    assert lines["torch"] == torch.__version__ and lines["Device"].startswith("--device auto is ")
    assert re.fullmatch(r"[\d.]+ GiB, [\d.]+ GiB available", lines["Memory"])
