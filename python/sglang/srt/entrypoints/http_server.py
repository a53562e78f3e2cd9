"""The server's process, from the first socket to the last."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import socket
import sys
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from sglang.srt.entrypoints.http_app import build_app
from sglang.srt.entrypoints.prometheus import ServerMetrics
from sglang.srt.entrypoints.replicas import Schedulers, start_schedulers
from sglang.srt.entrypoints.server_state import load_server_tokenizer
from sglang.srt.entrypoints.warmup import ready_message, warm_up
from sglang.srt.managers.intake import RefusedError
from sglang.srt.managers.request_logger import make_request_logger
from sglang.srt.managers.request_observer import RequestObserver
from sglang.srt.managers.tokenizer_manager import SchedulerDiedError, TokenizerManager
from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

# for connections whose requests have ended, but whose clients have not read everything
_LAST_BYTES_S = 5


class ServerError(Exception):
    """Why the server did not start, or stopped by itself."""


class _Server(uvicorn.Server):
    """uvicorn without signal handlers of its own: this process has more to end than the listening socket."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Shutdown:
    """The end of a server that serves: requests finish in time, or are aborted, so that every stream has an end."""

    def __init__(self, server: _Server, manager: TokenizerManager, timeout_s: float) -> None:
        self._server = server
        self._manager = manager
        self._timeout_s = timeout_s
        self._waiting: asyncio.Task[None] | None = None

    def on_signal(self) -> None:
        """The first one lets requests finish, the second one does not, the third one lets nothing."""
        if self._waiting is None:
            self._server.should_exit = True
            self._manager.refuse_requests("the server is shutting down")
            self._waiting = asyncio.get_running_loop().create_task(self._finish())
        elif not self._waiting.done():
            self._waiting.cancel()
            self._abort()
        else:
            self._server.force_exit = True

    async def _finish(self) -> None:
        try:
            await asyncio.wait_for(self._manager.wait_idle(), self._timeout_s)
        except asyncio.TimeoutError:
            self._abort()

    def _abort(self) -> None:
        logger.warning("shutting down: %d requests are aborted", self._manager.abort_request(abort_all=True))


def launch_server(server_args: ServerArgs) -> None:
    """Serve until SIGINT or SIGTERM. Takes resolved arguments. ``SystemExit`` with status 1 and one sentence on
    stderr when the start fails, or the scheduler dies later."""
    try:
        with _listening_socket(server_args) as listener:
            asyncio.run(_launch(server_args, listener))
    except (ServerError, SchedulerDiedError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None


def _listening_socket(server_args: ServerArgs) -> socket.socket:
    """Bound before the model is loaded, so that a taken port is noticed at once."""
    host, port = server_args.host, server_args.port
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ServerError(f"--host {host!r} is not an address of this machine ({error.strerror})") from error
    listener = socket.socket(family, kind, proto)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ServerError(f"cannot listen on --host {host} --port {port} ({error.strerror}): choose another") from error
    return listener


async def _launch(server_args: ServerArgs, listener: socket.socket) -> None:
    """Start-up, serving and clean-up; a signal before the server listens cancels this task, later it stops it."""
    shutdown: _Shutdown | None = None
    main_task = asyncio.current_task()
    assert main_task is not None

    def on_signal() -> None:
        if shutdown is None:
            main_task.cancel()
        else:
            shutdown.on_signal()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    scheduler = start_schedulers(server_args)
    try:
        metrics = (
            ServerMetrics(server_args.served_model_name or server_args.model_path, server_args.dp_size)
            if server_args.enable_metrics
            else None
        )
        manager = await _start_manager(server_args, scheduler, metrics)
        server = _Server(_uvicorn_config(server_args, build_app(server_args, manager, metrics)))
        shutdown = _Shutdown(server, manager, server_args.shutdown_timeout)
        await _serve(server_args, server, manager, scheduler, listener)
    except (asyncio.CancelledError, RefusedError):
        logger.info("stopped before the server was ready")
    finally:
        scheduler.stop()


async def _start_manager(
    server_args: ServerArgs, scheduler: Schedulers, observer: RequestObserver | None
) -> TokenizerManager:
    tokenizer, ready = await asyncio.gather(
        asyncio.to_thread(load_server_tokenizer, server_args), scheduler.wait_ready()
    )
    manager = TokenizerManager(
        scheduler.channel,
        tokenizer,
        ready,
        allow_auto_truncate=server_args.allow_auto_truncate,
        request_logger=make_request_logger(server_args),
        observer=observer,
    )
    manager.start()
    return manager


async def _serve(
    server_args: ServerArgs,
    server: _Server,
    manager: TokenizerManager,
    scheduler: Schedulers,
    listener: socket.socket,
) -> None:
    """Warm up, listen, and answer until told to stop; ``ServerError`` when the scheduler dies."""

    def on_scheduler_end(cause: str) -> None:
        manager.scheduler_died(cause)
        server.should_exit = True

    scheduler.watch(on_scheduler_end)
    if not server_args.skip_server_warmup:
        await warm_up(manager)
    announcement = asyncio.ensure_future(_announce(server_args, server))
    await server.serve(sockets=[listener])
    announcement.cancel()
    scheduler.unwatch()
    died = manager.died
    await manager.close()
    if died is not None:
        raise ServerError(died)


async def _announce(server_args: ServerArgs, server: _Server) -> None:
    while not server.started:
        await asyncio.sleep(0.01)
    print(ready_message(server_args), flush=True)


def _uvicorn_config(server_args: ServerArgs, app: FastAPI) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,
        log_level="warning" if server_args.log_level == "info" else server_args.log_level,
        access_log=server_args.log_level == "debug",
        timeout_graceful_shutdown=math.ceil(server_args.shutdown_timeout) + _LAST_BYTES_S,
    )
