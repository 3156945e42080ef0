"""The law: nothing that has to run for ever ends unnoticed; the process follows within a second, with one line."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time

import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from speclen.controller.service.server import end
from speclen.store.connection import sqlite3
from speclen.transport.supervision import Supervisor
from tests.support.control_fakes import group, registration, run, served

PATIENCE_S = 60

# Starts a controller in which one part breaks half a second after it serves, and says when that was.
BREAKING = """
import asyncio, sys, threading, time
from pathlib import Path
from speclen.controller.config import ControllerConfig
from speclen.controller.service import server
from speclen.transport.logs import set_up_logs

def broken(*arguments, **more):
    print("BROKEN", time.monotonic(), flush=True)
    raise RuntimeError("broken for a test")

async def soon_broken(*arguments, **more):
    await asyncio.sleep(0.5)
    broken()

part = sys.argv[1]
set_up_logs()
config = ControllerConfig(listen="127.0.0.1:0", db=Path(sys.argv[2]), metrics_listen="127.0.0.1:0", commit_interval_s=0.05)
if part == "learning":
    from speclen.controller.service.learner import Learner
    Learner.run = soon_broken
elif part == "journal":
    from speclen.controller.service.saving.journal import Journal
    Journal.run = soon_broken
elif part == "sweep":
    from speclen.controller.service.streams import Streams
    Streams.sweep = soon_broken
elif part == "delivery":
    from speclen.controller.service.streams import Streams
    Streams.deliver = soon_broken
elif part == "writer":
    from speclen.store.database import Store
    take, begun = Store._take, time.monotonic()
    def breaking(self):
        while time.monotonic() < begun + 1.5:
            time.sleep(0.05)
        broken()
    Store._take = breaking
elif part == "metrics":
    import socketserver
    poll = socketserver.BaseServer.service_actions
    begun = time.monotonic()
    socketserver.BaseServer.service_actions = lambda self: time.monotonic() > begun + 1.5 and broken()
asyncio.run(server.serve(config, lambda line: print(line, flush=True)))
"""


@pytest.mark.parametrize("part", ["learning", "journal", "sweep", "delivery", "writer", "metrics"])
def test_a_part_that_ends_takes_the_process_with_it_at_once(tmp_path, part):
    process = subprocess.Popen(
        [sys.executable, "-c", BREAKING, part, str(tmp_path / "s.db")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, errors = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    ended = time.monotonic()
    assert process.returncode == 1, errors
    broke = float(output.split("BROKEN")[1].split()[0])
    assert ended - broke < 10, "a second, and what a very busy machine adds"
    told = [line for line in errors.splitlines() if "critical" in line]
    assert len(told) == 1, errors
    assert "has ended" in told[0]
    if part != "metrics":  # whose thread is another library's, and prints what ended it
        assert "Traceback" not in errors


async def read_to_the_end(call) -> None:
    while await call.read() is not aio.EOF:
        pass


def test_health_and_streams_tell_of_a_failure(tmp_path):
    async def story():
        async with served(tmp_path) as at:
            await at.stub.RegisterWorker(registration())
            call = at.stub.StreamReports()
            await call.write(group(1, 3))
            await call.read()

            async def fail() -> None:
                raise RuntimeError("no more")

            at.controller.supervisor.start("a part", fail())
            assert str(await at.controller.supervisor.failure) == "a part has ended: no more"
            await end(at.controller, 0.0)
            with pytest.raises(aio.AioRpcError) as ending:
                await read_to_the_end(call)
            assert ending.value.code().name == "UNAVAILABLE"
            assert "a part has ended: no more" in ending.value.details()

    with pytest.raises(OSError, match="lacks what was learned last: a part has ended: no more"):
        run(story)


def test_health_is_not_serving_while_the_failed_controller_is_still_there(tmp_path):
    async def story():
        async with served(tmp_path) as at:
            at.service.journal.store._ended = RuntimeError("gone")  # as the writer's thread says it
            health = health_pb2_grpc.HealthStub(at.channel)
            assert "gone" in str(await asyncio.wait_for(at.controller.supervisor.failure, 1.0))
            answer = await health.Check(health_pb2.HealthCheckRequest(service="speclen.store"))
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
            at.service.journal.store._ended = None

    with pytest.raises(OSError, match="gone"):
        run(story)


def test_a_controller_that_cannot_store_what_it_has_says_so_as_it_ends(tmp_path, monkeypatch):
    """It ended as if all had been well, and the log alone said that the last commit was lost."""

    def full(*arguments):
        raise sqlite3.OperationalError("database or disk is full")

    async def story():
        async with served(tmp_path, drain_timeout_s=0.3) as at:
            monkeypatch.setattr("speclen.store.database.write", full)
            await at.stub.RegisterWorker(registration())

    with pytest.raises(OSError, match=r"test\.db lacks what was learned last: .*disk is full"):
        run(story)


def test_a_store_that_ended_before_the_last_commit_is_told_at_the_end(tmp_path):
    async def story():
        async with served(tmp_path, commit_interval_s=60.0) as at:
            await at.stub.RegisterWorker(registration())
            (tmp_path / "test.db").unlink()

    with pytest.raises(OSError, match=r"test\.db lacks what was learned last: .*was deleted"):
        run(story)


def test_what_is_stopped_on_purpose_is_no_failure():
    async def story():
        supervisor, thread = Supervisor(), threading.Thread(target=time.sleep, args=(0.6,), name="a thread")
        thread.start()
        supervisor.start("a task", asyncio.sleep(60))
        await supervisor.stop()
        assert not supervisor.failure.done()
        again = Supervisor()
        again.watch(thread)
        assert str(await asyncio.wait_for(again.failure, 5.0)) == "a thread has ended: its thread is dead"
        await again.stop()

    asyncio.run(story())


def test_a_task_that_returns_or_is_cancelled_by_somebody_else_has_ended_too():
    async def story():
        returned = Supervisor()
        returned.start("a task", asyncio.sleep(0))
        assert str(await returned.failure) == "a task has ended: without a reason"
        cancelled = Supervisor()
        cancelled.start("a task", asyncio.sleep(60))
        await asyncio.sleep(0)
        cancelled._tasks[0].cancel()
        assert str(await cancelled.failure) == "a task has ended: without a reason"

    asyncio.run(story())
