"""The console command: `sglang serve ...`, `sglang version`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from sglang import check_env, launch_server
from sglang.version import __version__

_USAGE = """usage: sglang COMMAND ...

  serve      start a server; takes the flags of python -m sglang.launch_server (see sglang serve --help)
  check_env  say what this machine and its packages are, for a report
  version    say which version this is
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 2 when there is no such command."""
    command, *rest = (sys.argv[1:] if argv is None else list(argv)) or [""]
    if command == "serve":
        return launch_server.main(rest)
    if command == "check_env":
        return check_env.main()
    if command == "version":
        print(f"sglang {__version__}")
        return 0
    if command in ("-h", "--help"):
        print(_USAGE, end="")
        return 0
    print(f"error: {command!r} is not a command\n\n{_USAGE}" if command else _USAGE, file=sys.stderr, end="")
    return 2


if __name__ == "__main__":
    sys.exit(main())
