"""Alerts and dashboards use metrics and labels that exist."""

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
from prometheus_client.parser import text_string_to_metric_families

from tests.support.control_fakes import eventful_page, served
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


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Samples of a worker and of a controller."""

    async def scraped_controller() -> Labels:
        async with served(tmp_path_factory.mktemp("controller")) as at:
            return labels_of(await eventful_page(at))

    with http_worker(max_batch_size=4, check_models=False) as worker:
        worker.client().completions.create(
            model=MODEL, prompt=["The draft proposes", "The target"], max_tokens=40, extra_body={"ignore_eos": True}
        )
        worker.control.step_s = 0.3  # this worker's lengths are fixed, so nothing is reported to its control client
        worker.engine.target.pool.num_looked_up_tokens = 64  # what OpenVINO's pool counts
        return labels_of(httpx.get(f"{worker.url}/metrics").text) | asyncio.run(scraped_controller())


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
def test_expressions_use_existing_metrics_and_labels(page, name):
    found = [each for each in selectors(ast.parse(EXPRESSIONS[name])) if each.name not in ELSEWHERE]
    assert found or "up" in EXPRESSIONS[name]
    for selector in found:
        assert selector.name in page, selector.name
        assert {matcher.name for matcher in selector.matchers.matchers} <= page[selector.name], selector.name


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, of Debian's package prometheus")
@pytest.mark.parametrize("arguments", ["check config prometheus.yaml", "test rules alerts_test.yaml"])
def test_promtool_accepts_the_rules(arguments):
    done = subprocess.run(["promtool", *arguments.split()], cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
