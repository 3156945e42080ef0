"""The controller's calls over real gRPC: what a worker may rely on, status codes of errors, and the metrics page."""

import asyncio
import math
import re

import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from speclen.controller.service.controller_metrics import range_label
from speclen.store.connection import connect_reader
from speclen.store.queries import workers
from speclen.v1 import control_pb2 as pb
from speclen.v1 import control_pb2_grpc as rpc
from tests.support.control_fakes import (
    CONTEXT,
    LIMITS,
    PROFILE,
    eventful_page,
    group,
    identity,
    page_of,
    registration,
    report,
    served,
    status_of,
    to_the_end,
)


async def test_the_simplest_client_reports_a_step_and_receives_a_length(tmp_path):
    async with served(tmp_path) as at:
        await at.stub.RegisterWorker(registration())
        for seq, applied in ((1, 1), (2, 2), (2, 2), (1, 2), (5, 5)):  # repeated and missing ones are not errors
            answer = await at.stub.ReportStep(pb.ReportStepRequest(worker=identity(), report=report(seq)))
            assert (answer.applied_seq, answer.speculation_length <= LIMITS.max_speculation_length) == (applied, True)


async def test_a_table_that_changed_is_pushed_to_the_other_workers(tmp_path):
    async with served(tmp_path) as at:
        for worker_id in ("w", "listener"):
            await at.stub.RegisterWorker(registration(worker_id))
        listener = at.stub.StreamReports()
        await listener.write(pb.StreamReportsRequest(worker=identity("listener")))
        first = (await listener.read()).table.decision_version
        # Length 2 with everything accepted, at the price of length 0: plain decoding cannot stay in use.
        call = at.stub.StreamReports()
        await call.write(group(1, 64, accepted_histogram=[0, 0, 4]))
        await call.write(group(65, 128, speculation_length=0, accepted_histogram=[4]))
        await call.write(group(129, 192, speculation_length=4, latency_s=0.021, accepted_histogram=[0, 0, 0, 0, 4]))
        while True:
            answer = await listener.read()
            if answer.HasField("table"):
                break
        assert answer.table.decision_version > first


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"worker": pb.WorkerIdentity(worker_id="", epoch=1)}, "worker_id"),
        ({"worker": pb.WorkerIdentity(worker_id="x" * 129, epoch=1)}, "worker_id"),
        ({"worker": pb.WorkerIdentity(worker_id="a\nb", epoch=1)}, "worker_id"),
        ({"worker": pb.WorkerIdentity(worker_id="w", epoch=0)}, "epoch"),
        ({"worker": pb.WorkerIdentity(worker_id="w", epoch=2**63)}, "epoch"),
        ({"context": pb.ContextKey()}, "context.target"),
        ({"context": pb.ContextKey(target="t", device="c")}, "context.dtype"),
        ({"limits": pb.WorkerLimits(max_batch_size=0)}, "max_batch_size"),
        ({"limits": pb.WorkerLimits(max_batch_size=4097)}, "max_batch_size"),
        ({"limits": pb.WorkerLimits(max_batch_size=1, max_speculation_length=65)}, "max_speculation_length"),
        ({"limits": pb.WorkerLimits(max_batch_size=1, probe_steps=17)}, "probe_steps"),
        ({"address": "x" * 257}, "address"),
        ({"policy": "x" * 65}, "policy"),
    ],
)
async def test_a_registration_is_checked_field_by_field(tmp_path, changes, named):
    async with served(tmp_path) as at:
        request = registration()
        for field, value in changes.items():
            if isinstance(value, str):
                setattr(request, field, value)
            else:
                getattr(request, field).CopyFrom(value)
        code, details = await status_of(at.stub.RegisterWorker(request))
        assert (code, named in details) == ("INVALID_ARGUMENT", True), details
        assert not at.service.registry.workers


