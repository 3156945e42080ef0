"""Reports wait for a controller and reach it; a worker that was started again is the newer one."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc
from grpc import aio

from speclen.process.embedded import at
from speclen.records import Arm, StepFlag
from speclen.v1 import control_pb2 as pb
from speclen.v1 import control_pb2_grpc as rpc
from speclen.worker.arms import ArmChoice
from speclen.worker.reporting import control_stream
from speclen.worker.reporting.control_client import ControlClient
from tests.support.control_parts import FIRST, LIMITS, QUICK, client, probe, step
from tests.support.waiting import on_loop_until as until


CHOICE = pb.Choice(batch_min=1, batch_max=LIMITS.max_batch_size, speculation_length=3)
TABLE = pb.Table(decision_version=1, choices=[CHOICE])


class FakeController(rpc.ControlServiceServicer):
    """Keeps the seqs of reports; `acknowledge`: says that they are durable; `hang_up`: ends a stream at its first message.

    newest_epoch: workers of older epochs are refused.
    """

    def __init__(self) -> None:
        self.seqs: list[int] = []
        self.epochs: list[int] = []
        self.num_streams = self.newest_epoch = 0
        self.acknowledge, self.hang_up = True, False

    async def RegisterWorker(self, request, context):  # noqa: N802
        self.epochs.append(request.worker.epoch)
        if request.worker.epoch < self.newest_epoch:
            newest = ((control_stream.NEWEST_EPOCH, str(self.newest_epoch)),)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "an older epoch", newest)
        return pb.RegisterWorkerResponse(table=TABLE, durable_seq=0)

    async def StreamReports(self, request_iterator, context):  # noqa: N802
        self.num_streams += 1
        async for request in request_iterator:
            self.seqs += [report.seq for report in request.reports]
            durable = self.seqs[-1] if self.seqs and self.acknowledge else 0
            yield pb.StreamReportsResponse(durable_seq=durable, applied_seq=durable)
            if self.hang_up:
                return


@contextlib.asynccontextmanager
async def joined(controller: FakeController, **options) -> AsyncIterator[ControlClient]:
    """A client that has found this controller. options: of the client."""
    server = aio.server()
    rpc.add_ControlServiceServicer_to_server(controller, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    control = client(**options)
    task = asyncio.create_task(control.run(at(f"127.0.0.1:{port}")))
    try:
        await until(lambda: control.connected)
        yield control
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await server.stop(None)


def test_without_a_controller_the_first_table_is_used_and_reports_wait():
    control = client()
    assert control.choose(5) == ArmChoice(FIRST)
    control.report(step())
    assert [record.seq for record in control.buffer.after(0, 10)] == [1]
    assert not control.wants_evaluations, "nobody would read them"


async def test_a_report_that_no_message_can_hold_is_dropped_alone():
    controller = FakeController()
    async with joined(controller) as control:
        for version in (0, -1, 0):
            control.report(step(decision_version=version))
        await until(lambda: not control.buffer)
    assert controller.seqs == [1, 3]
    assert controller.num_streams == 1
    assert control.buffer.num_dropped == 1


async def test_a_worker_whose_clock_was_set_back_is_still_the_newer_incarnation():
    """Story: it was refused until its clock had passed the epoch of its last start."""
    controller = FakeController()
    controller.newest_epoch = 1000
    async with joined(controller) as control:
        assert control.card.epoch == 1001
        # But what has been here before, and is followed by another incarnation, comes back no more.
        controller.newest_epoch, controller.hang_up = 2000, True
        await until(lambda: len(controller.epochs) > 4)
        assert not control.connected
    assert controller.epochs[:2] == [1, 1001]
    assert set(controller.epochs[2:]) == {1001}


async def test_the_last_reports_of_an_ending_worker_are_sent_at_once():
    controller, slow = FakeController(), replace(QUICK, flush_interval_s=0.2, heartbeat_s=60.0)
    controller.acknowledge = False
    async with joined(controller, settings=slow) as control:
        control.send_last()
        control.report(step())
        await until(lambda: controller.seqs)
        controller.acknowledge = True
        await until(lambda: not control.buffer)
