"""A request leaves one span with its phases, in the trace that its caller names; nobody who did not ask pays for it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent import futures

import grpc
import httpx
import pytest

from speclen.v1 import generation_pb2 as pb
from speclen.v1 import generation_pb2_grpc as rpc
from speclen.worker.observing import tracing
from tests.support.http_worker import HttpWorker, http_worker
from tests.support.waiting import until

pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc", reason="needs pip install 'speclen[otel]'")

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADER = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
BODY = {"prompt": "The draft proposes", "max_tokens": 12, "seed": 5, "ignore_eos": True}


@pytest.fixture(scope="module")
def exporter():
    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def worker(exporter):
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with http_worker(max_batch_size=2, max_waiting=1, tracing=tracing.Tracing(provider, "tiny")) as worker:
        yield worker


@pytest.fixture(autouse=True)
def empty(exporter):
    exporter.clear()


def ended(exporter: InMemorySpanExporter, number: int) -> dict[str, ReadableSpan]:
    """The spans by name, once there are so many."""
    until(lambda: len(exporter.get_finished_spans()) >= number)
    return {span.name: span for span in exporter.get_finished_spans()}


def post(worker: HttpWorker, path: str = "completions", **changes: object) -> httpx.Response:
    return httpx.post(f"{worker.url}/v1/{path}", json={**BODY, **changes}, headers=HEADER, timeout=30)


def test_a_request_is_a_span_with_its_phases(worker, exporter):
    began = time.time_ns()
    answer = post(worker).json()
    spans = ended(exporter, 4)
    request = spans["text_completion tiny"]
    assert request.kind == SpanKind.SERVER
    assert (f"{request.context.trace_id:032x}", f"{request.parent.span_id:016x}") == (TRACE, PARENT)
    phases = [spans[name] for name in ("queue", "prefill", "decode")]
    assert all(phase.parent.span_id == request.context.span_id for phase in phases)
    edges = [request.start_time, *(phase.end_time for phase in phases)]
    assert edges[-1] == request.end_time
    assert [phase.start_time for phase in phases] == edges[:-1], "one begins where the one before ends"
    assert began <= request.start_time <= request.end_time <= time.time_ns()
    usage = answer["usage"]
    found = dict(request.attributes)
    assert found["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert found["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 12
    assert found["gen_ai.response.finish_reasons"] == ("length",)
    assert found["gen_ai.request.seed"] == 5
    assert 1 <= found["speclen.steps"] <= 12
    assert found["speclen.accepted_tokens"] <= found["speclen.draft_tokens"]
    assert found["speclen.mean_speculation_length"] == found["speclen.draft_tokens"] / found["speclen.steps"]
    assert request.status.status_code == StatusCode.UNSET


def test_over_grpc_the_trace_is_named_in_the_metadata(worker, exporter):
    with grpc.insecure_channel(worker.grpc) as channel:
        request = pb.GenerateRequest(text="a", speculation=pb.Speculation(mode=pb.Speculation.MODE_FIXED, length=1))
        request.sampling_params.max_tokens = 3
        list(rpc.GenerationServiceStub(channel).Generate(request, metadata=[*HEADER.items()], timeout=30))
    request = ended(exporter, 4)["text_completion tiny"]
    assert f"{request.context.trace_id:032x}" == TRACE
    assert request.attributes["speclen.fixed_speculation_length"] == 1


def test_what_is_refused_says_why_and_has_no_phase_it_did_not_come_to(worker, exporter):
    gate = hold(worker)
    with futures.ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(post, worker, max_tokens=60) for _ in range(4)]
        spans = ended(exporter, 2)
        gate.set()
        assert sorted(answer.result().status_code for answer in answers) == [200, 200, 200, 429]
    assert spans.keys() == {"text_completion tiny", "queue"}
    refused = spans["text_completion tiny"]
    assert refused.status.status_code == StatusCode.ERROR
    assert refused.attributes["error.type"] == "QueueFullError"


def hold(worker: HttpWorker) -> threading.Event:
    """The engine's thread runs no step until the event is set."""
    gate, step = threading.Event(), worker.engine.step

    def waiting() -> None:
        gate.wait(30)
        worker.engine.step = step
        step()

    worker.engine.step = waiting
    return gate


def test_a_client_that_goes_away_is_an_abort_and_no_error(worker, exporter):
    gate = hold(worker)
    with httpx.stream("POST", f"{worker.url}/v1/completions", json={**BODY, "stream": True}):
        pass
    threading.Timer(0.5, gate.set).start()  # by when the worker knows that the client has gone
    spans = ended(exporter, 2)
    assert spans.keys() == {"text_completion tiny", "queue"}
    request = spans["text_completion tiny"]
    assert request.attributes["gen_ai.response.finish_reasons"] == ("abort",)
    assert request.status.status_code == StatusCode.UNSET


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Stands for a collector."""

    def __init__(self) -> None:
        self.requests: list[trace_service_pb2.ExportTraceServiceRequest] = []

    def Export(self, request, context):  # noqa: N802
        self.requests.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()


def test_a_collector_gets_the_spans_that_the_environment_asks_for(monkeypatch):
    """Through the real exporter and a real server: endpoint, service name and attributes are the environment's."""
    receiver, server = Receiver(), grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "front")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    opened = tracing.open_tracing("tiny", "worker-1")
    with http_worker(max_batch_size=2, tracing=opened) as worker:
        assert post(worker).status_code == 200
    opened.close()
    server.stop(None)
    (request,) = receiver.requests
    (resource,) = request.resource_spans
    told = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert (told["service.name"], told["service.instance.id"]) == ("front", "worker-1")
    assert told["deployment.environment"] == "test"
    spans = {span.name: span for scope in resource.scope_spans for span in scope.spans}
    assert spans.keys() == {"text_completion tiny", "queue", "prefill", "decode"}
    assert spans["decode"].trace_id.hex() == TRACE


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("OTEL_TRACES_EXPORTER", "zipkin", "no exporter 'zipkin'"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "carrier-pigeon", "use grpc or http/protobuf"),
    ],
)
def test_what_the_environment_cannot_have_is_one_sentence(monkeypatch, variable, value, told):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=told):
        tracing.check_tracing()


def test_nothing_is_imported_unless_asked():
    modules = "sys, speclen.worker.service.server, speclen.worker.http.server"
    script = f"import {modules}; print('opentelemetry.sdk' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
