"""The HTTP edge by itself: requests that it answers with a reason, and counts; its listening socket; streams that wait."""

import asyncio
import errno
import gzip
import os
import resource
import socket
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from speclen.process.credentials import Keyring
from speclen.worker.frontend.worker_metrics import RequestMetrics
from speclen.worker.http.answers import Answer
from speclen.worker.http.app import Front, create_app
from speclen.worker.http.guard import Guard, allow_origins
from speclen.worker.http.http_server import Listener, num_files
from speclen.worker.http.responses import DONE, STILL_HERE, JobResponse
from speclen.worker.http.schema import CompletionRequest
from speclen.worker.http.translate import completion_job
from speclen.worker.requests.request import QueueFullError
from tests.support import tiny_models
from tests.support.served import held, served
from tests.support.waiting import on_loop_until as until

JSON = {"Content-Type": "application/json"}


class BusyEncoder:
    """Refuses every text, as if too many waited."""

    tokenizer = tiny_models.tokenizer()

    async def encode(self, *_: Any, **__: Any) -> None:
        raise QueueFullError("16 requests are waiting already")


class Edge:
    """Guard and routes before an engine that is busy and never reached. expected_wait_s: of its admission queue."""

    def __init__(
        self,
        keyring: Keyring | None = None,
        expected_wait_s: float = 0.0,
        origins: Sequence[str] = (),
        model: str = "tiny",
    ) -> None:
        registry = CollectorRegistry()
        self.metrics = RequestMetrics(SimpleNamespace(registry=registry))
        admission = SimpleNamespace(encoder=BusyEncoder(), expected_wait_s=lambda caller: expected_wait_s)
        pair = SimpleNamespace(target_name="t", vocab_size=tiny_models.VOCAB_SIZE)
        engine: Any = SimpleNamespace(
            admission=admission,
            metrics=self.metrics,
            serving=False,
            max_sequence_tokens=256,
            engine=SimpleNamespace(pair=pair),
        )
        app = create_app(Front(engine, model, registry))
        self.app = allow_origins(Guard(app, keyring, self.metrics.refuse, body_timeout_s=0.05), origins)
        self.registry = registry

    def ask(self, method: str, path: str, **request: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport) as client:
                return await client.request(method, f"http://worker{path}", **request)

        return asyncio.run(send())

    def refused(self) -> dict[str, float]:
        samples = [one for metric in self.registry.collect() for one in metric.samples]
        totals = {one.labels["reason"]: one.value for one in samples if one.name == "speclen_request_refused_total"}
        return {reason: count for reason, count in totals.items() if count}


async def never_whole():
    yield b"{"
    await asyncio.sleep(5)


@pytest.mark.parametrize(
    ("request_", "status", "reason"),
    [
        (("POST", "/v1/completions", {"content": b"{", "headers": JSON}), 400, "invalid"),
        (("POST", "/v1/completions", {"content": b"{}"}), 415, "invalid"),
        (("POST", "/v1/completions", {"json": {"prompt": 7}}), 400, "invalid"),
        (("POST", "/v1/completions", {"json": {"prompt": "a", "model": "gpt-9"}}), 404, "invalid"),
        (("POST", "/v1/completions", {"json": {"prompt": "a" * 5 * 2**20}}), 413, "invalid"),
        (("POST", "/v1/completions", {"content": never_whole(), "headers": JSON}), 408, "invalid"),
        (("POST", "/tokenize", {"json": {}}), 400, "invalid"),
        (("POST", "/tokenize", {"json": {"prompt": "a"}}), 429, "queue_full"),
        (("POST", "/detokenize", {"json": {"tokens": [9999]}}), 400, "invalid"),
        (("GET", "/v1/models/gpt-9", {}), 404, "invalid"),
        (("GET", "/v1/nothing", {}), 404, "invalid"),
    ],
)
def test_every_refusal_is_counted_once(request_, status, reason):
    edge = Edge()
    method, path, content = request_
    assert edge.ask(method, path, **content).status_code == status
    assert edge.refused() == {reason: 1.0}


def test_without_the_right_key_every_path_is_refused_and_counted():
    edge = Edge(Keyring(["0123456789abcdef"]))
    paths = ("/version", "/health", "/metrics", "/v1/models", "/openapi.json", "/nowhere")
    for path in paths:
        assert edge.ask("GET", path).status_code == 401
    wrong = [("Authorization", "Bearer 0123456789abcdef"), ("Authorization", "Bearer no")]
    assert edge.ask("GET", "/version", headers=wrong).status_code == 401, "one of two keys is wrong"
    assert edge.ask("GET", "/health", headers={"Authorization": "Bearer 0123456789abcdef"}).status_code == 503
    assert edge.refused() == {"unauthenticated": len(paths) + 1.0}


@pytest.mark.parametrize(("expected_wait_s", "told"), [(0.0, "1"), (0.4, "1"), (7.2, "8")])
def test_a_full_queue_says_when_to_come_back(expected_wait_s, told):
    answer = Edge(expected_wait_s=expected_wait_s).ask("POST", "/tokenize", json={"prompt": "a"})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, told)