async def test_old_and_unknown_incarnations_are_refused(tmp_path):
    async with served(tmp_path) as at:
        unary = pb.ReportStepRequest(worker=identity(), report=report(1))
        assert (await status_of(at.stub.ReportStep(unary)))[0] == "FAILED_PRECONDITION"
        await at.stub.RegisterWorker(registration(epoch=7))
        stream = at.stub.StreamReports()
        await stream.write(group(1, 4))
        await stream.read()
        await at.stub.RegisterWorker(registration(epoch=8))
        assert (await status_of(to_the_end(stream)))[0] == "FAILED_PRECONDITION", (
            "the stream of the old incarnation is ended"
        )
        for attempt in (at.stub.RegisterWorker(registration(epoch=7)), at.stub.ReportStep(unary), first_answer(at, 7)):
            code, details = await status_of(attempt)
            assert (code, "epoch 7" in details) == ("FAILED_PRECONDITION", True)
        await at.stub.GetLearnedTable(pb.GetLearnedTableRequest())
        assert at.service.totals.num_reports == 4


async def first_answer(at, epoch):
    call = at.stub.StreamReports()
    await call.write(pb.StreamReportsRequest(worker=identity(epoch=epoch)))
    return await call.read()


async def test_a_profile_seeds_a_context_and_is_checked(tmp_path):
    async with served(tmp_path) as at:
        answer = await at.stub.ImportProfile(PROFILE)
        assert (answer.profile_id, answer.num_cells) == (1, 15)
        table = (await at.stub.RegisterWorker(registration())).table
        assert table.choices[0].speculation_length == 4, "at batch size 1 the longest pays in this profile"
        rows = (await at.stub.GetLearnedTable(pb.GetLearnedTableRequest(context=CONTEXT))).tables[0].rows
        assert {row.source for row in rows if row.batch_min == 1} == {"profile"}
        for change, named in (
            (lambda p: p.ClearField("cells"), "cells"),
            (lambda p: p.cells.add(batch_size=1, step_s=0.1, num_steps=1), "two cells"),
            (lambda p: setattr(p.cells[0], "step_s", math.inf), "step_s"),
            (lambda p: setattr(p.cells[0], "step_s_stderr", -1.0), "step_s_stderr"),
            (lambda p: setattr(p.cells[0], "num_steps", 0), "num_steps"),
            (lambda p: setattr(p.cells[0], "mean_context_length", math.nan), "mean_context_length"),
            (lambda p: p.survival.append(0.9), "survival has 5"),
            (lambda p: p.survival.__setitem__(1, 0.95), "survival"),
            (lambda p: p.survival.__setitem__(0, math.nan), "survival"),
            (lambda p: p.context.ClearField("target"), "context.target"),
        ):
            profile = pb.ImportProfileRequest()
            profile.CopyFrom(PROFILE)
            change(profile)
            code, details = await status_of(at.stub.ImportProfile(profile))
            assert (code, named in details) == ("INVALID_ARGUMENT", True), details


async def test_an_unknown_context_is_an_error_and_not_an_empty_table(tmp_path):
    async with served(tmp_path) as at:
        code, details = await status_of(at.stub.GetLearnedTable(pb.GetLearnedTableRequest(context=CONTEXT)))
        assert (code, "unknown" in details) == ("FAILED_PRECONDITION", True)
        assert not (await at.stub.GetLearnedTable(pb.GetLearnedTableRequest())).tables


async def test_a_worker_never_receives_a_length_beyond_its_limit(tmp_path):
    async with served(tmp_path) as at:
        await at.stub.ImportProfile(PROFILE)
        short = pb.WorkerLimits(max_batch_size=32, max_speculation_length=1)
        table = (await at.stub.RegisterWorker(registration("short", limits=short))).table
        assert max(choice.speculation_length for choice in table.choices) == 1
        full = (await at.stub.RegisterWorker(registration("full", limits=LIMITS))).table
        assert max(choice.speculation_length for choice in full.choices) == 4


