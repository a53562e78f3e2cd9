"""What every route needs of HTTP: JSON bodies, event streams, and noticing that a client left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Coroutine, Iterable
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from sglang.srt.entrypoints.errors import ApiError, to_api_error
from sglang.srt.managers.tokenizer_manager import SchedulerDiedError

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_BODY_BYTES = 64 << 20
MAX_NESTING = 100
_CLIENT_CLOSED_REQUEST = 499


def dump_json(value: Any) -> bytes:
    """UTF-8 of plain data. Halves of surrogate pairs, which an error may repeat from a bad request, are escaped."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return json.dumps(value).encode()


def json_response(value: Any, status: int = 200) -> Response:
    return Response(dump_json(value), status, media_type="application/json")


def error_response(error: Exception, path: str) -> Response:
    """The reply to a request for ``path`` that failed; what nobody foresaw is logged with its trace."""
    status, body = logged_api_error(error).reply(path)
    response = json_response(body, status)
    if status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def logged_api_error(error: Exception) -> ApiError:
    """What the client is told of an error; what nobody foresaw is logged with its trace."""
    api_error = to_api_error(error)
    if api_error.status == 500 and not isinstance(error, SchedulerDiedError):
        logger.error("a request failed", exc_info=error)
    return api_error


async def read_object(request: Request, *, may_be_empty: bool = False) -> dict[str, Any]:
    """The JSON object in the body. ``ApiError`` when it is too large, not UTF-8, not JSON or not an object.

    With ``may_be_empty`` no body is as good as an empty object.
    """
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > MAX_BODY_BYTES:
        raise _too_large()
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise _too_large()
    if may_be_empty and not body:
        return {}
    try:
        value = json.loads(body.decode())
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body of the request is not valid UTF-8 at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body of the request is not valid JSON: {error!s:.200}") from None
    if body.count(b"{") + body.count(b"[") > MAX_NESTING:
        _check_nesting(value)
    if not isinstance(value, dict):
        raise ApiError(400, f"the body of the request must be a JSON object, got {value!r:.100}")
    return value


def _check_nesting(value: Any) -> None:
    """What works on a body may go down into it by calls of itself, also outside Python: it must not go too deep."""
    level = [value]
    for _ in range(MAX_NESTING):
        level = [child for item in level for child in _children(item) if isinstance(child, (dict, list))]
        if not level:
            return
    raise ApiError(400, f"the body of the request has objects and lists in one another more than {MAX_NESTING} deep")


def _children(item: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return item.values() if isinstance(item, dict) else item


def _too_large() -> ApiError:
    return ApiError(413, f"the body of the request is larger than {MAX_BODY_BYTES} bytes")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Result of ``work``, which is cancelled when the client goes away (``ApiError`` 499). The body must be read."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ApiError(_CLIENT_CLOSED_REQUEST, "the client closed the connection")
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.wait((task, gone))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, one per object, ended by ``[DONE]``. An error before the first one is an ordinary reply.

    ``named``: events carry the name that is their ``type``, and the last one needs no ``[DONE]`` behind it.
    """

    def __init__(self, events: AsyncGenerator[Any, None], *, named: bool = False) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._events = events
        self._named = named

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send_events(scope, receive, send))
        except ApiError as error:
            logger.debug("stream ended: %s", error)

    async def _send_events(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        async with contextlib.aclosing(self._events) as events:
            try:
                async for event in events:
                    if not started:
                        started = True
                        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    await _send_event(send, dump_json(event), event["type"] if self._named else None)
            except Exception as error:  # noqa: BLE001 the status line may be out: the stream has to carry any error
                response = error_response(error, scope["path"])
                if not started:
                    await response(scope, receive, send)
                    return
                await _send_event(send, bytes(response.body))
            if not self._named:
                await _send_event(send, b"[DONE]")
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_event(send: Send, payload: bytes, name: str | None = None) -> None:
    head = b"data: " if name is None else f"event: {name}\ndata: ".encode()
    await send({"type": "http.response.body", "body": head + payload + b"\n\n", "more_body": True})
