"""Parts of a fleet on Ray that need no Ray: settings, calls through the proxy, worker and controller in one process.

With Ray itself: scripts/fleet_check.
"""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import grpc
import httpx
import pytest
from grpc import aio

from speclen.cli.app import with_ray_address
from speclen.cli.up import OF_FLEETS
from speclen.controller.config import ControllerConfig
from speclen.integrations.ray.calls import CallEndedError, ServeCall, check_token
from speclen.integrations.ray.hosting import HostedController
from speclen.integrations.ray.serving import ServedWorker, guarded
from speclen.integrations.ray.settings import FleetConfig, fleet_from
from speclen.process.credentials import Keyring
from speclen.v1 import control_pb2_grpc
from speclen.v1 import generation_pb2 as pb
from speclen.worker.config import WorkerConfig
from tests.support.control_fakes import registration
from tests.support.store_rows import rows
from tests.support.waiting import PATIENCE_S
from tests.support.waiting import on_loop_until as until


def fake_context(*metadata: tuple[str, str]) -> Any:
    """Serve's gRPC context, as far as it is used."""
    context = mock.Mock(spec=["set_code", "set_details", "set_trailing_metadata", "invocation_metadata", "peer"])
    context.invocation_metadata.return_value, context.peer.return_value = metadata, "ipv4:10.0.0.1:5000"
    return context


# Settings.


def test_arguments_of_serve_run_are_parsed_by_type(tmp_path):
    config = fleet_from({"workers": "2", "max-workers": "4", "data_dir": str(tmp_path), "target": "t", "threads": "1"})
    assert (config.workers, config.max_workers, config.data_dir) == (2, 4, tmp_path)
    assert config.worker_config({}).threads == 1
    assert config.worker_config({"SPECLEN_WORKER_THREADS": "3"}).threads == 3  # a node's own word is the last


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"worker": "2"}, "worker is no setting"),
        ({"listen": "127.0.0.1:1"}, "listen"),
        ({"workers": "two"}, "workers is 'two'"),
        ({"workers": "0"}, "--workers is 0"),
        ({"workers": "3", "max_workers": "2"}, "--max-workers 2"),
        ({"insecure": "maybe"}, "insecure is 'maybe'"),
        ({"policy": "best"}, "--policy 'best'"),
        ({"controller_cert": "c.pem"}, "belong together"),
        ({"metrics_listen": "0.0.0.0:9070"}, "--metrics-listen 0.0.0.0:9070 is open"),
    ],
)
def test_arguments_that_cannot_work_are_named(arguments, words):
    with pytest.raises(ValueError, match=words):
        fleet_from(arguments)


def test_a_controller_open_to_other_machines_must_be_protected(tmp_path):
    config = FleetConfig()
    assert config.controller_config("127.0.0.1", {}).listen == "127.0.0.1:7070"
    with pytest.raises(ValueError, match="open to other machines"):
        config.controller_config("10.0.0.5", {})
    assert FleetConfig(insecure=True).controller_config("10.0.0.5", {}).insecure
    assert FleetConfig(metrics_listen="[::1]:9070").controller_config("127.0.0.1", {}).metrics_listen == "[::1]:9070"
    # As docs/guides/fleet.md has it: its certificate by flags, the token by the environment of the nodes.
    assert {"controller_cert", "controller_key"} <= set(OF_FLEETS)
    cert, key, token = (tmp_path / name for name in ("cert", "key", "token"))
    guarded = FleetConfig(controller_cert=cert, controller_key=key)
    told = guarded.controller_config("10.0.0.5", {"SPECLEN_WORKER_CONTROLLER_TOKEN_FILE": str(token)})
    assert (told.tls_cert, told.tls_key, told.token_file) == (cert, key, token)


def test_the_ray_flag_needs_no_address():
    assert with_ray_address(["up", "--ray"]) == ["up", "--ray", "auto"]
    assert with_ray_address(["up", "--ray", "--workers", "2"]) == ["up", "--ray", "auto", "--workers", "2"]
    assert with_ray_address(["up", "--ray", "h:6379"]) == ["up", "--ray", "h:6379"]
    assert with_ray_address(["worker", "--ray"]) == ["worker", "--ray"]


# Calls.


async def test_an_aborted_call_keeps_its_status_and_earlier_messages():
    outer = fake_context()
    call = ServeCall(outer)

    async def work() -> None:
        await call.write(1)
        await call.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")

    messages = call.messages(work())
    assert await anext(messages) == 1
    with pytest.raises(CallEndedError, match="RESOURCE_EXHAUSTED: full"):
        await anext(messages)
    outer.set_code.assert_called_once_with(grpc.StatusCode.RESOURCE_EXHAUSTED)
    outer.set_details.assert_called_once_with("full")


