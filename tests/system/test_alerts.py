"""Alerts and dashboards ask for metrics and labels that exist."""

import asyncio
import json
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import httpx
import promql_parser as ast
import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from speclen.controller.service.metrics import ControllerCollector
from speclen.v1 import control_pb2 as pb
from tests.support.control_fakes import group, identity, registration, report, served, status_of
from tests.support.http_worker import MODEL, http_worker

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "prometheus"
RULES = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"][0]["rules"]
DASHBOARDS = {
    name: json.loads((ROOT / f"deploy/grafana/{name}.json").read_text()) for name in ("workers", "controller")
}
ELSEWHERE = {"up"}  # of Prometheus itself
EXPRESSIONS = {rule["alert"]: rule["expr"] for rule in RULES} | {
    f"{name}: {panel['title']}": re.sub(r"\$(model|context)\b", ".*", target["expr"]).replace("$__rate_interval", "1m")
    for name, dashboard in DASHBOARDS.items()
    for panel in dashboard["panels"]
    for target in panel["targets"]
}


Labels = dict[str, set[str]]


def labels_of(page: str) -> Labels:
    """Names of samples, each with the labels that it has, and the one that Prometheus adds."""
    found: Labels = defaultdict(lambda: {"instance"})
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found[sample.name] |= set(sample.labels)
    return found


def scraped_worker() -> Labels:
    with http_worker(max_batch_size=4, check_models=False) as worker:
        worker.client().completions.create(
            model=MODEL, prompt=["The draft proposes", "The target"], max_tokens=40, extra_body={"ignore_eos": True}
        )
        worker.control.step_s = 0.3  # this worker's lengths are fixed, so nothing is reported to its control client
        worker.engine.target.pool.num_looked_up_tokens = 64  # what OpenVINO's pool counts
        return labels_of(httpx.get(f"{worker.url}/metrics").text)


def scraped_controller(tmp_path: Path) -> Labels:
    """With a worker that reports at the length in use and at another one, something implausible, and under an old name."""

    async def story() -> Labels:
        async with served(tmp_path) as at:
            await at.stub.RegisterWorker(registration())
            call = at.stub.StreamReports()
            await call.write(group(1, 30))
            await call.read()
            await at.service.learn_all()
            at.service.refresh()
            table = at.service.estimator.table(at.service.estimator.contexts[0])
            length = table.arm_for(4).speculation_length
            for seq, used in ((31, length), (32, length), (33, (length + 1) % 5)):
                histogram = [4] + [0] * used
                one = report(seq, speculation_length=used, accepted_histogram=histogram)
                await call.write(pb.StreamReportsRequest(reports=[one]))
                await call.read()
                await at.service.learn_all()
            await call.write(pb.StreamReportsRequest(reports=[report(34, latency_s=-1.0)]))
            await call.read()
            await status_of(at.stub.ReportStep(pb.ReportStepRequest(worker=identity(epoch=6), report=report(1))))
            registry = CollectorRegistry()
            registry.register(ControllerCollector(at.controller.servicer, at.controller.journal))
            return labels_of(generate_latest(registry).decode())

    return asyncio.run(asyncio.wait_for(story(), 90.0))


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return scraped_worker() | scraped_controller(tmp_path_factory.mktemp("controller"))


def selectors(node) -> Iterator:
    """Every selector of metrics in a parsed expression."""
    match node:
        case ast.VectorSelector():
            yield node
        case ast.MatrixSelector():
            yield node.vector_selector
        case ast.ParenExpr() | ast.AggregateExpr():
            yield from selectors(node.expr)
        case ast.BinaryExpr():
            yield from selectors(node.lhs)
            yield from selectors(node.rhs)
        case ast.Call():
            for argument in node.args:
                yield from selectors(argument)
        case ast.NumberLiteral():
            return
        case _:
            raise NotImplementedError(type(node))


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_an_expression_asks_for_what_there_is(page, name):
    found = [each for each in selectors(ast.parse(EXPRESSIONS[name])) if each.name not in ELSEWHERE]
    assert found or "up" in EXPRESSIONS[name]
    for selector in found:
        assert selector.name in page, selector.name
        assert {matcher.name for matcher in selector.matchers.matchers} <= page[selector.name], selector.name


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, of Debian's package prometheus")
@pytest.mark.parametrize("arguments", ["check config prometheus.yaml", "test rules alerts_test.yaml"])
def test_prometheus_agrees(arguments):
    done = subprocess.run(["promtool", *arguments.split()], cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
