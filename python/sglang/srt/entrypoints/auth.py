"""Who may ask what: one key for users, and one for routes that act on the whole server."""

from __future__ import annotations

import hmac
from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from sglang.srt.entrypoints.errors import ApiError
from sglang.srt.entrypoints.playground import PLAYGROUND_PATHS
from sglang.srt.entrypoints.responses import error_response

# what watches a server has no key, nor has the page in which a key is entered
_OPEN_PATHS = frozenset({"/health", "/health_generate", "/ping", "/ready", "/metrics"}) | PLAYGROUND_PATHS
_PREFIX = b"Bearer "


class ApiKeyMiddleware:
    """Lets through only requests that carry the key for their path; pre-flight requests need none.

    ``admin_paths`` ask for ``admin_api_key`` if there is one; it opens every other path too. Without ``api_key`` those
    are open to all.
    """

    def __init__(
        self, app: ASGIApp, api_key: str | None, admin_api_key: str | None, admin_paths: Collection[str]
    ) -> None:
        self._app = app
        admin = () if admin_api_key is None else (_header(admin_api_key),)
        user = () if api_key is None else (_header(api_key), *admin)
        self._of_admin, self._of_user = admin or user, user
        self._admin_paths = frozenset(admin_paths)
        self._has_admin_key = admin_api_key is not None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] == "OPTIONS" or scope["path"] in _OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        is_admin = scope["path"] in self._admin_paths
        expected = self._of_admin if is_admin else self._of_user
        headers = dict(scope["headers"])
        given = headers.get(b"authorization", b"")
        if not given and b"x-api-key" in headers:  # as Anthropic's clients send it
            given = _PREFIX + headers[b"x-api-key"]
        # every key is compared, so that the time taken says nothing
        matches = [hmac.compare_digest(given, key) for key in expected]
        if not expected or any(matches):
            await self._app(scope, receive, send)
            return
        name = "admin API key" if is_admin and self._has_admin_key else "API key"
        message = f"the {name} is wrong" if given else f"the {name} is missing: send it as a bearer token"
        await error_response(ApiError(401, message, code="invalid_api_key"), scope["path"])(scope, receive, send)


def _header(key: str) -> bytes:
    return _PREFIX + key.encode()
