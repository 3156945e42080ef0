"""Additions to the schema at /openapi.json."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

DESCRIPTION = "OpenAI-compatible front of a speclen worker. Every path wants the API key, if the worker has one."

ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
STATUSES = {
    400: "A field is wrong; it is named.",
    401: "The API key is missing or wrong.",
    404: "No such model or path.",
    408: "The body came too slowly.",
    413: "The body is too large.",
    415: "The body has another Content-Type than application/json, or a Content-Encoding.",
    429: "The queue is full: try again later.",
    500: "An error inside the server: try it again.",
    503: "The worker is stopping, has failed, or is sent too many bodies at once.",
}


def errors(*kinds: str, empty: bool = False) -> dict[int | str, dict[str, Any]]:
    """Documentation of a route's answers. kinds: media types of success, JSON by default. empty: without a body."""
    content: dict[str, Any] = {} if empty else {kind: {} for kind in kinds or ("application/json",)}
    answers: dict[int | str, dict[str, Any]] = {200: {"description": "The answer.", "content": content}}
    schema = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return answers | {status: {"description": words, "content": schema} for status, words in STATUSES.items()}


def describe(app: FastAPI) -> None:
    """Replace FastAPI's shape of errors by ours."""
    schema = app.openapi()
    for path in schema["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    schemas = schema["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas["Error"] = ERROR
    schema["components"]["securitySchemes"] = {"api_key": {"type": "http", "scheme": "bearer"}}
    schema["security"] = [{}, {"api_key": []}]
