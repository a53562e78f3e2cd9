"""Addresses between the processes of one server."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class PortArgs:
    """Addresses of the sockets between the processes of one server, in a directory that only this user can enter."""

    scheduler_input_ipc: str
    tokenizer_ipc: str

    @classmethod
    def init_new(cls) -> PortArgs:
        """New addresses in a new private directory. ``ValueError`` when the temporary directory's name is too long."""
        folder = tempfile.mkdtemp(prefix="sglang-")  # made with mode 0700
        if len(folder) > 80:  # a Unix socket's name has at most 107 bytes
            shutil.rmtree(folder)
            raise ValueError(f"TMPDIR is too long for the name of a socket ({folder}): set TMPDIR=/tmp")
        return cls(f"ipc://{folder}/scheduler_input", f"ipc://{folder}/tokenizer")

    @property
    def folder(self) -> Path:
        return Path(self.scheduler_input_ipc.removeprefix("ipc://")).parent

    def remove(self) -> None:
        """Remove the directory with its sockets, when every process has ended."""
        shutil.rmtree(self.folder, ignore_errors=True)
