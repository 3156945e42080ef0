"""The page tells what happened, under the documented names, and reading it changes nothing."""

import asyncio
import re
import threading
import urllib.request
from pathlib import Path

from control_fakes import group, identity, registration, report, run, served, status_of
from prometheus_client import CollectorRegistry, generate_latest

from speclen.controller.config import ControllerConfig
from speclen.controller.estimator.core import Bucket, Choice, StepObservation, Table
from speclen.controller.estimator.prediction import PredictionError
from speclen.controller.service.metrics import ControllerCollector, serve_metrics
from speclen.transport.settings import settings_of
from speclen.v1 import control_pb2 as pb

BUCKET = Bucket(3, 4, 4)
DOCUMENT = Path(__file__).parent.parent / "docs" / "controller.md"


def test_every_setting_is_on_the_page_and_no_other():
    told = re.findall(r"^\| `--([\w-]+)[^|]*\|", DOCUMENT.read_text(), re.MULTILINE)
    both = re.findall(r"^\| `--[\w-]+`, `--([\w-]+)` \|", DOCUMENT.read_text(), re.MULTILINE)
    assert {name.replace("-", "_") for name in told + both} == set(settings_of(ControllerConfig))


def page(servicer) -> str:
    registry = CollectorRegistry()
    registry.register(ControllerCollector(servicer, servicer.service.journal))
    return generate_latest(registry).decode()


def value(text: str, name: str) -> float:
    found = re.search(rf"^speclen_controller_{re.escape(name)} (\S+)$", text, re.MULTILINE)
    assert found, f"{name} is not on the page"
    return float(found.group(1))


def test_counts_follow_what_happened(tmp_path):
    async def story():
        async with served(tmp_path) as at:
            await at.stub.RegisterWorker(registration())
            call = at.stub.StreamReports()
            await call.write(group(1, 30))
            await call.read()
            await call.write(
                pb.StreamReportsRequest(reports=[report(30), report(35), report(36, latency_s=-1.0), report(37)])
            )
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
            labels = '{batch_bucket="4",context="t + d on cpu:test, float32"}'
            length = value(text, f"speculation_length{labels}")
            assert length == next(
                c.speculation_length for c in at.service.estimator.table(key(at)).choices if c.bucket == BUCKET
            )
            assert value(text, f"predicted_ms_per_token{labels}") > 0
            compared = value(text, f"compared_steps_total{labels}") if length == 2 else 0
            assert value(text, 'other_length_seconds_total{context="t + d on cpu:test, float32"}') + compared > 0
            assert page(at.controller.servicer).count("\n") == text.count("\n")

    run(story)


def key(at):
    return next(iter(at.service.registry.contexts))


def test_the_page_is_served_over_http():
    async def story():
        async with served(None) as at:
            config = ControllerConfig(in_memory=True, metrics_listen="127.0.0.1:0")
            running = at.controller
            collector = ControllerCollector(running.servicer, running.journal, asyncio.get_running_loop())
            served_page = serve_metrics(collector, config)
            assert "speclen_controller_reports_total 0.0" in await asyncio.to_thread(fetched, served_page.address)
            served_page.server.shutdown()
            served_page.server.server_close()

    run(story)


def test_numbers_are_read_where_they_change():
    """Reading them from the page's thread would meet collections that grow under its hands."""

    async def story():
        async with served(None) as at:
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

    run(story)


def fetched(address: str) -> str:
    with urllib.request.urlopen(address, timeout=5) as answer:
        return answer.read().decode()


def test_every_metric_is_documented():
    async def story():
        async with served(None) as at:
            found = re.findall(r"^# HELP (speclen_controller_\w+)", page(at.controller.servicer), re.MULTILINE)
            names = {name.removesuffix("_total") for name in found}
            documented = set(re.findall(r"`(speclen_controller_\w+)", DOCUMENT.read_text()))
            assert names <= documented, names - documented

    run(story)


def test_the_prediction_error_is_observed_over_predicted():
    error = PredictionError()
    table = Table(1, (Choice(Bucket(0, 1, 2), 3, 5.0), Choice(BUCKET, 2, 10.0)))
    # 4 rows, 4 accepted tokens: 2 tokens a row and step, so 20 ms were predicted, and 22 observed.
    error.add(table, [StepObservation(4, 2, 0.022, (1, 2, 1))])
    error.add(table, [StepObservation(4, 1, 9.0, (4, 0))])  # not the chosen length
    error.add(table, [StepObservation(4, 2, 9.0, (1, 2, 1), teaches_latency=False)])
    (bucket, ratio), *others = error.by_bucket().items()
    assert (bucket, others) == (BUCKET, [])
    assert abs(ratio - 0.1) < 1e-12
    sums = error.compared[BUCKET]
    assert (sums.num_steps, sums.observed_s, sums.predicted_s) == (1, 0.022, 0.020)


def test_the_prediction_error_is_of_single_steps_without_what_prompts_take():
    """Story: where outputs were short, promises were a fifth longer than any step, and the alert never ended."""
    error = PredictionError()
    error.add(Table(1, (Choice(BUCKET, 2, 14.0, None, 10.0),)), [StepObservation(4, 2, 0.022, (1, 2, 1))])
    assert abs(error.by_bucket()[BUCKET] - 0.1) < 1e-12


def test_the_prediction_error_says_nothing_where_nothing_was_predicted():
    error = PredictionError()
    error.add(Table(1, (Choice(BUCKET, 2, None),)), [StepObservation(4, 2, 0.022, (1, 2, 1))])
    assert (error.by_bucket(), error.elsewhere_s) == ({}, 0.0)


def test_regret_is_what_the_length_in_use_would_have_saved():
    error = PredictionError()
    table = Table(1, (Choice(Bucket(0, 1, 2), 3, 5.0), Choice(BUCKET, 2, 10.0)))
    probes = [
        StepObservation(4, 1, 0.016, (4, 0)),  # one token a row: 10 ms were promised at length 2
        StepObservation(2, 0, 0.004, (2,)),  # 5 ms were promised at length 3: a lucky one
        StepObservation(9, 0, 0.030, (9,)),  # beyond the last bucket, which holds for it: 10 ms
        StepObservation(4, 1, 9.0, (4, 0), teaches_latency=False),
        StepObservation(4, 2, 0.5, (1, 2, 1)),  # the length in use is never regretted
    ]
    error.add(table, probes)
    assert abs(error.elsewhere_s - 0.050) < 1e-12
    assert abs(error.regret_s - (0.006 - 0.001 + 0.020)) < 1e-12
