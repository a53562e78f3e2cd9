"""Every command in the documents is run as a reader would type it, page by page from the top.

A page that starts a server is followed with that server, any other page with the one of `make serve`. What a machine of
two cores without network cannot do is replaced by what stands in ``SUBSTITUTES``, or carries a mark in the page,
`<!-- not run: REASON -->`, with a reason of ``NOT_RUN``.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fixtures.doc_blocks import (
    Block,
    blocks,
    commands,
    pages,
    printed_by,
    server_env,
    server_flags,
    server_port,
    stray_marks,
)
from fixtures.server_process import ServerProcess, launch
from fixtures.source_tree import ROOT, report
from sglang import Engine
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang.srt.server_args_resolution import resolve_server_args

SUBSTITUTES = (
    # checkpoints that are not here: the shipped pair, whose assistant has the same name
    (r"(?:/models|google)/gemma-4-[\w.-]+", "tiny-gemma4"),
    # measurements: one small case of them
    (r"python benchmark/bench_speculative\.py", r"\g<0> --tasks count --batch 1 --repeats 1 --tokens 32 --no-output"),
    (r"/var/tmp/traces", "traces"),
    # where things are
    (r"\.venv/bin/(\w+)", r"\1"),
)
NOT_RUN = {
    "it is this test suite",
    "it rewrites files of the project",
    "it takes hours",
    "needs Ray",
    "needs a GPU",
    "needs several machines",
    "needs the network",
}
RUN = ("bash", "python")
# a block in another language that has one of these is a command that nobody would run
COMMAND = re.compile(r"^\s*(?:\$ |(?:curl|python3?|pip|make|sglang|docker|import|export|sudo) )", flags=re.MULTILINE)
PAGES = [page for page in pages() if any(b.language in RUN and b.not_run is None for b in blocks(page))]
_COMMAND_S = 90


class ReaderOfPages:
    """Types commands into a shell of its own. One server runs at a time; it stays while pages ask for the same one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._bin = folder / "bin"
        self._bin.mkdir()
        for name, start in {"python": "", "python3": "", "sglang": "-m sglang.cli "}.items():
            program = self._bin / name
            program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {start}"$@"\n')
            program.chmod(0o755)
        (self._bin / ".curlrc").write_text("fail-with-body\nsilent\nshow-error\nmax-time = 60\n")
        self._running: tuple[object, ServerProcess] | None = None
        self._closing = contextlib.ExitStack()
        self._documented_port = "30000"

    @property
    def server(self) -> ServerProcess:
        assert self._running is not None
        return self._running[1]

    def start_server(self, command: str) -> None:
        """The server of ``command``, on a free port; the one that runs if it has the same settings."""
        flags = server_flags(command)
        assert flags is not None, command
        settings = settings_of(flags), server_env(command)
        self._documented_port = server_port(command)
        if self._running is None or self._running[0] != settings:
            self.close()
            with pytest.MonkeyPatch.context() as patch:
                for name, value in server_env(command).items():
                    patch.setenv(name, value)
                server = self._closing.enter_context(launch(self._folder, *flags))
            self._running = settings, server
            server.wait_ready()

    def run_shell(self, text: str) -> None:
        for command in commands(text):
            if server_flags(command) is not None:
                self.start_server(command)
                continue
            env = os.environ | {
                "PATH": f"{self._bin}{os.pathsep}{os.environ['PATH']}",
                "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("python", "sgl-kernel/python")),
                "CURL_HOME": str(self._bin),
            }
            shell = ["bash", "-euo", "pipefail", "-c", self._here(command)]
            done = subprocess.run(shell, capture_output=True, text=True, env=env, timeout=_COMMAND_S, check=False)
            assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"

    def run_python(self, text: str, names: dict[str, Any]) -> dict[str, Any]:
        """Run a snippet that knows the names of those before it; returns all names. What it says it prints, it must."""
        file = self._folder / "snippet.py"
        file.write_text(self._here(text), encoding="utf-8")
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            names = runpy.run_path(str(file), init_globals=names, run_name="__main__")
        lines = iter(output.getvalue().splitlines())
        for expected in printed_by(text):
            assert expected in lines, f"{expected!r} was not printed, but {output.getvalue()!r}"
        return names

    def close(self) -> None:
        self._running = None
        self._closing.close()

    def _here(self, text: str) -> str:
        """The text with the address of the server that runs."""
        here = re.sub(rf"(?:127\.0\.0\.1|localhost):{self._documented_port}\b", f"127.0.0.1:{self.server.port}", text)
        return here.replace("sglang.bench_serving", f"sglang.bench_serving --port {self.server.port}")


def settings_of(flags: list[str]) -> ServerArgs:
    return resolve_server_args(prepare_server_args(flags)).derive(random_seed=0)


def replaced(text: str) -> str:
    text = re.sub(r"^make serve\b.*", lambda line: behind_make(line[0]), text, flags=re.MULTILINE)
    for pattern, replacement in SUBSTITUTES:
        text = re.sub(pattern, replacement, text)
    return text


