"""Alerts and dashboards ask for metrics and labels that exist; every alert is in the runbook and fires when it should."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import promql_parser as ast
import pytest
import yaml

from tests.support.scraped import scraped_controller, scraped_worker

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "prometheus"
RULES = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"][0]["rules"]
DASHBOARDS = {
    name: json.loads((ROOT / f"deploy/grafana/{name}.json").read_text()) for name in ("workers", "controller")
}
RUNBOOK = (ROOT / "docs" / "guides" / "runbook.md").read_text().partition("## Alerts")[2].partition("\n## ")[0]
ELSEWHERE = {"up"}  # of Prometheus itself
EXPRESSIONS = {rule["alert"]: rule["expr"] for rule in RULES} | {
    f"{name}: {panel['title']}": re.sub(r"\$(model|context)\b", ".*", target["expr"]).replace("$__rate_interval", "1m")
    for name, dashboard in DASHBOARDS.items()
    for panel in dashboard["panels"]
    for target in panel["targets"]
}


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


def test_the_runbook_has_a_line_for_every_alert_and_names_metrics_that_exist(page):
    named = re.findall(r"^\| `(\w+)` \|", RUNBOOK, re.MULTILINE)
    assert sorted(named) == sorted(rule["alert"] for rule in RULES)
    assert set(re.findall(r"`(speclen_\w+)`", RUNBOOK)) <= {name.removesuffix("_bucket") for name in page}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, of Debian's package prometheus")
@pytest.mark.parametrize("arguments", ["check config prometheus.yaml", "test rules alerts_test.yaml"])
def test_prometheus_agrees(arguments):
    done = subprocess.run(["promtool", *arguments.split()], cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tested_to_fire():
    tests = yaml.safe_load((FOLDER / "alerts_test.yaml").read_text())["tests"]
    fired = {one["alertname"] for test in tests for one in test["alert_rule_test"] if one.get("exp_alerts")}
    assert fired == {rule["alert"] for rule in RULES}
