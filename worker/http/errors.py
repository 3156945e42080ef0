"""Whatever goes wrong, as OpenAI's API says it: `{"error": {"message", "type", "param", "code"}}` and a status."""

from __future__ import annotations

import re
from typing import Any

from speclen.worker.requests.request import (
    DrainingError,
    EngineFailedError,
    QueueFullError,
    RequestFailedError,
    SlowReaderError,
)

INTERNAL = "internal_error"  # code of what nobody expected
RETRY_AFTER_S = 1  # what a refused client is told to wait

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "method_not_allowed",
    408: "timeout_error",
    413: "request_too_large",
    415: "unsupported_media_type",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}

# What a worker may have against a request that is right: status and code.
ANSWERS: dict[type[Exception], tuple[int, str]] = {
    QueueFullError: (429, "queue_full"),
    DrainingError: (503, "draining"),
    EngineFailedError: (503, "engine_failed"),
    RequestFailedError: (500, "request_failed"),
    SlowReaderError: (408, "slow_reader"),
}


class ApiError(ValueError):
    """An answer that is an error. param: the field of the body it is about. code: for programs."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": str(RETRY_AFTER_S)}}
        return headers.get(self.status, {})


def from_exception(error: Exception, fields: Any = ()) -> ApiError:
    """What the engine has against a request; anything unexpected is a 500 that tells no details.

    fields: names of the body's fields, one of which the message may begin with.
    """
    if isinstance(error, ApiError):
        return error
    for kind, (status, code) in ANSWERS.items():
        if isinstance(error, kind):
            return ApiError(status, str(error), code=code)
    if isinstance(error, ValueError):
        word = re.match(r"[a-z_]+", str(error))
        param = word.group() if word and word.group() in fields else None
        return ApiError(400, str(error), param)
    return ApiError(500, "an error inside the server; its log tells which", code=INTERNAL)


def too_long(num_tokens: int, max_tokens: int | None, limit: int, param: str) -> ApiError:
    """In OpenAI's words, which clients look for."""
    asked = "" if max_tokens is None else f" and max_tokens is {max_tokens}"
    message = (
        f"This model's maximum context length is {limit} tokens, but the {param} has {num_tokens}{asked}: "
        "shorten one of them"
    )
    return ApiError(400, message, param, "context_length_exceeded")


def text_too_long(error: Exception, limit: int, param: str) -> ApiError:
    """The same, before anybody knows how many tokens it would have."""
    message = f"This model's maximum context length is {limit} tokens: the {param} is too long ({error})"
    return ApiError(400, message, param, "context_length_exceeded")
