"""The page at `/`: a chat that shows speculation at work, from files that ship with the package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from fastapi import APIRouter, Response

from sglang.srt.entrypoints.errors import ApiError

_FOLDER = Path(__file__).with_suffix("")
_PAGE = "index.html"
_PREFIX = "/playground/"
_MEDIA_TYPES: Mapping[str, str] = MappingProxyType(
    {
        _PAGE: "text/html; charset=utf-8",
        "style.css": "text/css; charset=utf-8",
        "app.js": "text/javascript; charset=utf-8",
        "answer.js": "text/javascript; charset=utf-8",
        "api.js": "text/javascript; charset=utf-8",
        "icon.svg": "image/svg+xml",
    }
)
# nothing from anywhere else, nothing inline, in no frame, and no text that becomes markup
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types"
)
_HEADERS: Mapping[str, str] = MappingProxyType(
    {
        "Content-Security-Policy": _POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
)
# what the page loads has no key yet; what it asks for needs one
PLAYGROUND_PATHS = frozenset({"/", *(_PREFIX + name for name in _MEDIA_TYPES)})


def playground_router() -> APIRouter:
    """Routes of the page and its files, which are read once."""
    files = {name: (_FOLDER / name).read_bytes() for name in _MEDIA_TYPES}
    router = APIRouter(include_in_schema=False)

    @router.api_route("/", methods=["GET", "HEAD"])
    async def page() -> Response:
        return _file(files, _PAGE)

    @router.api_route(_PREFIX + "{name}", methods=["GET", "HEAD"])
    async def file(name: str) -> Response:
        return _file(files, name)

    return router


def _file(files: Mapping[str, bytes], name: str) -> Response:
    if name not in files:
        raise ApiError(404, f"there is nothing at {_PREFIX}{name}")
    return Response(files[name], headers=dict(_HEADERS), media_type=_MEDIA_TYPES[name])
