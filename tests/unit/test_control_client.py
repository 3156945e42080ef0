"""A step never waits for the controller, no report is lost between the two, and a probe is used once."""

import asyncio
import functools
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from control_fakes import CONTEXT, registration, run, served
from grpc import aio
from structlog.testing import capture_logs

import speclen.transport.supervision
from speclen.controller.service.streams import StreamSettings
from speclen.transport.supervision import Supervisor
from speclen.v1 import control_pb2 as pb
from speclen.v1 import control_pb2_grpc as rpc
from speclen.worker.engine.length_chooser import LengthChoice, StepFlag, StepResult
from speclen.worker.reporting.control_client import ControlClient, ControlSettings, ReportBuffer, WorkerCard
from speclen.worker.reporting.length_mix import LengthMix
from speclen.worker.reporting.length_table import BucketLength, LengthTable
from speclen.worker.reporting.outgoing import Outgoing
from speclen.worker.reporting.steadiness import CONTRARY_STEPS

MAX_BATCH, MAX_LENGTH = 8, 4
QUICK = ControlSettings(flush_interval_s=0.005, heartbeat_s=0.05, silence_s=1.0, retry_s=0.02, max_retry_s=0.05)


def card() -> WorkerCard:
    return WorkerCard("w", 1, pb.ContextKey(target="t", draft="d"), MAX_BATCH, MAX_LENGTH, "127.0.0.1:1", "adaptive")


def client(follow: bool = True, settings: ControlSettings = QUICK, probe_steps: int = 1) -> ControlClient:
    return ControlClient(
        replace(card(), probe_steps=probe_steps), LengthTable.constant(2, MAX_BATCH, "default"), follow, settings
    )


def step(batch_size: int = 1, length: int = 2, flags: frozenset[StepFlag] = frozenset()) -> StepResult:
    histogram = (batch_size,) + (0,) * length
    return StepResult(batch_size, length, 0.01, histogram, 10.0, flags)


def table(length: int, version: int) -> pb.LengthTable:
    choice = pb.BucketChoice(batch_min=1, batch_max=MAX_BATCH, speculation_length=length)
    return pb.LengthTable(decision_version=version, choices=[choice])


class FakeController(rpc.ControlServiceServicer):
    """Keeps every report it gets; `durable` says how far it acknowledges; `hang_up_after` ends a stream early."""

    def __init__(self) -> None:
        self.seqs: list[int] = []
        self.reports: list[pb.StepReport] = []
        self.num_streams = 0
        self.acknowledge = True
        self.hang_up_after: int | None = None
        self.length = 3
        self.probes: list[pb.Probe] = []

    async def RegisterWorker(self, request, context):  # noqa: N802
        return pb.RegisterWorkerResponse(table=table(self.length, 1), durable_seq=0)

    async def StreamReports(self, request_iterator, context):  # noqa: N802
        self.num_streams += 1
        count = 0
        async for request in request_iterator:
            self.reports += request.reports
            self.seqs += [report.seq for report in request.reports]
            count += len(request.reports)
            durable = self.seqs[-1] if self.seqs and self.acknowledge else 0
            probes, self.probes = self.probes, []
            yield pb.StreamReportsResponse(durable_seq=durable, applied_seq=durable, probes=probes)
            if self.hang_up_after is not None and count >= self.hang_up_after:
                return