async def test_an_internal_error_is_logged_and_its_text_is_not_sent(tmp_path, monkeypatch):
    async with served(tmp_path) as at:
        monkeypatch.setattr(at.service, "learned", lambda key: 1 / 0)
        await at.stub.RegisterWorker(registration())
        code, details = await status_of(at.stub.GetLearnedTable(pb.GetLearnedTableRequest()))
        assert (code, "division" in details) == ("INTERNAL", False)


async def test_draining_saves_everything_and_ends_streams_as_unavailable(tmp_path):
    answers = []
    async with served(tmp_path) as at:
        await at.stub.RegisterWorker(registration())
        channel = aio.insecure_channel(at.address)  # outlives the controller
        call = rpc.ControlServiceStub(channel).StreamReports()
        await call.write(group(1, 20))
        answers.append(await call.read())
        reading = asyncio.create_task(read_to_the_end(call, answers))
    assert await reading == "UNAVAILABLE"
    assert answers[-1].durable_seq == 20
    assert workers(connect_reader(tmp_path / "test.db"))[0].applied_seq == 20
    await channel.close()


async def read_to_the_end(call, answers):
    """Code of the status with which the stream ended."""
    try:
        while (answer := await call.read()) is not aio.EOF:
            answers.append(answer)
    except aio.AioRpcError as error:
        return error.code().name
    return "OK"


async def test_a_token_for_reading_reads_and_changes_nothing(tmp_path):
    token, reading = tmp_path / "token", tmp_path / "reading"
    token.write_text("0123456789abcdef\n")
    reading.write_text("fedcba9876543210\n")

    async with served(tmp_path, token_file=token, read_token_file=reading) as at:
        full = (("authorization", "Bearer 0123456789abcdef"),)
        read = (("authorization", "Bearer fedcba9876543210"),)
        await at.stub.RegisterWorker(registration(), metadata=full)
        table = await at.stub.GetLearnedTable(pb.GetLearnedTableRequest(context=CONTEXT), metadata=read)
        assert table.tables
        health = health_pb2_grpc.HealthStub(at.channel)
        await health.Check(health_pb2.HealthCheckRequest(), metadata=read)
        for call in (
            at.stub.RegisterWorker(registration("other"), metadata=read),
            at.stub.ReportStep(pb.ReportStepRequest(worker=identity(), report=report(1)), metadata=read),
            at.stub.ImportProfile(pb.ImportProfileRequest(), metadata=read),
        ):
            code, words = await status_of(call)
            assert (code, words) == ("PERMISSION_DENIED", "this token is read-only")
        stream = at.stub.StreamReports(metadata=read)
        assert (await status_of(stream.read()))[0] == "PERMISSION_DENIED"


def value(text: str, name: str) -> float:
    found = re.search(rf"^speclen_controller_{re.escape(name)} (\S+)$", text, re.MULTILINE)
    assert found, f"{name} is not on the page"
    return float(found.group(1))


async def test_counts_follow_what_happened(tmp_path):
    async with served(tmp_path) as at:
        text = await eventful_page(at)
        assert value(text, "reports_total") == 34
        assert value(text, "reports_repeated_total") == 1
        assert value(text, "reports_missing_total") == 4
        assert value(text, 'reports_refused_total{reason="latency_s"}') == 1
        assert value(text, 'call_errors_total{code="FAILED_PRECONDITION",method="ReportStep"}') == 1
        assert (value(text, "workers"), value(text, "contexts"), value(text, "streams")) == (1, 1, 1)
        assert value(text, "store_ok") == 1
        table = next(iter(at.service.estimators.values())).table()
        [choice] = [each for each in table.choices if each.batch_min <= 4 <= each.batch_max]
        bucket = range_label(choice.batch_min, choice.batch_max)
        labels = f'{{batch_bucket="{bucket}",context="t + d on cpu:test, float32"}}'
        assert value(text, f"speculation_length{labels}") == choice.arm.speculation_length
        assert value(text, f"predicted_ms_per_token{labels}") > 0
        assert value(text, "sample_every") == 1
        assert (await page_of(at.controller)).count("\n") == text.count("\n")
