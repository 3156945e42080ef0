"""A worker with both edges, HTTP and gRPC, on one engine of tiny models, for tests in one process."""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import openai

from speclen.process.credentials import ServerSecurity
from speclen.process.settings import bind
from speclen.v1 import generation_pb2 as pb
from speclen.v1 import generation_pb2_grpc as rpc
from speclen.worker.arms import DEFAULT_ARM
from speclen.worker.engine.engine import Engine
from speclen.worker.frontend.async_engine import AsyncEngine
from speclen.worker.frontend.worker_metrics import page_of
from speclen.worker.frontend.worker_server import open_service
from speclen.worker.http.app import Front, create_app
from speclen.worker.http.http_server import HttpServer, make_server, serving
from speclen.worker.models.loading import ModelPair
from speclen.worker.reporting.control_client import ControlClient
from tests.support.control_parts import client
from tests.support.engines import make_engine
from tests.support.served import parts_of
from tests.support.waiting import PATIENCE_S, until

MODEL = "tiny"
KEY = "0123456789abcdef"
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'nobody' %}{{ raise_exception('nobody may not speak') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{{ mood }}{% endif %}"
)


@dataclass
class HttpWorker:
    """A worker that runs in its own thread within `http_worker`. http, grpc: addresses."""

    engine: Engine
    control: ControlClient
    security: ServerSecurity
    http: str = ""
    grpc: str = ""
    server: HttpServer | None = None
    async_engine: AsyncEngine | None = None
    loop: asyncio.AbstractEventLoop | None = None

    def client(self, api_key: str = KEY, **options: Any) -> openai.OpenAI:
        """The official client, which does not retry."""
        scheme = "https" if self.security.tls_cert else "http"
        return openai.OpenAI(base_url=f"{scheme}://{self.http}/v1", api_key=api_key, max_retries=0, **options)

    @property
    def url(self) -> str:
        return f"http://{self.http}"


@contextlib.contextmanager
def http_worker(
    *,
    security: ServerSecurity | None = None,
    chat_template: str | None = CHAT_TEMPLATE,
    unread_timeout_s: float = 30.0,
    max_batch_size: int = 4,
    max_waiting: int = 256,
    pair: ModelPair | None = None,
    model: str = MODEL,
    **settings: Any,
) -> Iterator[HttpWorker]:
    """settings: of the engine."""
    engine = make_engine(pair, max_batch_size=max_batch_size, **settings)
    control = client(follow=False, limits=engine.limits, first=DEFAULT_ARM)
    worker = HttpWorker(engine, control, security or ServerSecurity())
    started, stopping = threading.Event(), asyncio.Event()

    async def serve() -> None:
        async_engine, metrics, servicer = parts_of(engine, control, max_waiting, 0.005, unread_timeout_s)
        worker.async_engine = async_engine
        front = Front(async_engine, model, page_of(metrics.registry, model), chat_template)
        grpc_server, grpc_port, _ = await open_service("127.0.0.1:0", servicer, ServerSecurity())
        await grpc_server.start()
        bound = bind("--http-listen", "127.0.0.1:0")
        worker.http, worker.grpc = f"127.0.0.1:{bound.getsockname()[1]}", f"127.0.0.1:{grpc_port}"
        worker.server = make_server(create_app(front), worker.security, unread_timeout_s, async_engine.metrics.refuse)
        async with serving(worker.server, bound):
            started.set()
            await stopping.wait()
        await grpc_server.stop(None)
        async_engine.admission.close()

    loop = worker.loop = asyncio.new_event_loop()
    engine_thread = threading.Thread(target=engine.run)
    loop_thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    engine_thread.start()
    loop_thread.start()
    assert started.wait(PATIENCE_S)
    try:
        yield worker
    finally:
        loop.call_soon_threadsafe(stopping.set)
        loop_thread.join(PATIENCE_S)
        engine.stop()
        engine_thread.join(PATIENCE_S)
        loop.close()
        assert not loop_thread.is_alive()


def until_idle(engine: Engine, timeout_s: float = PATIENCE_S) -> None:
    """Wait until the engine holds no sequence and no request waits."""
    until(lambda: not (engine.load().num_running or engine.load().num_waiting), timeout_s)


def post(worker: HttpWorker, body: Any, path: str = "/v1/completions") -> httpx.Response:
    """body: bytes are sent as they are, everything else as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(
        f"{worker.url}{path}", content=content, headers={"Content-Type": "application/json"}, timeout=PATIENCE_S
    )


def over_grpc(worker: HttpWorker, text: str = "a", speculation: Any = None, **sampling: Any) -> list[Any]:
    """Finished sequences of a request by the other edge."""
    parameters = pb.SamplingParams(**sampling)
    request = pb.GenerateRequest(text=text, sampling_params=parameters, speculation=speculation)
    with grpc.insecure_channel(worker.grpc) as channel:
        return [one.complete for one in rpc.GenerationServiceStub(channel).Generate(request, timeout=PATIENCE_S)]


def connected(worker: HttpWorker) -> socket.socket:
    host, _, port = worker.http.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


def head(line: str, headers: dict[str, Any]) -> bytes:
    """The beginning of a request."""
    return "".join([f"{line} HTTP/1.1\r\nHost: x\r\n", *(f"{k}: {v}\r\n" for k, v in headers.items()), "\r\n"]).encode()
