"""Errors as HTTP clients see them: one sentence in the shape of OpenAI's API, or of Anthropic's under its routes."""

from __future__ import annotations

import re
from typing import Any

from sglang.srt.managers.generate_output import RequestFailedError
from sglang.srt.managers.intake import RefusedError
from sglang.srt.managers.tokenizer_manager import SchedulerDiedError

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    405: "method_not_allowed",
    413: "request_too_large",
    503: "service_unavailable",
}
_ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}
# messages about a field begin with its name
_FIELD = re.compile(r"[a-z][a-z0-9_]*(?:\.[a-z0-9_]+|\[\d+\])*(?= )")


class ApiError(Exception):
    """A reply other than success. ``param`` is the field at fault, ``code`` a word that programs can test."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def to_dict(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def reply(self, path: str) -> tuple[int, dict[str, Any]]:
        """Status and body of the reply to a request for ``path``."""
        if path != _ANTHROPIC_PATH and not path.startswith(f"{_ANTHROPIC_PATH}/"):
            return self.status, self.to_dict()
        # Anthropic's own number for a server that is busy
        return 529 if self.status == 503 else self.status, self.to_anthropic()

    def to_anthropic(self) -> dict[str, Any]:
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}


def bad_field(param: str, problem: str) -> ApiError:
    """Status 400 for one field: ``problem`` continues the sentence that begins with its name."""
    return ApiError(400, f"{param} {problem}", param=param)


def to_api_error(error: Exception) -> ApiError:
    """What the client gets for an error from below; an error that nobody foresaw is not explained to it."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestFailedError):
        return ApiError(error.status, str(error), code="queue_full" if error.status == 503 else None)
    if isinstance(error, RefusedError):
        return ApiError(503, str(error), code="shutting_down")
    if isinstance(error, SchedulerDiedError):
        return ApiError(500, str(error), code="engine_dead")
    if isinstance(error, ValueError):
        field = _FIELD.match(str(error))
        return ApiError(400, str(error), param=field[0] if field else None)
    return ApiError(500, f"internal error ({type(error).__name__}); the server's log has the details")
