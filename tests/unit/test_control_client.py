"""Reports wait for a controller, bounded and sampled, and reach it; a probe is used once, for as long as it holds."""

import asyncio
import contextlib
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc
import pytest
from grpc import aio

from speclen.process.embedded import at
from speclen.records import Arm
from speclen.v1 import control_pb2 as pb
from speclen.v1 import control_pb2_grpc as rpc
from speclen.worker.arms import ArmChoice
from speclen.worker.reporting import control_stream
from speclen.worker.reporting.control_client import BLOCK, ControlClient, ReportBuffer
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


# Probes and the buffer.


def test_reports_are_read_while_steps_append_more():
    """Story: iterating over a deque while it grew raised an error, once in tens of thousands of messages."""
    buffer, number, interval = ReportBuffer(50_000), 50_000, sys.getswitchinterval()

    def append() -> None:
        for _ in range(number):
            buffer.append(step())

    sys.setswitchinterval(1e-6)
    engine = threading.Thread(target=append)
    try:
        engine.start()
        seqs: list[int] = []
        while len(seqs) < number:
            seqs += [record.seq for record in buffer.after(len(seqs), 256)]
            buffer.forget_until(len(seqs) - 100)
    finally:
        sys.setswitchinterval(interval)
        engine.join()
    assert seqs == list(range(1, number + 1))
    assert len(buffer) == 100


def arms_and_probes(control: ControlClient, *steps: tuple[int, bool]) -> list[tuple[int, int]]:
    made = [control.choose(batch_size, with_prefill) for batch_size, with_prefill in steps]
    return [(choice.arm.speculation_length, choice.probe_id) for choice in made]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([(4, False)] * 3, [(1, 9), (1, 9), (2, 0)]),
        ([(2, False), (3, False), (4, False), (4, False)], [(2, 0), (1, 9), (1, 9), (2, 0)]),
        ([(4, False), (5, False), (4, False)], [(1, 9), (2, 0), (2, 0)]),  # the batch grew: it ends
        ([(4, False), (4, True), (4, False)], [(1, 9), (2, 0), (2, 0)]),  # a prompt came along: it ends
        ([(4, True), (4, True), (4, False), (4, False)], [(2, 0), (2, 0), (1, 9), (1, 9)]),  # it waits
    ],
)
def test_all_steps_of_a_probe_quote_it(steps, expected):
    control = client()
    control.use_probes([probe(3, 4, num_steps=2)])
    assert arms_and_probes(control, *steps) == expected
    assert arms_and_probes(control, (4, False)) == [(2, 0)], "it is never repeated"


@pytest.mark.parametrize(("evaluates", "expected"), [(True, (0, 0)), (False, (1, 9))])
def test_a_probe_starts_during_prefill_only_if_acceptance_needs_it(evaluates, expected):
    control = client(first=Arm(0))
    control.card = replace(control.card, evaluates=evaluates)
    control.use_probes([probe()])
    assert arms_and_probes(control, (2, True)) == [expected]


def test_an_old_probe_is_forgotten_and_one_beyond_the_limits_is_not_used():
    now = [0.0]
    control = client(clock=lambda: now[0])
    control.use_probes([probe(valid_for_s=1.0), probe(arm=Arm(5))])
    now[0] = 2.0
    assert control.choose(1).probe_id == 0


def test_the_buffer_is_bounded_and_counts_what_it_drops():
    buffer = ReportBuffer(max_buffered=5)
    for _ in range(8):
        buffer.append(step())
    buffer.trim()
    assert (buffer.num_dropped, [record.seq for record in buffer.after(0, 10)]) == (3, [4, 5, 6, 7, 8])
    buffer.forget_until(7)
    assert [record.seq for record in buffer.after(0, 10)] == [8]


def test_blocks_of_steps_are_sampled_and_only_reported_steps_have_a_seq():
    buffer = ReportBuffer(10**6, sample_every=3)
    for number in range(6 * BLOCK):
        buffer.append(step(decision_version=number))
    kept = buffer.after(0, 10**6)
    assert [record.seq for record in kept] == list(range(1, 2 * BLOCK + 1))
    assert [record.decision_version for record in kept] == [*range(BLOCK), *range(3 * BLOCK, 4 * BLOCK)]


@pytest.mark.parametrize(("told", "used"), [(0, 1), (1, 1), (7, 7), (10**6, 1)])
def test_sampling_is_the_controllers_within_bounds(told, used):
    control = client()
    control.use_sampling(told)
    assert control.buffer.sample_every == used
