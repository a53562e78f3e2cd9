"""Entry point of the server: ``python -m sglang.launch_server --model-path ...``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from sglang.srt.server_args import prepare_server_args
from sglang.srt.server_args_resolution import resolve_server_args
from sglang.srt.utils.log import configure_logger


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, resolve, serve until stopped. Returns the exit status: 2 when the arguments are at fault."""
    try:
        server_args = prepare_server_args(sys.argv[1:] if argv is None else argv)
        configure_logger(server_args.log_level)
        server_args = resolve_server_args(server_args)
    except ValueError as err:
        print(f"error: {err}", file=sys.stderr)
        return 2
    # imported here, so that a wrong flag is reported before the engine's libraries are loaded, and so that worker
    # processes, which import this module again, do not load a web server
    if server_args.node_rank > 0:
        from sglang.srt.entrypoints.launch import compute_only

        compute_only(server_args)
    else:
        from sglang.srt.entrypoints.http_server import launch_server

        launch_server(server_args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
