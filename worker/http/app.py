"""The routes of the HTTP front. Each turns a body into a job, or answers at once."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Security
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException
from starlette.responses import Response

from speclen.process.settings import installed_version
from speclen.worker.config import WorkerConfig
from speclen.worker.frontend.async_engine import AsyncEngine
from speclen.worker.http.answers import Answer
from speclen.worker.http.chat import chat_prompt
from speclen.worker.http.errors import MAX_PART, STATUSES, ApiError, ErrorAnswer, from_invalid
from speclen.worker.http.guard import CALLER, JsonRoute
from speclen.worker.http.responses import JobResponse, error_response, json_response, refusal
from speclen.worker.http.schema import ChatRequest, CompletionRequest, DetokenizeRequest, Sampling, TokenizeRequest
from speclen.worker.http.translate import Job, chat_job, check_supported, completion_job
from speclen.worker.requests.request import RefusedError

DESCRIPTION = "OpenAI-compatible front of a speclen worker. Every path wants the API key, if the worker has one."
# Fields of the body that the answer needs once its job is made.
NEEDED = {
    *("model", "stream", "stream_options", "n", "include_metrics", "return_token_ids", "return_tokens_as_token_ids"),
    "tool_choice",
}
FIELDS = ("prompt", "messages", "tokens")  # fields with whose name an error message may begin
SEVERAL_WORKERS = (
    "several workers answer at this address, each with counters of its own: scrape the page of their controller "
    "(metrics_listen), and for requests and replicas Ray's own"
)


@dataclass(frozen=True, slots=True)
class Front:
    """The state behind the routes. model: the name that clients use. chat_template: replaces the tokenizer's, if given.

    page: registry of the metrics page; None if several workers share an address, since their counters would mix.
    """

    engine: AsyncEngine
    model: str
    page: CollectorRegistry | None
    chat_template: str | None = None


def front_of(config: WorkerConfig, engine: AsyncEngine, page: CollectorRegistry | None) -> Front:
    """The front of a worker with these settings. Raises ValueError if the chat template cannot be read."""
    return Front(engine, config.served_model_name or config.target, page, config.read_template())


def create_app(front: Front) -> FastAPI:
    """The application, to which the guard is added by `make_server`."""
    # The pages that render the schema are left out: they load scripts from other sites.
    app = FastAPI(
        title="speclen",
        version=installed_version(),
        description=DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        default_response_class=Response,
        # For the schema only, since the guard checks keys.
        dependencies=[Security(HTTPBearer(auto_error=False))],
        responses={status: {"model": ErrorAnswer, "description": words} for status, (_, words) in STATUSES.items()}
        | {"default": {"model": ErrorAnswer}},
    )
    app.router.route_class = JsonRoute
    add_generation(app, front)
    add_tokenizing(app, front)
    add_facts(app, front)
    add_errors(app, front)
    add_head(app)
    return app


def add_head(app: FastAPI) -> None:
    """Answer HEAD on all GET routes, for probes and proxies; not in the schema."""
    for route in app.routes:
        methods = getattr(route, "methods", None) or set()
        if "GET" in methods:
            methods.add("HEAD")


def add_generation(app: FastAPI, front: Front) -> None:
    tokenizer = front.engine.admission.encoder.tokenizer

    def respond(request: Request, body: Any, make_job: Callable[..., Awaitable[Job]], *options: Any) -> Response:
        check_model(body, front)
        caller = caller_of(request)

        async def make_answer() -> Answer:
            job = await make_job(body, front.engine, caller, *options)
            forget(request, body)
            return Answer(job, body.model or front.model, tokenizer)

        return JobResponse(body, front.engine, caller, make_answer)

    @app.post("/v1/completions")
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        return respond(request, body, completion_job)

    @app.post("/v1/chat/completions")
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        return respond(request, body, chat_job, front.chat_template)


def add_tokenizing(app: FastAPI, front: Front) -> None:
    engine, encoder = front.engine, front.engine.admission.encoder

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        check_model(body, front)
        caller = caller_of(request)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either prompt or messages", "prompt")
        check_supported(body)
        text = body.prompt or ""
        if body.messages is not None:
            text = await chat_prompt(engine, caller, body.messages, body, front.chat_template)
        special = body.add_special_tokens if body.add_special_tokens is not None else body.messages is None
        tokens = await encoder.encode(text, caller, add_special_tokens=special, any_length=True)
        strings = await encoder.strings(tokens, caller) if body.return_token_strs else None
        limit = engine.max_sequence_tokens
        return json_response({"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": strings})

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        check_model(body, front)
        limit = engine.engine.pair.vocab_size
        if (token := max(body.tokens, default=0)) >= limit:
            raise ApiError(400, f"token {token} is unknown: token ids go from 0 to {limit - 1}", "tokens")
        return json_response({"prompt": await encoder.decode(body.tokens, caller_of(request))})


def add_facts(app: FastAPI, front: Front) -> None:
    card = {
        "id": front.model,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "speclen",
        "root": front.engine.engine.pair.target_name,
        "parent": None,
        "max_model_len": front.engine.max_sequence_tokens,
    }

    @app.get("/v1/models")
    async def list_models() -> Response:
        return json_response({"object": "list", "data": [card]})

    @app.get("/v1/models/{model:path}")
    async def retrieve_model(model: str) -> Response:
        if model != front.model:
            raise unknown_model(model, front)
        return json_response(card)

    @app.get("/health")
    async def health() -> Response:
        if not front.engine.serving:
            # Returned rather than raised, since a probe must not count as a refused request.
            return error_response(ApiError(503, "the worker is stopping or its engine has failed", code="unhealthy"))
        return Response()

    @app.get("/version")
    async def version() -> Response:
        return json_response({"version": installed_version()})

    @app.get("/metrics")
    async def metrics() -> Response:
        if front.page is None:
            raise ApiError(404, SEVERAL_WORKERS)
        return Response(generate_latest(front.page), headers={"Content-Type": CONTENT_TYPE_LATEST})


def caller_of(request: Request) -> str:
    """Name of a caller: the holder of the key if there are several, else its address, as over gRPC."""
    if named := request.scope.get(CALLER):
        return str(named)
    host = request.client.host if request.client is not None else ""
    return f"ipv6:%5B{host}%5D" if ":" in host else f"ipv4:{host}"


def forget(request: Request, body: Sampling) -> None:
    """Release the parts of a body that its answer does not need.

    A request may take long, and a parsed body takes up to thirty times the memory of its bytes.
    """
    for name in ("_body", "_json"):  # Starlette's caches of the body
        request.__dict__.pop(name, None)
    for name in set(type(body).model_fields) - NEEDED:
        body.__dict__[name] = None
    for part in (body, body.stream_options):
        if part is not None and part.model_extra:
            part.model_extra.clear()


def check_model(body: Any, front: Front) -> None:
    if body.model is not None and body.model != front.model:
        raise unknown_model(body.model, front)


def unknown_model(name: str, front: Front) -> ApiError:
    message = f"the model {name[:200]!r} does not exist: this worker serves {front.model!r}"
    return ApiError(404, message, "model", "model_not_found")


def add_errors(app: FastAPI, front: Front) -> None:
    """Answer and count errors outside of a job."""

    async def handle(request: Request, error: Any) -> Response:
        answered: Exception = error
        headers: Mapping[str, str] = {}  # Allow: the methods of the path
        if isinstance(error, RequestValidationError):
            answered = from_invalid_body(request, error)
        elif isinstance(error, HTTPException):  # the path is unknown, or does not have the method
            answered = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
            headers = error.headers or {}
        response = error_response(refusal(answered, FIELDS, front.engine, caller_of(request)))
        response.headers.update(headers)
        return response

    for kind in (RequestValidationError, HTTPException, ValueError, RefusedError, Exception):
        app.add_exception_handler(kind, handle)


def from_invalid_body(request: Request, error: RequestValidationError) -> ApiError:
    """The error for a body that is malformed JSON or has wrong fields: the first one."""
    complaints = error.errors()
    if complaints[0]["type"] == "json_invalid":
        reason = complaints[0]["ctx"]["error"]
        return ApiError(400, f"the body is not valid JSON: {reason}", code="invalid_json")
    if isinstance(error.body, bytes):  # FastAPI parses a body only with JSON's Content-Type
        # Any web page can make a browser send a body without JSON's Content-Type, so that is refused.
        kind = request.headers.get("content-type", "").partition(";")[0][:MAX_PART]
        given = f"is {kind!r} by its Content-Type" if kind else "has no Content-Type"
        return ApiError(415, f"the body {given}: send JSON, with the header `Content-Type: application/json`")
    return from_invalid(complaints, error.body)
