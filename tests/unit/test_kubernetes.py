"""Deployments: manifests that Kubernetes takes, settings and ports that exist, and secrets only for their readers."""

import asyncio
import importlib.util
from pathlib import Path

import pytest
import yaml
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from speclen.controller.config import ControllerConfig
from speclen.controller.service.controller_server import running
from tests.support.addresses import free_address
from tests.support.waiting import PATIENCE_S

DEPLOY = Path(__file__).parents[2] / "deploy"
FILES = [*sorted((DEPLOY / "kubernetes").glob("*.yaml")), DEPLOY / "envoy" / "proxy.yaml"]
DOCUMENTS = [
    document for path in FILES if path.name != "kustomization.yaml" for document in yaml.safe_load_all(path.read_text())
]
NAMES = [f"{document['kind']} {document['metadata']['name']}" for document in DOCUMENTS]
SCHEMAS = importlib.util.find_spec("kubernetes_validate")
KUBERNETES = "1.33"
WORKLOADS = [document for document in DOCUMENTS if document["kind"] in ("StatefulSet", "Deployment")]
DRAIN = "SPECLEN_WORKER_DRAIN_TIMEOUT_S"


@pytest.mark.skipif(SCHEMAS is None, reason="no schemas here: pip install kubernetes-validate")
@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_a_manifest_is_what_kubernetes_expects(document):
    """A ServiceMonitor is the Prometheus Operator's: its schema is not among Kubernetes' own."""
    import kubernetes_validate

    if document["kind"] != "ServiceMonitor":
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


def pod_and_container(name):
    """The pod with a container of that name, and the container."""
    (found,) = (
        (workload["spec"]["template"]["spec"], container)
        for workload in WORKLOADS
        for container in workload["spec"]["template"]["spec"]["containers"]
        if container["name"] == name
    )
    return found


@pytest.mark.parametrize("kind", ["controller", "worker"])
def test_settings_ports_and_probes_belong_together(kind):
    _, container = pod_and_container(kind)
    given = {entry["name"]: entry.get("value", "") for entry in container["env"]}
    ports = {name: int(value.rpartition(":")[2]) for name, value in given.items() if name.endswith("LISTEN")}
    assert {*ports.values()} == {port["containerPort"] for port in container["ports"]}
    probed = {container[f"{probe}Probe"]["grpc"]["port"] for probe in ("startup", "readiness", "liveness")}
    assert probed == {ports[f"SPECLEN_{kind.upper()}_PROBE_LISTEN"]}


@pytest.mark.parametrize("name", ["worker", "envoy"])
def test_a_terminating_pod_waits_until_it_receives_no_requests(name):
    """The grace period begins with preStop: what runs then has to end within it, too."""
    pod, container = pod_and_container(name)
    waits_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    drains_s = {entry["name"]: entry.get("value") for entry in container.get("env", [])}.get(DRAIN, 0)
    assert waits_s + float(drains_s) + 10 <= pod["terminationGracePeriodSeconds"]


async def test_a_probe_needs_no_token_and_reaches_nothing_else(tmp_path):
    """Kubernetes' gRPC probes know neither TLS nor tokens; what they reach is health alone."""
    (tmp_path / "token").write_text("0123456789abcdef\n")

    with_port = free_address()
    config = ControllerConfig(
        listen="127.0.0.1:0", db=tmp_path / "s.db", token_file=tmp_path / "token", probe_listen=with_port
    )
    async with running(config) as controller:
        async with aio.insecure_channel(with_port) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=PATIENCE_S
            )
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            other = channel.unary_unary("/speclen.v1.ControlService/GetControllerInfo")
            with pytest.raises(aio.AioRpcError, match="UNIMPLEMENTED"):
                await other(b"", timeout=PATIENCE_S)
        async with aio.insecure_channel(with_port) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(20)]  # kept, they would fill it
            for watch in watches:
                with pytest.raises(aio.AioRpcError, match=r"UNIMPLEMENTED|RESOURCE_EXHAUSTED"):
                    await asyncio.wait_for(watch.read(), PATIENCE_S)
            assert (await stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)).status == 1
        async with aio.insecure_channel(f"127.0.0.1:{controller.port}") as channel:
            with pytest.raises(aio.AioRpcError, match="UNAUTHENTICATED"):
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)


COMPOSE = yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())


def test_a_container_is_given_the_secrets_that_it_reads_and_no_others():
    for name, service in COMPOSE["services"].items():
        read = {
            value.removeprefix("/run/secrets/")
            for value in service["environment"].values()
            if value.startswith("/run/secrets/")
        }
        assert read == set(service["secrets"]) <= set(COMPOSE["secrets"]), name


def test_clients_of_the_compose_file_have_another_token_than_the_controller():
    controller, worker = (COMPOSE["services"][name]["environment"] for name in ("controller", "worker"))
    assert worker["SPECLEN_WORKER_CONTROLLER_TOKEN_FILE"] == controller["SPECLEN_CONTROLLER_TOKEN_FILE"]
    assert worker["SPECLEN_WORKER_TOKEN_FILE"] != controller["SPECLEN_CONTROLLER_TOKEN_FILE"]
    files = {f"deploy/docker/{Path(secret['file']).name}" for secret in COMPOSE["secrets"].values()}
    for name in (".gitignore", ".dockerignore"):
        assert files <= set((DEPLOY.parent / name).read_text().split()), name
