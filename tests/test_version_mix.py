"""During a rolling update versions differ: workers of the first protocol and of today serve with controllers of both.

tests/data/wire-first.binpb holds the first protocol's messages, as `protoc --descriptor_set_out` wrote them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from control_fakes import run, served
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc import aio
from store_rows import rows
from test_control_client import MAX_BATCH, MAX_LENGTH, client, step, until

from speclen.v1 import control_pb2, generation_pb2
from speclen.worker.drafting.plan import Plan
from speclen.worker.engine.length_chooser import CopyReport, LengthChoice, StepFlag, StepResult

WIRE = Path(__file__).parent / "data" / "wire-first.binpb"
CONTROL = "/speclen.v1.ControlService/"


def old_messages() -> dict[str, Any]:
    """The first protocol's message classes by name."""
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(WIRE.read_bytes()).file:
        pool.Add(file)
    names = ["speclen/v1/control.proto", "speclen/v1/generation.proto"]
    return {
        descriptor.name: message_factory.GetMessageClass(descriptor)
        for name in names
        for descriptor in pool.FindFileByName(name).message_types_by_name.values()
    }


OLD = old_messages()


@pytest.mark.parametrize("name", OLD)
def test_the_protocol_only_grows(name):
    """Every field of the first version has its number, type and name still."""
    new = getattr(control_pb2, name, None) or getattr(generation_pb2, name)
    for field in OLD[name].DESCRIPTOR.fields:
        now = new.DESCRIPTOR.fields_by_number[field.number]
        assert (now.name, now.type, now.is_repeated) == (field.name, field.type, field.is_repeated)


def old_report(seq: int) -> Any:
    return OLD["StepReport"](
        seq=seq,
        batch_size=4,
        speculation_length=2,
        latency_s=0.02,
        accepted_histogram=[1, 2, 1],
        mean_context_length=100.0,
    )


def test_a_worker_of_the_first_version_learns_and_is_learned_from(tmp_path):
    """It gets lengths that it knows, all it reports is kept, and nothing is asked of it that it has never heard of."""

    async def scenario() -> None:
        async with served(tmp_path) as controller:

            def call(kind: Any, method: str, answer: str) -> Any:
                return kind(
                    CONTROL + method,
                    request_serializer=lambda message: message.SerializeToString(),
                    response_deserializer=OLD[answer].FromString,
                )

            register = call(controller.channel.unary_unary, "RegisterWorker", "RegisterWorkerResponse")
            worker = OLD["WorkerIdentity"](worker_id="old", epoch=1)
            registered = await register(
                OLD["RegisterWorkerRequest"](
                    worker=worker,
                    context=OLD["ContextKey"](target="t", draft="d", device="cpu:test", dtype="float32"),
                    limits=OLD["WorkerLimits"](max_batch_size=32, max_speculation_length=4),
                    policy="adaptive",
                )
            )
            check_table(registered.table)
            stream = call(controller.channel.stream_stream, "StreamReports", "StreamReportsResponse")()
            await stream.write(OLD["StreamReportsRequest"](worker=worker))
            for first in range(1, 2001, 200):
                await stream.write(
                    OLD["StreamReportsRequest"](reports=[old_report(seq) for seq in range(first, first + 200)])
                )
            last, tables = 0, []
            while last < 2000:
                answer = await stream.read()
                last = answer.durable_seq
                assert not answer.num_refused, answer.last_refusal
                tables += [answer.table] if answer.HasField("table") else []
            assert tables, "the table changes as it learns"
            for table in tables:
                check_table(table)
            stream.cancel()

    def check_table(table: Any) -> None:
        known = {size for choice in table.choices for size in range(choice.batch_min, choice.batch_max + 1)}
        assert known >= set(range(1, 33))
        assert all(choice.speculation_length <= 4 for choice in table.choices)

    run(scenario)
    # Rows of its single steps: it sends no sums, which it has never heard of.
    assert rows(tmp_path / "test.db", "SELECT count(*), min(seq), max(seq) FROM step_reports") == [(2000, 1, 2000)]


class OldController:
    """Answers in the first protocol, whatever is new to it is dropped."""

    def __init__(self) -> None:
        self.reports: list[Any] = []

    def handlers(self) -> grpc.GenericRpcHandler[Any, Any]:
        def parsing(name: str) -> dict[str, Any]:
            return {
                "request_deserializer": OLD[name].FromString,
                "response_serializer": lambda message: message.SerializeToString(),
            }

        return grpc.method_handlers_generic_handler(
            "speclen.v1.ControlService",
            {
                "RegisterWorker": grpc.unary_unary_rpc_method_handler(
                    self.register, **parsing("RegisterWorkerRequest")
                ),
                "StreamReports": grpc.stream_stream_rpc_method_handler(self.stream, **parsing("StreamReportsRequest")),
            },
        )

    async def register(self, request: Any, context: Any) -> Any:
        assert request.limits.max_speculation_length == MAX_LENGTH
        choice = OLD["BucketChoice"](batch_min=1, batch_max=MAX_BATCH, speculation_length=3)
        return OLD["RegisterWorkerResponse"](table=OLD["LengthTable"](decision_version=1, choices=[choice]))

    async def stream(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        probed = False
        async for request in requests:
            self.reports += request.reports
            probe = OLD["Probe"](probe_id=7, batch_min=1, batch_max=MAX_BATCH, speculation_length=1, valid_for_s=60)
            yield OLD["StreamReportsResponse"](
                durable_seq=len(self.reports), applied_seq=len(self.reports), probes=[] if probed else [probe]
            )
            probed = True


def test_a_worker_of_today_serves_with_a_controller_of_the_first_version():
    """It follows lengths and probes without plans, keeps no report for ever, and what it reports adds up for the old."""
    controller = OldController()

    async def scenario() -> None:
        server = aio.server()
        server.add_generic_rpc_handlers((controller.handlers(),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        control = client()
        task = asyncio.create_task(control.run(f"127.0.0.1:{port}"))
        try:
            await until(lambda: control.connected and control.table.source == "controller")
            await until(lambda: bool(control._incoming or control._probes))
            choices = [control.choice_for(2), control.choice_for(2)]
            assert [(each.speculation_length, each.probe_id) for each in choices] == [(1, 7), (3, 0)]
            for result in (step(2, 1), copied(), step(4, 3, frozenset({StepFlag.CHANGED_LENGTH}))):
                control.report(LengthChoice(result.speculation_length, 1), result)
            await until(lambda: not control.buffer)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await server.stop(None)

    run(scenario)
    assert [report.seq for report in controller.reports] == [1, 2, 3]
    for report in controller.reports:
        assert sum(report.accepted_histogram) == report.batch_size
        assert len(report.accepted_histogram) == report.speculation_length + 1
    # Flags that it does not know are there, so that it can leave such a step out, as it leaves out any unknown one.
    assert [list(report.flags) for report in controller.reports] == [[], [30], [40]]


def copied() -> StepResult:
    """A step in which rows copied, whose histogram counts draft tokens alone."""
    copying = CopyReport(Plan(1, 2, 4), num_searched_rows=2, num_drafting_rows=1, num_verified_tokens=5, runs=())
    return StepResult(2, 1, 0.01, (2, 0), 10.0, frozenset({StepFlag.COPIED}), copying=copying)
