"""OpenTelemetry traces: one span a request, with children for queue, prefill and decode.

Spans are made when a request has ended, outside of steps. Only `open_tracing` imports OpenTelemetry's packages. Names
follow its conventions for generative AI.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from speclen.worker.requests.request import (
    GenerationRequest,
    GrammarFailedError,
    RequestFailedError,
    SequenceOutput,
)

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

CLOSE_TIMEOUT_S = 3.0  # for the last spans when a worker stops
PROTOCOLS = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a request. headers: as sent, with names in lower case; they may name its trace."""

    headers: Callable[[], Mapping[str, str]] = dict
    operation: str = "text_completion"  # or "chat"


class Untraced:
    """The trace of a request while tracing is off."""

    def saw(self, output: SequenceOutput) -> None:
        """Nothing."""

    def end(self, error: Exception | None = None) -> None:
        """Nothing."""


class RequestTrace(Untraced):
    """Times and totals of a running request. Times by time.monotonic; None: not reached."""

    def __init__(self, tracing: Tracing, request: GenerationRequest, origin: Origin, arrived_at: float) -> None:
        self._tracing = tracing
        self.request = request
        self.origin = origin
        self.arrived_at = arrived_at
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self.last: dict[int, SequenceOutput] = {}  # by sequence: its totals so far
        self._told = False

    def saw(self, output: SequenceOutput) -> None:
        """Note every output, in order."""
        if output.admitted_at is not None and self.admitted_at is None:
            self.admitted_at = output.admitted_at
        if output.num_completion_tokens and self.first_token_at is None:
            self.first_token_at = output.made_at
        self.last[output.index] = output
        if len(self.last) == self.request.sampling.n and all(one.finish_reason for one in self.last.values()):
            self.end()

    def end(self, error: Exception | None = None) -> None:
        """Make the spans, once."""
        if not self._told:
            self._told = True
            self._tracing.tell(self, error)


class Tracing:
    """Makes spans of requests. model: its name for callers."""

    def __init__(self, provider: TracerProvider, model: str) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("speclen")
        self._model = model

    def request(self, request: GenerationRequest, origin: Origin, arrived_at: float) -> RequestTrace:
        """The trace of a request, which needs its outputs and its end."""
        return RequestTrace(self, request, origin, arrived_at)

    def tell(self, request: RequestTrace, error: Exception | None) -> None:
        """Make the spans of a request that ends now."""
        from opentelemetry import propagate, trace

        ended_at, ended_ns = time.monotonic(), time.time_ns()

        def wall(at: float) -> int:
            return ended_ns - int((ended_at - at) * 1e9)

        span = self._tracer.start_span(
            f"{request.origin.operation} {self._model}",
            context=propagate.extract(request.origin.headers()),
            kind=trace.SpanKind.SERVER,
            start_time=wall(request.arrived_at),
            attributes=attributes(request, self._model),
        )
        if (told := what_failed(request, error)) is not None:
            span.set_attribute("error.type", told[0])
            span.set_status(trace.Status(trace.StatusCode.ERROR, told[1]))
        inside = trace.set_span_in_context(span)
        for name, begun, ended in phases(request, ended_at):
            self._tracer.start_span(name, inside, start_time=wall(begun)).end(wall(ended))
        span.end(ended_ns)

    def close(self) -> None:
        """Send the remaining spans, within CLOSE_TIMEOUT_S, since the collector may be away."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)


def phases(request: RequestTrace, ended_at: float) -> Iterator[tuple[str, float, float]]:
    """Name, begin and end of the phases that the request reached."""
    starts = [("queue", request.arrived_at), ("prefill", request.admitted_at), ("decode", request.first_token_at)]
    known = [(name, at) for name, at in starts if at is not None]
    ends = [at for _, at in known[1:]] + [ended_at]
    for (name, begun), ended in zip(known, ends, strict=True):
        yield name, begun, ended


def what_failed(request: RequestTrace, error: Exception | None) -> tuple[str, str] | None:
    """Type and message of the error that ended a request."""
    if error is not None:
        return type(error).__name__, str(error)
    failed = [output for output in request.last.values() if output.error is not None]
    kind = GrammarFailedError if failed and failed[0].is_callers else RequestFailedError
    return (kind.__name__, str(failed[0].error)) if failed else None


def attributes(request: RequestTrace, model: str) -> dict[str, Any]:
    """The request's parameters, and its results added up over its sequences."""
    sampling, outputs = request.request.sampling, request.last.values()
    num_steps = sum(output.num_steps for output in outputs)
    num_draft_tokens = sum(output.num_draft_tokens for output in outputs)
    found: dict[str, Any] = {
        "gen_ai.operation.name": request.origin.operation,
        "gen_ai.provider.name": "speclen",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": request.request.request_id,
        "gen_ai.request.choice.count": sampling.n,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.response.finish_reasons": [reason_of(request.last.get(index)) for index in range(sampling.n)],
        "gen_ai.usage.input_tokens": len(request.request.prompt_ids),
        "gen_ai.usage.output_tokens": sum(output.num_completion_tokens for output in outputs),
        "speclen.steps": num_steps,
        "speclen.draft_tokens": num_draft_tokens,
        "speclen.accepted_tokens": sum(output.num_accepted_tokens for output in outputs),
        "speclen.mean_speculation_length": num_draft_tokens / num_steps if num_steps else 0.0,
    }
    if sampling.seed is not None:
        found["gen_ai.request.seed"] = sampling.seed
    if request.request.fixed_length is not None:
        found["speclen.fixed_speculation_length"] = request.request.fixed_length
    return found


def reason_of(output: SequenceOutput | None) -> str:
    """Finish reason of a sequence; unfinished ones were aborted."""
    return "abort" if output is None or output.finish_reason is None else output.finish_reason.value


def check_tracing() -> None:
    """Raises ValueError, with a sentence, when spans cannot be made or there is no exporter as OTEL_* asks for."""
    if find_spec("opentelemetry") is None or find_spec("opentelemetry.sdk") is None:
        raise ValueError("--traces needs OpenTelemetry, which is not installed: pip install 'speclen[otel]'")
    for name in exporter_names():
        if not entry_points(group="opentelemetry_traces_exporter", name=name):
            raise ValueError(f"there is no exporter {name!r}: set OTEL_TRACES_EXPORTER to otlp, console or none")


def exporter_names() -> list[str]:
    """Entry points of the exporters that the environment asks for. Raises ValueError for an unknown protocol."""
    named = os.environ.get("OTEL_TRACES_EXPORTER", "").strip() or "otlp"
    names = [name.strip() for name in named.split(",") if name.strip() not in ("", "none")]
    return [protocol_of_otlp() if name == "otlp" else name for name in names]


def protocol_of_otlp() -> str:
    variables = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = next((os.environ[name] for name in variables if os.environ.get(name)), "grpc")
    if protocol not in PROTOCOLS:
        raise ValueError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}: use {' or '.join(PROTOCOLS)}")
    return PROTOCOLS[protocol]


def open_tracing(model: str, worker_id: str) -> Tracing:
    """Tracing as OTEL_* variables configure it: exporter, endpoint, headers, sampler, batches, service name.

    Raises as `check_tracing`.
    """
    check_tracing()
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create({"service.instance.id": worker_id})
    if str(resource.attributes.get("service.name", "unknown_service")).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "speclen-worker"}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    for exporter in exporters():
        provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracing(provider, model)


def exporters() -> Iterator[SpanExporter]:
    """Each reads its own OTEL_* variables."""
    for name in exporter_names():
        (found,) = entry_points(group="opentelemetry_traces_exporter", name=name)
        yield found.load()()