async def until(condition, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        await asyncio.sleep(0.005)


async def start(controller: FakeController) -> tuple[aio.Server, str]:
    server = aio.server()
    rpc.add_ControlServiceServicer_to_server(controller, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"


def with_controller(controller: FakeController, scenario, follow: bool = True) -> ControlClient:
    async def run() -> ControlClient:
        server, address = await start(controller)
        control = client(follow)
        task = asyncio.create_task(control.run(address))
        try:
            await scenario(control)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await server.stop(None)
        return control

    return asyncio.run(run())


def test_without_a_controller_the_first_table_is_used_and_reports_wait():
    control = client()
    assert control.choice_for(5) == LengthChoice(2, 0)
    control.report(control.choice_for(1), step())
    assert [record[0] for record in control.buffer.after(0, 10)] == [1]


def test_table_comes_from_the_controller_and_reports_go_to_it():
    controller = FakeController()

    async def scenario(control):
        await until(lambda: control.connected)
        for _ in range(300):
            control.report(control.choice_for(2), step(2, 3, frozenset({StepFlag.PREFILL})))
        await until(lambda: len(controller.seqs) == 300)
        await until(lambda: not control.buffer)

    control = with_controller(controller, scenario)
    assert control.table.lengths[1] == 3
    assert controller.seqs == list(range(1, 301))
    last = controller.reports[-1]
    assert (last.batch_size, last.speculation_length, last.decision_version) == (2, 3, 1)
    assert list(last.flags) == [pb.STEP_FLAG_PREFILL]
    assert control.buffer.num_dropped == 0


def test_a_stream_that_the_controller_closed_is_not_taken_for_silence():
    controller = FakeController()
    controller.hang_up_after = 1

    async def scenario(control):
        await until(lambda: control.connected)
        control.report(control.choice_for(1), step())
        await until(lambda: controller.num_streams > 1)

    with capture_logs() as logs:
        with_controller(controller, scenario)
    reasons = {entry["reason"] for entry in logs if entry["event"].startswith("controller lost")}
    assert reasons == {"closed by the controller"}


def test_after_a_lost_stream_whatever_was_not_durable_is_sent_again():
    controller = FakeController()
    controller.acknowledge = False
    controller.hang_up_after = 10

    async def scenario(control):
        await until(lambda: control.connected)
        for _ in range(10):
            control.report(LengthChoice(1), step())
        await until(lambda: controller.num_streams >= 2)
        controller.acknowledge, controller.hang_up_after = True, None
        await until(lambda: not control.buffer)

    with_controller(controller, scenario)
    assert set(controller.seqs) == set(range(1, 11))
    assert len(controller.seqs) > 10


def test_a_report_that_no_message_can_hold_does_not_hold_up_the_others():
    controller = FakeController()

    async def scenario(control):
        await until(lambda: control.connected)
        control.report(LengthChoice(1), step())
        control.report(LengthChoice(1, decision_version=-1), step())
        control.report(LengthChoice(1), step())
        await until(lambda: not control.buffer)

    control = with_controller(controller, scenario)
    assert controller.seqs == [1, 3]
    assert controller.num_streams == 1
    assert control.buffer.num_dropped == 1


def test_a_worker_whose_clock_was_set_back_is_the_newer_one_all_the_same(tmp_path):
    """Story: it was refused until its clock had passed the epoch of its last start."""

    async def story():
        async with served(tmp_path, commit_interval_s=0.05) as at:
            await at.stub.RegisterWorker(registration(epoch=1000))
            control = ControlClient(
                replace(card(), context=CONTEXT, epoch=1), LengthTable.constant(2, MAX_BATCH, "default"), True, QUICK
            )
            first = asyncio.create_task(control.run(at.address))
            control.report(LengthChoice(2), step())
            await until(lambda: control.connected and not control.buffer)
            assert at.service.registry.workers["w"].epoch == control.card.epoch == 1001
            # But what has been here before, and is followed by another life, comes back no more.
            await at.stub.RegisterWorker(registration(epoch=2000))
            await until(lambda: not control.connected)
            await asyncio.sleep(0.3)
            assert at.service.registry.workers["w"].epoch == 2000
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)

    run(story)


def test_reports_are_read_while_steps_append_more():
    """Story: a deque that grew while it was read through raised, once in tens of thousands of messages."""
    buffer, number, interval = ReportBuffer(10_000), 50_000, sys.getswitchinterval()

    def append() -> None:
        for _ in range(number):
            buffer.append(LengthChoice(1), step())

    sys.setswitchinterval(1e-6)
    engine = threading.Thread(target=append)
    try:
        engine.start()
        seqs: list[int] = []
        while len(seqs) < number:
            seqs += [seq for seq, _, _ in buffer.after(len(seqs), 256)]
            buffer.forget_until(len(seqs) - 100)
    finally:
        sys.setswitchinterval(interval)
        engine.join()
    assert seqs == list(range(1, number + 1))
    assert len(buffer) == 100


def test_a_mistake_of_ours_in_a_message_is_told_and_reporting_begins_anew(monkeypatch):
    """Story: gRPC cancelled the call without a word, and the worker reported nothing any more, for as long as it lived."""
    monkeypatch.setattr(speclen.transport.supervision, "FIRST_PAUSE_S", 0.01)
    controller, rightly, errors = FakeController(), Outgoing.next, [RuntimeError("a mistake")]

    def wrongly(outgoing, window_s, at_once=False):
        if outgoing.buffer and errors:
            raise errors.pop()
        return rightly(outgoing, window_s, at_once)

    monkeypatch.setattr(Outgoing, "next", wrongly)

    async def scenario():
        server, address = await start(controller)
        supervisor, control = Supervisor(), client()
        supervisor.keep("reporting", functools.partial(control.run, address))
        await until(lambda: control.connected)
        control.report(LengthChoice(1), step())
        await until(lambda: not control.buffer)
        assert supervisor.num_failures == {"reporting": 1}
        await supervisor.stop()
        await server.stop(None)

    with capture_logs() as logs:
        asyncio.run(scenario())
    assert controller.seqs == [1]
    (told,) = [entry["reason"] for entry in logs if entry["event"].startswith("a part has ended")]
    assert told.startswith("RuntimeError: a mistake")


def test_a_worker_with_its_own_policy_ignores_tables_and_probes_but_reports():
    controller = FakeController()
    controller.probes = [pb.Probe(probe_id=9, batch_min=1, batch_max=8, speculation_length=1, valid_for_s=60)]

    async def scenario(control):
        await until(lambda: control.connected)
        control.report(control.choice_for(1), step())
        await until(lambda: controller.seqs == [1])
        await until(lambda: not control.buffer)
        assert control.choice_for(1) == LengthChoice(2, 0)

    with_controller(controller, scenario, follow=False)


def test_a_probe_is_used_once_and_only_for_its_batch_sizes():
    controller = FakeController()
    controller.probes = [pb.Probe(probe_id=9, batch_min=3, batch_max=4, speculation_length=1, valid_for_s=60)]
    seen: list[LengthChoice] = []

    async def scenario(control):
        await until(lambda: control.connected and control._incoming)
        seen.extend(control.choice_for(batch_size) for batch_size in (2, 4, 4, 3))

    with_controller(controller, scenario)
    assert [choice.probe_id for choice in seen] == [0, 9, 0, 0]
    assert [choice.speculation_length for choice in seen] == [3, 1, 3, 3]


def test_a_probe_waits_for_a_step_whose_time_teaches():
    """A step that feeds prompts along teaches acceptance alone, which is what a probe at length 0 is for."""
    controller = FakeController()
    probe = pb.Probe(probe_id=9, batch_min=1, batch_max=8, speculation_length=1, valid_for_s=60)
    controller.probes = [probe]
    seen: list[int] = []

    async def scenario(control):
        await until(lambda: control.connected and control._incoming)
        seen.extend(control.choice_for(2, with_prompts).probe_id for with_prompts in (True, True, False, False))
        control._add_probes([probe])
        control.table = LengthTable.constant(0, MAX_BATCH, "default")
        seen.append(control.choice_for(2, with_prompts=True).probe_id)

    with_controller(controller, scenario)
    assert seen == [0, 0, 9, 0, 9]


def test_a_probe_of_several_steps_ends_with_the_one_that_tells_of_it():
    """Where rows come or go, or a prompt comes along, the last step of it would not be like one played on and on."""
    control = client(probe_steps=2)
    assert control.card.register_request().limits.probe_steps == 2

    def choices(*steps: tuple[int, bool]) -> list[tuple[int, int]]:
        control._add_probes([pb.Probe(probe_id=9, batch_min=3, batch_max=4, speculation_length=1, valid_for_s=60)])
        made = [control.choice_for(batch_size, with_prompts) for batch_size, with_prompts in steps]
        assert not control._incoming
        assert not control._probes
        return [(choice.speculation_length, choice.probe_id) for choice in made]

    assert choices((4, False), (4, False), (4, False)) == [(1, 0), (1, 9), (2, 0)]
    assert choices((2, False), (3, False), (4, False)) == [(2, 0), (1, 0), (1, 9)]
    assert choices((4, False), (5, False), (4, False)) == [(1, 0), (2, 0), (2, 0)]
    assert choices((4, False), (4, True), (4, False)) == [(1, 0), (2, 0), (2, 0)]


def test_an_old_probe_is_forgotten():
    controller = FakeController()
    controller.probes = [pb.Probe(probe_id=9, batch_min=1, batch_max=8, speculation_length=1, valid_for_s=0.01)]

    async def scenario(control):
        await until(lambda: control.connected and control._incoming)
        await asyncio.sleep(0.05)
        assert control.choice_for(1).probe_id == 0

    with_controller(controller, scenario)


def test_when_the_controller_goes_the_last_table_stays():
    async def run() -> ControlClient:
        controller = FakeController()
        server, address = await start(controller)
        control = client()
        task = asyncio.create_task(control.run(address))
        await until(lambda: control.connected)
        await server.stop(None)
        await until(lambda: not control.connected)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return control

    control = asyncio.run(run())
    assert control.table.source == "last table"
    assert control.choice_for(1).speculation_length == 3


def test_the_buffer_is_bounded_and_counts_what_it_drops():
    buffer = ReportBuffer(max_buffered=5)
    for _ in range(8):
        buffer.append(LengthChoice(1), step())
    buffer.trim()
    assert buffer.num_dropped == 3
    assert [seq for seq, _, _ in buffer.after(0, 10)] == [4, 5, 6, 7, 8]
    assert [seq for seq, _, _ in buffer.after(6, 1)] == [7]
    buffer.forget_until(7)
    assert [seq for seq, _, _ in buffer.after(0, 10)] == [8]


def test_whether_to_draft_changes_once_most_steps_were_to():
    """While the batch goes to and fro between sizes that draft and do not, the draft model works on, or is left alone."""
    buckets = [BucketLength(1, 3, 2), BucketLength(4, 4, 1), BucketLength(5, MAX_BATCH, 0)]
    table = LengthTable.from_buckets(buckets, MAX_BATCH, MAX_LENGTH, 1, "controller")
    worker = ControlClient(card(), table, True, QUICK)

    def lengths(*batch_sizes: int) -> list[int]:
        return [worker.choice_for(size).speculation_length for size in batch_sizes]

    to_and_fro = [4, 5] * 20
    assert lengths(*to_and_fro) == [1] * 40, "a neighbour's plan"
    assert lengths(7, 3, 7) == [0, 2, 0], "it has no such neighbour"
    assert lengths(*[5] * CONTRARY_STEPS)[-1] == 0
    assert lengths(*to_and_fro, 2, 5) == [0] * 42
    assert lengths(5, 5, 5, 5, 2, 2, 2, 2, 2) == [0] * 7 + [2] * 2, "far from those that do not: sooner"
    assert lengths(4, 5) == [1, 1]
    worker.follow = False  # a table of its own is played as it is
    assert lengths(5, 2, 5) == [0, 2, 0]


def test_hot_rows_do_not_draft_since_rows_of_another_class_would():
    drafting, hot = [1.0, 1.9, 2.7], [1.0, 1.0, 1.0]
    mix = LengthMix((MAX_BATCH,), np.array([[1.0, 1.3, 1.6]]), np.array([[drafting], [hot]]))
    table = LengthTable.from_buckets([BucketLength(1, MAX_BATCH, 2)], MAX_BATCH, MAX_LENGTH, 1, "controller", mix=mix)
    worker = ControlClient(card(), table, True, QUICK)

    def lengths(*rows_by_class: tuple[int, int]) -> list[int]:
        return [worker.choice_for(sum(rows), False, rows).speculation_length for rows in rows_by_class]

    assert lengths((4, 0), (0, 4), (4, 0), (0, 4)) == [2, 0, 2, 0], "the usual mix drafts at every batch size"
    assert lengths(*[(0, 4)] * 4, *[(4, 0)] * 4) == [0] * 7 + [2], "drafting is resumed after four steps"


def test_choosing_and_reporting_are_cheap():
    """No timing here, only that nothing but a tuple index and an append happens: no lock, no message, no clock."""
    control = ControlClient(card(), LengthTable.constant(2, MAX_BATCH, "default"), True, QUICK, clock=pytest.fail)
    control.report(control.choice_for(1), step())


def test_between_two_windows_a_worker_is_silent_and_more_patient():
    """An empty message costs the controller half of what a window does; one that never speaks is ended after 30 s."""
    worker = client(settings=ControlSettings())
    assert (worker.pause_s, worker.patience_s) == (1.0, 5.0)
    worker._apply_thinning(pb.Thinning(window_s=4.0))
    assert (worker.pause_s, worker.patience_s) == (4.0, 12.0)
    worker._apply_thinning(pb.Thinning(window_s=60.0))
    assert worker.pause_s < StreamSettings().silence_s / 2


def test_reports_wait_longer_once_a_worker_has_told_many():
    """A message costs milliseconds; there is little news after thousands of steps."""
    table = LengthTable.constant(2, MAX_BATCH, "default")
    for interval_s, expected in ((0.1, [0.1, 0.1, 0.5, 0.5]), (1.0, [1.0] * 4)):
        client = ControlClient(card(), table, True, ControlSettings(flush_interval_s=interval_s))
        assert [client._flush_interval_s(steps) for steps in (0, 2999, 3000, 10**6)] == expected
