"""A stream ends for a stated reason, costs a bounded amount of memory, and never waits for another one."""

import asyncio
import resource
import time

import pytest
from grpc import aio

from speclen.controller.service.streams import StreamSettings
from speclen.records import Arm, Probe
from speclen.v1 import control_pb2 as pb
from speclen.v1 import control_pb2_grpc as rpc
from tests.support.control_fakes import group, identity, registration, report, served, status_of, to_the_end
from tests.support.waiting import PATIENCE_S


async def opened(at, worker_id="w"):
    """A stream of a worker that is registered, and its first answer."""
    await at.stub.RegisterWorker(registration(worker_id))
    call = at.stub.StreamReports()
    await call.write(pb.StreamReportsRequest(worker=identity(worker_id)))
    return call, await call.read()


async def test_the_first_message_of_a_stream_must_name_the_worker(tmp_path):
    async with served(tmp_path) as at:
        call = at.stub.StreamReports()
        await call.write(pb.StreamReportsRequest(reports=[report(1)]))
        code, details = await status_of(call.read())
        assert (code, "name the worker" in details) == ("INVALID_ARGUMENT", True)


async def test_a_message_with_too_many_reports_is_refused(tmp_path):
    async with served(tmp_path) as at:
        await at.stub.RegisterWorker(registration())
        call = at.stub.StreamReports()
        await call.write(group(1, 1024))
        assert (await call.read()).applied_seq == 1024
        await call.write(group(1025, 2049))
        code, details = await status_of(to_the_end(call))
        assert (code, "is 1025; it must be 0 to 1024" in details) == ("INVALID_ARGUMENT", True)


async def test_a_second_stream_of_a_worker_replaces_the_first(tmp_path):
    """The first is a connection that died silently; its reports that still arrive count once."""
    async with served(tmp_path) as at:
        first, _ = await opened(at)
        second, _ = await opened(at)
        assert (await status_of(first.read()))[0] == "ABORTED"
        await second.write(group(1, 3))
        assert (await second.read()).applied_seq == 3
        assert len(at.controller.servicer.streams.open) == 1


async def test_probes_and_sampling_reach_the_worker(tmp_path):
    async with served(tmp_path) as at:
        call, answer = await opened(at)
        assert answer.sample_every == 1
        at.service.sampling.sample_every = 4
        at.service.registry.workers["w"].probe = Probe(9, 3, 5, Arm(1), 3)
        await call.write(pb.StreamReportsRequest())
        answer = await call.read()
        assert answer.sample_every == 4
        [probe] = answer.probes
        assert (probe.probe_id, probe.batch_min, probe.batch_max, probe.speculation_length) == (9, 3, 5, 1)
        assert probe.num_steps == 3
        assert probe.valid_for_s > 0
        await call.write(pb.StreamReportsRequest())
        assert not (await call.read()).probes, "it is given once"
        assert (await at.stub.RegisterWorker(registration("v"))).sample_every == 4


async def test_the_number_of_streams_is_bounded(tmp_path):
    async with served(tmp_path, max_streams=2) as at:
        first, _ = await opened(at, "a")
        second = await opened(at, "b")  # kept: a call without a reference is cancelled, which would make room
        code, details = await status_of(opened(at, "c"))
        assert (code, "try again later" in details) == ("RESOURCE_EXHAUSTED", True)
        assert (await at.stub.ReportStep(pb.ReportStepRequest(worker=identity("c"), report=report(1)))).applied_seq == 1
        first.cancel()
        await asyncio.sleep(0.1)
        await opened(at, "c")
        del second


async def test_a_controller_raises_the_limit_of_open_files(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, limits[1]))
    try:
        async with served(tmp_path):
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 4096
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def test_a_silent_stream_is_ended_and_one_with_heartbeats_is_not(tmp_path):
    async with served(tmp_path, silence_s=1.5) as at:
        silent, _ = await opened(at, "silent")
        alive, _ = await opened(at, "alive")
        ended = asyncio.create_task(status_of(silent.read()))
        started = time.monotonic()
        while not ended.done():
            await alive.write(pb.StreamReportsRequest())
            await alive.read()
            await asyncio.sleep(0.1)
        code, details = ended.result()
        assert (code, "no message for 1.5 s" in details) == ("DEADLINE_EXCEEDED", True)
        assert time.monotonic() - started > 1.0


async def test_a_controller_that_was_suspended_does_not_time_out_its_workers(tmp_path):
    async with served(tmp_path, silence_s=1.5) as at:
        call, _ = await opened(at)
        time.sleep(2.2)  # noqa: ASYNC251 - nothing in this process runs, as after SIGSTOP
        await asyncio.sleep(0.3)
        await call.write(group(1, 2))
        assert (await call.read()).applied_seq == 2


async def test_a_worker_that_does_not_read_is_not_read_and_times_out(tmp_path):
    """Its messages pile up on its own side; others are served, and after a while its stream is ended."""
    async with served(tmp_path) as at:
        streams = at.controller.servicer.streams
        streams.settings = StreamSettings(unread_s=1.0)
        await at.stub.RegisterWorker(registration("deaf"))
        # The deaf side has room for a few hundred answers; then the controller has to wait.
        options = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
        channel = aio.insecure_channel(at.address, options=options)
        deaf = rpc.ControlServiceStub(channel).StreamReports()
        flooding = asyncio.create_task(flood(deaf, pb.StreamReportsRequest(worker=identity("deaf"))))
        call, _ = await opened(at)
        for number in range(200):
            await call.write(group(number + 1, number + 1))
            assert await asyncio.wait_for(call.read(), PATIENCE_S) is not aio.EOF
            if "deaf" not in streams.by_worker and number > 5:
                break
            await asyncio.sleep(0.05)
        code, details = await status_of(to_the_end(deaf))
        assert (code, "not read for 1 s" in details) == ("DEADLINE_EXCEEDED", True)
        assert set(streams.by_worker) == {"w"}
        flooding.cancel()
        await asyncio.gather(flooding, return_exceptions=True)
        await channel.close()


async def flood(call, request):
    while True:
        await call.write(request)


@pytest.mark.parametrize("busy", [True, False])
async def test_durable_seq_reaches_a_busy_worker_and_a_quiet_one(tmp_path, busy):
    async with served(tmp_path, commit_interval_s=0.05) as at:
        await at.stub.RegisterWorker(registration())
        call = at.stub.StreamReports()
        await call.write(group(1, 10))
        last = 10
        while (await call.read()).durable_seq < 10:
            if busy:
                last += 1
                await call.write(group(last, last))
                await asyncio.sleep(0.005)
        assert last > 11 or not busy