@pytest.mark.parametrize(
    ("content", "headers", "status", "words"),
    [
        (
            gzip.compress(b'{"prompt": "a"}', mtime=0),
            {"Content-Encoding": "gzip"},
            415,
            "Content-Encoding 'gzip': send it as it is",
        ),
        (b"{}", {"Content-Encoding": "identity"}, 400, "prompt: field required"),
        (b'{"prompt": NaN}', {}, 400, "the body is not valid JSON: expected value at line 1 column 12"),
        (b'{"a": ' + b"9" * 5000 + b"}", {}, 400, "number out of range"),
        (b'{"a": "\xe4"}', {}, 400, "invalid unicode code point"),
        (b"[" * 100_000, {}, 400, "recursion limit exceeded"),
    ],
)
def test_a_body_that_cannot_be_read_is_told_why(content, headers, status, words):
    answer = Edge().ask("POST", "/v1/completions", content=content, headers=JSON | headers)
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "status", "model"),
    [
        *((path, 200, None) for path in ("/v1/models", "/v1/models/", "//v1/models", "/v1//models//")),
        *((path, 200, "/data/llama/") for path in ("/v1/models//data/llama/", "/v1/models/%2Fdata%2Fllama%2F")),
        ("/v1/models//data/llama", 404, "/data/llama/"),
    ],
)
def test_doubled_slashes_and_one_at_the_end_do_not_matter_but_in_names_of_models(path, status, model):
    answer = Edge(model=model or "tiny").ask("GET", path)
    assert answer.status_code == status
    assert status != 200 or (answer.json()["id"] == model if model else answer.json()["object"] == "list")


PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-a",
}
PAGE = "https://chat.example:8443"


@pytest.mark.parametrize(("origins", "allowed"), [((PAGE,), PAGE), (("*",), "*"), (("https://a.example", PAGE), PAGE)])
def test_a_page_of_an_allowed_origin_may_call_and_its_preflight_needs_no_key(origins, allowed):
    edge = Edge(Keyring(["0123456789abcdef"]), origins=origins)
    at_home = {"Access-Control-Request-Private-Network": "true"}
    preflight = edge.ask("OPTIONS", "/v1/chat/completions", headers=PREFLIGHT | {"Origin": PAGE} | at_home)
    assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, allowed)
    assert preflight.headers["access-control-allow-private-network"] == "true"
    assert preflight.headers["access-control-allow-headers"] == PREFLIGHT["Access-Control-Request-Headers"]
    assert "access-control-allow-credentials" not in preflight.headers
    for headers, status in (({}, 401), ({"Authorization": "Bearer 0123456789abcdef"}, 200)):
        answer = edge.ask("GET", "/v1/models", headers=headers | {"Origin": PAGE})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, allowed)


@pytest.mark.parametrize(("origins", "status"), [((), 405), (("https://a.example",), 400)])
def test_other_pages_may_not_call(origins, status):
    edge = Edge(origins=origins)
    preflight = edge.ask("OPTIONS", "/v1/chat/completions", headers=PREFLIGHT | {"Origin": PAGE})
    assert preflight.status_code == status
    answer = edge.ask("GET", "/v1/models", headers={"Origin": PAGE})
    assert "access-control-allow-origin" not in preflight.headers.keys() | answer.headers.keys()


# The listening socket, and a stream while its request waits.


@pytest.fixture
def listener():
    with Listener(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        listener.settimeout(5)
        yield listener


@pytest.fixture
def _few_files():
    """So many that the next one is among the spare ones."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open(os.devnull) as file:
        resource.setrlimit(resource.RLIMIT_NOFILE, (file.fileno() + 8, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("_few_files")
def test_connections_are_closed_while_only_spare_files_are_left(listener):
    with capture_logs() as logs:
        for _ in range(3):
            with socket.create_connection(listener.getsockname(), timeout=5) as client:
                with pytest.raises(ConnectionAbortedError):
                    listener.accept()
                assert client.recv(1) == b""
    (line,) = logs
    assert (line["log_level"], line["limit"]) == ("warning", num_files())


def test_without_any_file_one_error_is_raised_and_then_nothing_is_accepted(listener, monkeypatch):
    """Asyncio logs every error, with a traceback, and tries as many times as connections may wait."""

    def fail(_: socket.socket) -> tuple[socket.socket, object]:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket.socket, "accept", fail)
    with pytest.raises(OSError, match="Too many open files"):
        listener.accept()
    for _ in range(3):
        with pytest.raises(BlockingIOError):
            listener.accept()


async def test_a_waiting_stream_sends_comments(monkeypatch):
    monkeypatch.setattr("speclen.worker.http.responses.SILENCE_S", 0.01)
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def receive() -> Any:
        await asyncio.Event().wait()

    body = CompletionRequest(prompt=[1, 2], max_tokens=2, stream=True)
    async with served() as at:

        async def make_answer() -> Answer:
            return Answer(await completion_job(body, at.async_engine, "c"), "tiny", tiny_models.tokenizer())

        with held(at.engine) as go_on:
            answering = asyncio.create_task(
                JobResponse(body, at.async_engine, "c", make_answer)({"type": "http"}, receive, send)
            )
            await until(lambda: sent.count(STILL_HERE) >= 2)
            go_on.set()
            await answering
    events = [one for one in sent if one not in (b"", STILL_HERE)]
    assert events[-1] == DONE
    assert b'"finish_reason":"length"' in events[-2]
    assert sent.index(STILL_HERE) < sent.index(events[0])
