"""What went wrong, as the body and status that a route's clients expect."""

from __future__ import annotations

import json
from typing import Any

import deepseek_recipe as recipe
from starlette.exceptions import HTTPException

from rorqual.errors import CapacityError, RorqualError
from rorqual.server.worker import EngineStopped

RETRY_SECONDS = 1
LONGEST = 2000
"""Characters of a message: what a client sent is not sent back to it at any length."""
KINDS = {
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("authentication_error", "authentication_error"),
    404: ("not_found_error", "not_found_error"),
    408: ("timeout_error", "timeout_error"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_error"),
    500: ("server_error", "api_error"),
    503: ("server_error", "overloaded_error"),
}
"""Status -> (OpenAI's type, Anthropic's); another of the client's mistakes is as 400, another of ours as 500."""


class HttpError(Exception):
    """An answer other than 200. code: OpenAI's, where a client looks at it."""

    def __init__(
        self, status: int, message: str, code: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code
        self._headers = headers or {}

    @property
    def headers(self) -> dict[str, str]:
        return self._headers | ({"Retry-After": str(RETRY_SECONDS)} if self.status in (429, 503) else {})

    def body(self, anthropic: bool) -> dict[str, Any]:
        """As OpenAI's clients expect it, or Anthropic's."""
        openai_kind, anthropic_kind = KINDS.get(self.status) or KINDS[400 if self.status < 500 else 500]
        # What is no text (half of a surrogate pair) is spelled out: a body must be.
        message = self.message[:LONGEST].encode(errors="backslashreplace").decode()
        if anthropic:
            return {"type": "error", "error": {"type": anthropic_kind, "message": message}}
        error = {"message": message, "type": openai_kind, "param": None, "code": self.code or openai_kind}
        return {"error": error}


def as_http(error: Exception) -> HttpError:
    """What an error of ours, or of the conversion, is to a client. What is nobody's mistake stays 500."""
    match error:
        case HttpError():
            return error
        case HTTPException():
            return HttpError(error.status_code, str(error.detail), headers=dict(error.headers or {}))
        case recipe.ConversionError():
            return HttpError(error.status_code, _message(error.body))
        case EngineStopped():
            return HttpError(503, str(error))
        case CapacityError():
            return HttpError(429, str(error))
        case RorqualError() | ValueError():
            return HttpError(400, str(error))
        case RecursionError():
            return HttpError(400, "body: nested too deeply")
    found = HttpError(500, "internal error")
    found.__cause__ = error
    return found


def shown(value: object) -> str:
    """A value of the client's in a message of ours: its beginning."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _message(body: str) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body
