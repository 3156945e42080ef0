"""Every alert has its line in the runbook, asks for metrics that there are, and fires when it should."""

import re
import shutil
import subprocess
from pathlib import Path

import promql_parser
import pytest
import yaml

from tests.support.promql import selectors
from tests.support.scraped import scraped_controller, scraped_worker

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "prometheus"
RULES = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"][0]["rules"]
RUNBOOK = (ROOT / "docs" / "guides" / "runbook.md").read_text().partition("## Alerts")[2].partition("\n## ")[0]
ELSEWHERE = {"up"}  # of Prometheus itself


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    controller = scraped_controller(tmp_path_factory.mktemp("controller"))
    return scraped_worker().after | controller.after


def test_the_runbook_has_a_line_for_every_alert_and_no_other():
    named = re.findall(r"^\| `(\w+)` \|", RUNBOOK, re.MULTILINE)
    assert named == [*dict.fromkeys(named)]
    assert set(named) == {rule["alert"] for rule in RULES}


@pytest.mark.parametrize("rule", RULES, ids=[rule["alert"] for rule in RULES])
def test_an_alert_asks_for_what_there_is(page, rule):
    for selector in selectors(promql_parser.parse(rule["expr"])):
        if selector.name in ELSEWHERE:
            continue
        assert selector.name in page, selector.name
        for matcher in selector.matchers.matchers:
            assert all(matcher.name in dict(labels) for labels in page[selector.name]), matcher.name
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert rule["annotations"]["summary"].endswith(".")


def test_the_runbook_names_metrics_that_exist(page):
    named = set(re.findall(r"`(speclen_\w+)`", RUNBOOK))
    assert len(named) > 10
    families = {name.removesuffix("_bucket") for name in page}
    assert not named - families


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, of Debian's package prometheus")
@pytest.mark.parametrize("arguments", ["check config prometheus.yaml", "test rules alerts_test.yaml"])
def test_prometheus_agrees(arguments):
    done = subprocess.run(["promtool", *arguments.split()], cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tested_to_fire():
    tests = yaml.safe_load((FOLDER / "alerts_test.yaml").read_text())["tests"]
    fired = {one["alertname"] for test in tests for one in test["alert_rule_test"] if one.get("exp_alerts")}
    assert fired == {rule["alert"] for rule in RULES}