def behind_make(command: str) -> str:
    """The command that `make serve` runs when the environment is there."""
    program, *words = shlex.split(command, comments=True)
    dry = [program, "--directory", str(ROOT), "--dry-run", *words]
    done = subprocess.run(dry, capture_output=True, text=True, check=True)
    (started,) = [text for text in commands(done.stdout) if server_flags(text.replace(".venv/bin/", "")) is not None]
    return started


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReaderOfPages]:
    running = ReaderOfPages(tmp_path_factory.mktemp("reader"))
    yield running
    running.close()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working folder that looks like the project's and may be written to."""
    for entry in ROOT.iterdir():
        (tmp_path / entry.name).symlink_to(entry)
    monkeypatch.chdir(tmp_path)


def _server_of(page: Path) -> str | None:
    """The first command of a page that starts a server."""
    for block in blocks(page):
        if block.language == "bash" and block.not_run is None:
            for command in commands(replaced(block.text)):
                if server_flags(command) is not None:
                    return command
    return None


def _by_server(page: Path) -> str:
    """Sorts pages so that those with the same server follow one another."""
    flags = server_flags(_server_of(page) or replaced("make serve"))
    assert flags is not None
    try:
        return repr(settings_of(flags))
    except ValueError:  # of a file that the page writes first
        return repr(flags)


@pytest.mark.parametrize("page", sorted(PAGES, key=_by_server), ids=lambda page: page.stem)
@pytest.mark.usefixtures("folder")
def test_a_page(reader: ReaderOfPages, page: Path) -> None:
    if _server_of(page) is None:
        reader.start_server(replaced("make serve"))
    names: dict[str, Any] = {}
    try:
        for block in blocks(page):
            if block.language in RUN and block.not_run is None:
                print("running", block.place)
                text = replaced(block.text)
                if block.language == "bash":
                    reader.run_shell(text)
                else:
                    names = reader.run_python(text, names)
    finally:
        for value in names.values():
            if isinstance(value, Engine):
                value.shutdown()


def _complaints(page: Path) -> list[str]:
    wrong = stray_marks(page)
    for block in blocks(page):
        if block.language not in RUN and (block.language in ("sh", "shell", "console") or COMMAND.search(block.text)):
            wrong.append(
                f"{block.place}: a command in a block of {block.language or 'no language'}; use bash or python"
            )
        if block.not_run is not None and block.not_run not in NOT_RUN:
            wrong.append(f"{block.place}: {block.not_run!r} is no reason not to run it")
    return wrong


def test_nothing_is_left_out_without_a_mark() -> None:
    report([complaint for page in pages() for complaint in _complaints(page)])
    marked = [block for page in pages() for block in blocks(page) if block.not_run is not None]
    run = [block for page in PAGES for block in blocks(page) if block.language in RUN and block.not_run is None]
    assert len(run) > 2 * len(marked), f"{len(run)} blocks are run, {len(marked)} are not"


def test_what_this_file_would_find(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- not run: needs a GPU -->\n\n```bash\nmake gpu\n```\n\ntext\n\n"
        "<!-- not run: no time -->\n```bash\nls\n```\n"
        "<!-- not run: needs a GPU -->\nno block\n\n```\ncurl http://x\n```\n\n- item\n\n  ```python\n  a = 1\n  ```\n"
    )
    first, second, third, last = blocks(page)
    assert (first.not_run, first.line, first.text) == ("needs a GPU", 3, "make gpu\n")
    assert third == Block(page, 16, "", "curl http://x\n", None)
    assert (last.language, last.text) == ("python", "a = 1\n")
    wrong = "\n".join(_complaints(page))
    assert "3 marks for 2 blocks" in wrong and "'no time' is no reason" in wrong and "no language" in wrong
    assert wrong.count("\n") == 2


def test_commands_are_cut_as_a_shell_would() -> None:
    text = "# comment\npython -m a \\\n  b  # c'd\n\ncurl -d '{\n  \"a\": 1}' x\ncat > f <<'END'\nx '\nEND\nls\n"
    first, second, third, fourth = commands(text)
    assert first.startswith("python") and second.endswith("x") and third.endswith("END") and fourth == "ls"
    assert server_flags("exec python -m sglang.launch_server --host 0.0.0.0 --model-path a --port=9 &") == [
        "--model-path",
        "a",
    ]
    assert server_flags("sglang serve --port 8000 --model-path a") == ["--model-path", "a"]
    traced = "TRACES=a/b python -m sglang.launch_server --model-path a"
    assert server_flags(traced) == ["--model-path", "a"] and server_env(traced) == {"TRACES": "a/b"}
    assert server_env("ls a=b") == {} and server_flags("A=b ls") is None
    assert server_flags("ls") is None and server_port("sglang serve --port 8000 --model-path a") == "8000"
    with pytest.raises(ValueError, match="does not end"):
        commands("echo 'a\n")
    assert printed_by("print(1)  # 1\nx  # y\n  print(a, b)  # c d\n") == ["1", "c d"]
