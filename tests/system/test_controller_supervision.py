"""No background task of the controller ends unnoticed: the process ends within a second, with one line."""

import asyncio
import contextlib

import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from speclen.controller.service.controller_server import end
from speclen.controller.service.journal import Journal
from speclen.controller.service.learner import Learner
from speclen.controller.service.streams import Streams
from speclen.store.connection import sqlite3
from tests.support.control_fakes import group, registration, served, to_the_end
from tests.support.waiting import PATIENCE_S


def broken(*arguments, **more):
    raise MemoryError("broken for a test")


async def soon_broken(*arguments, **more):
    await asyncio.sleep(0.05)
    broken()


@pytest.mark.parametrize(
    ("kind", "method", "part"),
    [
        (Learner, "run", "learning"),
        (Journal, "run", "the journal"),
        (Streams, "sweep", "the sweep of streams"),
        (Streams, "deliver", "the delivery of updates"),
    ],
)
async def test_a_background_task_that_ends_fails_the_controller(tmp_path, monkeypatch, kind, method, part):
    monkeypatch.setattr(kind, method, soon_broken)

    async with lacking(f"{part} has ended", tmp_path) as at:
        failure = await asyncio.wait_for(asyncio.shield(at.controller.supervisor.failure), PATIENCE_S)
        assert str(failure) == f"{part} has ended: broken for a test"


@contextlib.asynccontextmanager
async def lacking(why, folder, **options):
    """A controller that is served, and says at its end that its database lacks what was learned last."""
    with pytest.raises(OSError, match=f"lacks what was learned last: {why}"):
        async with served(folder, **options) as at:
            yield at


async def test_streams_end_with_the_reason_of_a_failure(tmp_path):
    async with lacking(r"a part has ended: broken for a test", tmp_path) as at:
        await at.stub.RegisterWorker(registration())
        call = at.stub.StreamReports()
        await call.write(group(1, 3))
        await call.read()
        at.controller.supervisor.start("a part", soon_broken())
        await at.controller.supervisor.failure
        await end(at.controller, 0.0)
        with pytest.raises(aio.AioRpcError) as ending:
            await to_the_end(call)
        assert ending.value.code().name == "UNAVAILABLE"
        assert "a part has ended: broken for a test" in ending.value.details()


async def test_health_is_not_serving_once_the_store_has_ended(tmp_path, monkeypatch):
    async with lacking(r".*broken", tmp_path, commit_interval_s=0.01) as at:
        monkeypatch.setattr("speclen.store.database.write", broken)
        with contextlib.suppress(aio.AioRpcError):
            await at.stub.RegisterWorker(registration())
        failure = await asyncio.wait_for(asyncio.shield(at.controller.supervisor.failure), PATIENCE_S)
        assert "broken for a test" in str(failure)
        request = health_pb2.HealthCheckRequest(service="speclen.store")
        watch = health_pb2_grpc.HealthStub(at.channel).Watch(request)
        while (await watch.read()).status != health_pb2.HealthCheckResponse.NOT_SERVING:
            pass


def full(*arguments):
    raise sqlite3.OperationalError("database or disk is full")


async def test_a_controller_that_cannot_save_its_state_ends_with_an_error(tmp_path, monkeypatch):
    """Story: it ended with exit code 0, and only the log said that the last commit was lost."""
    async with lacking(r".*disk is full", tmp_path, drain_timeout_s=0.3) as at:
        monkeypatch.setattr("speclen.store.database.write", full)
        await at.stub.RegisterWorker(registration())


async def test_a_store_that_ended_before_the_last_commit_is_reported(tmp_path):
    async with lacking(r".*was deleted", tmp_path, commit_interval_s=60.0) as at:
        await at.stub.RegisterWorker(registration())
        (tmp_path / "test.db").unlink()
