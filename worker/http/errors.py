"""Errors in OpenAI's form, `{"error": {"message", "type", "param", "code"}}`, and their status."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Mapping, Sequence
from typing import Any, TypeAlias

from pydantic import BaseModel

from speclen.worker.requests.request import RefusedError

INTERNAL = "internal_error"  # code of unexpected errors
LEAST_RETRY_S = 1  # of Retry-After

# By status: the type of the error, and its description in the schema.
STATUSES = {
    400: ("invalid_request_error", "A field is wrong; it is named."),
    401: ("authentication_error", "The API key is missing or wrong."),
    404: ("not_found_error", "No such model or path."),
    405: ("method_not_allowed", "The path has other methods."),
    408: ("timeout_error", "The body came too slowly."),
    413: ("request_too_large", "The body is too large."),
    415: ("unsupported_media_type", "Not application/json, or with a Content-Encoding."),
    429: ("rate_limit_error", "The queue is full: try again later."),
    500: ("server_error", "An error inside the server: try it again."),
    503: ("service_unavailable_error", "The worker is stopping, has failed, or is sent too many bodies at once."),
}

CODES = {"unauthenticated": "invalid_api_key"}  # OpenAI's code for a reason, if it differs from ours

# Pydantic's error types for a value of the wrong kind. A field that takes several kinds has an error for each.
WRONG_KIND = re.compile(r"\w+_type|literal_error|missing")
KIND = "Input should be "
AN_OBJECT = ("dict_type", "model_type", "model_attributes_type")  # kinds that pydantic describes in terms of Python
MAX_PART = 40  # characters of a key of the body in an error

Complaint: TypeAlias = Mapping[str, Any]  # one of pydantic's: loc, type, msg


class ErrorObject(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """The body of every error answer, for the schema."""

    error: ErrorObject


class ApiError(ValueError):
    """An error answer. param: the field of the body. code: a word for programs.

    retry_after_s: expected seconds until the queue has room for the request.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = 0.0

    def body(self) -> dict[str, Any]:
        kind, _ = STATUSES.get(self.status) or STATUSES[500 if self.status >= 500 else 400]
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        retry_s = max(LEAST_RETRY_S, math.ceil(self.retry_after_s))
        headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": str(retry_s)}}
        return headers.get(self.status, {})


def from_exception(error: Exception, fields: Container[str] = ()) -> ApiError:
    """The error answer for an exception. Unexpected ones become a 500 without details.

    fields: names of the body's fields; if the message begins with one, it becomes `param`.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RefusedError):
        return ApiError(error.http_status, str(error), code=CODES.get(error.reason, error.reason))
    if isinstance(error, ValueError):
        word = re.match(r"[a-z_]+", str(error))
        param = word.group() if word and word.group() in fields else None
        return ApiError(400, str(error), param)
    return ApiError(500, "an error inside the server; its log tells which", code=INTERNAL)


def from_invalid(complaints: Sequence[Complaint], body: Any) -> ApiError:
    """The error answer for the first wrong field of a body.

    If the field takes several kinds of values, it is the error of the kind that fits best, or of all that fit equally well.
    complaints: at least one, in the order of the fields.
    """
    placed = [(place_of(one, body), one) for one in complaints]
    field = placed[0][0][:1]
    fits = [(fit(place, one), place, one) for place, one in placed if place[:1] == field]
    best, place, first = max(fits, key=lambda found: found[0])
    reason = sentence([one for how, at, one in fits if (how, at) == (best, place)])
    named = ".".join(str(part)[:MAX_PART] for part in place) or "the body"
    return ApiError(400, f"{named}: {reason}", str(field[0]) if field else None, first["type"])


def fit(place: Sequence[str | int], complaint: Complaint) -> tuple[list[int], bool]:
    """Rank how well a value fits the kind that complains: index of the wrong item, and True if its kind is right."""
    indices = [part if isinstance(part, int) else 0 for part in place]
    # Too many items replace the errors of the items.
    return indices + [0] * (complaint["type"] == "too_long"), not WRONG_KIND.fullmatch(complaint["type"])


def place_of(complaint: Complaint, body: Any) -> list[str | int]:
    """Path of a wrong value in the body. Pydantic's path also has names of kinds in it."""
    place: list[str | int] = []
    value, (_, *parts) = body, complaint["loc"]  # without FastAPI's "body"
    for at, part in enumerate(parts, start=1):
        if (isinstance(value, dict) and part in value) or (isinstance(value, list) and isinstance(part, int)):
            value = value[part]
        elif at < len(parts) or complaint["type"] != "missing":
            continue
        place.append(part)
    return place


def sentence(complaints: Sequence[Complaint]) -> str:
    """One sentence for complaints about one value: the first of them, or the kinds that the value may have."""
    reasons = list(dict.fromkeys(words(one) for one in complaints))
    if all(one.startswith(KIND) for one in reasons):
        reasons = [KIND + " or ".join(one.removeprefix(KIND) for one in reasons)]
    return reasons[0][:1].lower() + reasons[0][1:]


def words(complaint: Complaint) -> str:
    if complaint["type"] in AN_OBJECT:
        return f"{KIND}an object"
    text: str = complaint["msg"]
    return text.removeprefix("Value error, ").replace(" after validation", "")
