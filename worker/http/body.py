"""Bodies are read as JSON is defined, and what is no JSON is told why."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response


class JsonRoute(APIRoute):
    """A route whose requests read their body by `from_json`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def read_strictly(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return read_strictly


class JsonRequest(Request):
    async def json(self) -> Any:
        return from_json(await self.body())


def from_json(body: bytes) -> Any:
    """The value. Raises JSONDecodeError, whose msg is the reason, for whatever cannot be read."""
    try:
        return json.loads(body, parse_constant=not_a_number, parse_float=finite)
    except UnicodeDecodeError as error:
        raise json.JSONDecodeError(f"byte {error.start} is not UTF-8", "", 0) from error
    except RecursionError as error:
        raise json.JSONDecodeError("it is nested too deeply", "", 0) from error
    except json.JSONDecodeError:
        raise
    except ValueError as error:  # Python's bound on digits
        raise json.JSONDecodeError("a number has too many digits", "", 0) from error


def not_a_number(name: str) -> NoReturn:
    raise json.JSONDecodeError(f"{name} is no number of JSON", "", 0)


def finite(digits: str) -> float:
    """A number with a fraction or an exponent. Raises JSONDecodeError for one that becomes infinite."""
    value = float(digits)
    if math.isinf(value):
        raise json.JSONDecodeError(f"the number {digits[:20]} is too large", "", 0)
    return value