async def test_a_cancelled_call_cancels_its_work():
    ended, call = asyncio.Event(), ServeCall(fake_context())

    async def work() -> None:
        try:
            while True:
                await call.write(1)
        finally:
            ended.set()

    messages = call.messages(work())
    await anext(messages)
    await messages.aclose()
    assert ended.is_set()


def test_a_wrong_token_is_refused_before_anything_is_done():
    keyring = Keyring(["0123456789abcdef"])
    check_token(None, fake_context(), insecure=True)
    check_token(keyring, fake_context(("authorization", "Bearer 0123456789abcdef")), insecure=False)
    for known, metadata in ((keyring, ()), (keyring, (("authorization", "Bearer wrong"),)), (None, ())):
        outer = fake_context(*metadata)
        with pytest.raises(CallEndedError):
            check_token(known, outer, insecure=False)
        outer.set_code.assert_called_once_with(grpc.StatusCode.UNAUTHENTICATED)


# The controller inside a process of Ray's.


def of(folder: Path, **changes: Any) -> ControllerConfig:
    return ControllerConfig(**{"listen": "127.0.0.1:0", "data_dir": folder} | changes)


async def test_a_controller_can_start_after_a_failed_start(tmp_path):
    first, second = HostedController(), HostedController()
    address = await first.address(of(tmp_path))
    assert await first.address(of(tmp_path / "other")) == address, "one that serves stays"
    async with aio.insecure_channel(address) as channel:
        await control_pb2_grpc.ControlServiceStub(channel).RegisterWorker(registration(), timeout=PATIENCE_S)
    with pytest.raises(ValueError, match="in use by another controller"):
        await second.address(of(tmp_path))
    await first.stop()
    assert await second.address(of(tmp_path))
    await second.stop()
    assert rows(tmp_path / "speclen.db", "SELECT worker_id FROM workers") == [("w",)]


# A worker inside a process of Ray's.


@pytest.mark.parametrize(("insecure", "status"), [(False, 401), (True, 200)])
async def test_without_a_token_http_requests_are_refused(insecure, status):
    engine = SimpleNamespace(serving=True, max_sequence_tokens=1)
    engine.admission = SimpleNamespace(encoder=SimpleNamespace(tokenizer=None))
    engine.engine = SimpleNamespace(pair=SimpleNamespace(target_name="t"))
    engine.metrics = SimpleNamespace(refuse=lambda reason: None)
    front: Any = guarded(WorkerConfig(insecure=insecure), engine)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(front), base_url="http://ray") as client:
        assert (await client.get("/v1/models")).status_code == status


async def test_a_worker_serves_both_edges_and_follows_a_controller_that_moves(tmp_path):
    """One worker: its calls by gRPC's and by OpenAI's edge give the same text; its controller is started elsewhere."""
    where = SimpleNamespace(address="")

    async def find() -> str:
        if not where.address:
            raise RuntimeError("the actor is being started again")
        return str(where.address)

    settings = {"threads": 1, "backend": "torch", "max_batch_size": 4, "drain_timeout_s": 5.0, "insecure": True}
    worker = await ServedWorker.start(WorkerConfig(worker_id="ray:test", **settings), find)
    end_of_process, control = [], worker.control
    watching = asyncio.create_task(worker.until_failed(lambda: end_of_process.append("now")))
    try:
        request = pb.GenerateRequest(text="def f(", sampling_params=pb.SamplingParams(max_tokens=8), stream=True)
        answers = [message async for message in worker.generate(request, fake_context())]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(worker.http), base_url="http://ray") as client:
            body = {"prompt": "def f(", "max_tokens": 8, "temperature": 0}
            whole = (await client.post("/v1/completions", json=body)).json()
        assert whole["choices"][0]["text"] == answers[-1].complete.text != ""
        for name in ("one", "two"):
            controller = HostedController()
            where.address = await controller.address(of(tmp_path / name))
            database = str((tmp_path / name / "speclen.db").resolve())
            await until(lambda: control.connected and control.controller and control.controller.database == database)  # noqa: B023
            where.address = ""
            await controller.stop()
        assert worker.control.table.source in ("controller", "last table")
    finally:
        await worker.stop()
    assert not (await asyncio.wait([watching], timeout=0.5))[0], "its engine has ended, as it was asked to"
    watching.cancel()
    assert not end_of_process
