"""A step never waits for the controller, no report is lost between the two, and a probe is used once."""

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


def table(arm: Arm, version: int) -> pb.Table:
    choice = pb.Choice(
        batch_min=1, batch_max=LIMITS.max_batch_size, speculation_length=arm.speculation_length, ngram=arm.ngram
    )
    return pb.Table(decision_version=version, choices=[choice])


class FakeController(rpc.ControlServiceServicer):
    """Keeps every report it gets; `acknowledge`: says that they are durable; `hang_up_after` ends a stream early.

    newest_epoch: workers of older epochs are refused.
    """

    def __init__(self) -> None:
        self.seqs: list[int] = []
        self.reports: list[pb.StepReport] = []
        self.epochs: list[int] = []
        self.num_streams = 0
        self.acknowledge = True
        self.hang_up_after: int | None = None
        self.newest_epoch = 0
        self.arm = Arm(3, ngram=True)
        self.sample_every = 0
        self.probes: list[pb.Probe] = []

    async def RegisterWorker(self, request, context):  # noqa: N802
        self.epochs.append(request.worker.epoch)
        if request.worker.epoch < self.newest_epoch:
            newest = ((control_stream.NEWEST_EPOCH, str(self.newest_epoch)),)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "an older epoch", newest)
        return pb.RegisterWorkerResponse(table=table(self.arm, 1), durable_seq=0, sample_every=self.sample_every)

    async def StreamReports(self, request_iterator, context):  # noqa: N802
        self.num_streams += 1
        count = 0
        async for request in request_iterator:
            self.reports += request.reports
            self.seqs += [report.seq for report in request.reports]
            count += len(request.reports)
            durable = self.seqs[-1] if self.seqs and self.acknowledge else 0
            probes, self.probes = self.probes, []
            yield pb.StreamReportsResponse(
                durable_seq=durable, applied_seq=durable, probes=probes, sample_every=self.sample_every
            )
            if self.hang_up_after is not None and count >= self.hang_up_after:
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


async def test_the_table_comes_from_the_controller_and_reports_go_to_it():
    controller = FakeController()
    async with joined(controller) as control:
        assert control.wants_evaluations
        arm, version, _ = control.choose(2)
        flags = frozenset({StepFlag.PREFILL})
        for _ in range(300):
            control.report(step(2, arm, decision_version=version, flags=flags))
        await until(lambda: len(controller.seqs) == 300)
        await until(lambda: not control.buffer)
    assert control.table.arms[1] == controller.arm
    assert controller.seqs == list(range(1, 301))
    last = controller.reports[-1]
    assert (last.batch_size, last.speculation_length, last.ngram, last.decision_version) == (2, 3, True, 1)
    assert list(last.flags) == [pb.STEP_FLAG_PREFILL]
    assert control.buffer.num_dropped == 0


async def test_after_a_lost_stream_whatever_was_not_durable_is_sent_again():
    controller = FakeController()
    controller.acknowledge = False
    controller.hang_up_after = 10
    async with joined(controller) as control:
        for _ in range(10):
            control.report(step())
        await until(lambda: controller.num_streams >= 2)
        controller.acknowledge, controller.hang_up_after = True, None
        await until(lambda: not control.buffer)
    assert set(controller.seqs) == set(range(1, 11))
    assert len(controller.seqs) > 10


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
        controller.newest_epoch, controller.hang_up_after = 2000, 0
        await until(lambda: len(controller.epochs) > 4)
        assert not control.connected
    assert controller.epochs[:2] == [1, 1001]
    assert set(controller.epochs[2:]) == {1001}


async def test_a_worker_with_its_own_policy_ignores_tables_and_probes_but_reports():
    controller = FakeController()
    controller.probes = [probe()]
    async with joined(controller, follow=False) as control:
        control.report(step())
        await until(lambda: controller.seqs == [1])
        await until(lambda: not control.buffer)
        assert control.choose(1) == ArmChoice(FIRST)
        assert not control.wants_evaluations


async def test_the_last_reports_of_an_ending_worker_are_sent_at_once():
    controller, slow = FakeController(), replace(QUICK, flush_interval_s=0.2, heartbeat_s=60.0)
    controller.acknowledge = False
    async with joined(controller, settings=slow) as control:
        control.send_last()
        control.report(step())
        await until(lambda: controller.seqs)
        controller.acknowledge = True
        await until(lambda: not control.buffer)
