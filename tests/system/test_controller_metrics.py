"""The page tells what happened, under the documented names, and reading it changes nothing."""

import asyncio
import re
import threading

from prometheus_client import CollectorRegistry, generate_latest

from speclen.controller.service.metrics import ControllerCollector, bucket_label
from speclen.v1 import control_pb2 as pb
from tests.support.control_fakes import controller_story, group, identity, registration, report, status_of


def page(servicer) -> str:
    registry = CollectorRegistry()
    registry.register(ControllerCollector(servicer, servicer.learner.journal))
    return generate_latest(registry).decode()


def value(text: str, name: str) -> float:
    found = re.search(rf"^speclen_controller_{re.escape(name)} (\S+)$", text, re.MULTILINE)
    assert found, f"{name} is not on the page"
    return float(found.group(1))


@controller_story
async def test_counts_follow_what_happened(at):
    await at.stub.RegisterWorker(registration())
    call = at.stub.StreamReports()
    await call.write(group(1, 30))
    await call.read()
    await call.write(pb.StreamReportsRequest(reports=[report(30), report(35), report(36, latency_s=-1.0), report(37)]))
    await call.read()
    await status_of(at.stub.ReportStep(pb.ReportStepRequest(worker=identity(epoch=6), report=report(1))))
    await at.stub.GetLearnedTable(pb.GetLearnedTableRequest())
    at.service.refresh()
    await call.write(group(40, 49))
    await call.read()
    await at.service.learn_all()
    text = page(at.controller.servicer)
    assert value(text, "reports_total") == 42
    assert value(text, "reports_repeated_total") == 1
    assert value(text, "reports_missing_total") == 6
    assert value(text, 'reports_refused_total{reason="latency_s"}') == 1
    assert value(text, 'call_errors_total{code="FAILED_PRECONDITION",method="ReportStep"}') == 1
    assert (value(text, "workers"), value(text, "contexts"), value(text, "streams")) == (1, 1, 1)
    assert value(text, "store_ok") == 1
    [choice] = [c for c in at.service.estimator.table(key(at)).choices if c.batch_min <= 4 <= c.batch_max]
    bucket = bucket_label(choice.batch_min, choice.batch_max)
    labels = f'{{batch_bucket="{bucket}",context="t + d on cpu:test, float32"}}'
    assert value(text, f"speculation_length{labels}") == choice.arm.speculation_length
    assert value(text, f"predicted_ms_per_token{labels}") > 0
    assert value(text, "sample_every") == 1
    assert page(at.controller.servicer).count("\n") == text.count("\n")


def key(at):
    return next(iter(at.service.registry.contexts))


@controller_story
async def test_numbers_are_read_where_they_change(at):
    """Reading them from the page's thread would meet collections that grow under its hands."""
    running = at.controller
    collector = ControllerCollector(running.servicer, running.journal, asyncio.get_running_loop())
    read, threads = collector.read, []

    def noted():
        threads.append(threading.get_ident())
        return read()

    collector.read = noted
    found = await asyncio.to_thread(lambda: list(collector.collect()))
    assert threads == [threading.get_ident()]
    assert found
