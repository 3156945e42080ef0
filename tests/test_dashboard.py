"""Every expression of the Grafana dashboard gives values, evaluated on real scrapes of a worker that is in use."""

import json
import math
import time
from pathlib import Path

import httpx
import pytest
from http_worker import MODEL, http_worker
from promql import Scrapes, quantile, read

DASHBOARD = json.loads((Path(__file__).parent.parent / "deploy" / "grafana" / "workers.json").read_text())
PANELS = DASHBOARD["panels"]
TARGETS = [(panel["title"], target["expr"], target["legendFormat"]) for panel in PANELS for target in panel["targets"]]


@pytest.fixture(scope="module")
def scrapes():
    with http_worker(max_batch_size=4, check_models=False) as worker:

        def scrape():
            return read(httpx.get(f"{worker.url}/metrics").text, worker.http)

        started, before = time.monotonic(), scrape()
        worker.client().completions.create(
            model=MODEL, prompt=["The draft proposes", "The target"], max_tokens=40, extra_body={"ignore_eos": True}
        )
        # What the control client counts; this worker's lengths are fixed, so nothing is reported to it.
        worker.control.accepted_runs[:] = [4, 3, 2]
        return Scrapes(before, scrape(), time.monotonic() - started)


@pytest.mark.parametrize(("title", "expression", "legend"), TARGETS)
def test_expression(scrapes, title, expression, legend):
    plain = expression.replace("$__rate_interval", "1m").replace("$model", ".*")
    found = scrapes.evaluate(plain)
    assert found, title
    assert all(math.isfinite(value) and value >= 0 for value in found.values()), (title, found)
    for labels in found:
        for name in legend.split("{{")[1:]:
            assert name.partition("}}")[0] in dict(labels), f"{title}: the legend names a label that is gone"


def test_values_are_right(scrapes):
    rate = scrapes.evaluate('sum(rate(speclen_generation_tokens_total{model_name=~".*"}[1m]))')
    assert rate[frozenset()] * scrapes.seconds == pytest.approx(80)
    means = scrapes.evaluate(
        'sum(rate(speclen_request_prompt_tokens_sum{model_name=~".*"}[1m]))'
        ' / sum(rate(speclen_request_prompt_tokens_count{model_name=~".*"}[1m]))'
    )
    assert 2 <= means[frozenset()] <= 20
    buckets = {frozenset({("le", "1.0")}): 5.0, frozenset({("le", "3.0")}): 10.0, frozenset({("le", "+Inf")}): 10.0}
    assert quantile(0.75, buckets) == pytest.approx(2.0)


@pytest.mark.parametrize("expression", ["speclen_no_such_metric", 'speclen_decode_steps_total{nothing=~".*"}'])
def test_what_is_not_there_is_found_out(scrapes, expression):
    with pytest.raises(AssertionError, match="there is no"):
        scrapes.evaluate(expression)


def test_the_dashboard_can_be_pointed_at_any_source_and_model():
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["model"]["query"]["query"] == "label_values(speclen_num_requests_running, model_name)"
    sources = {target["datasource"]["uid"] for panel in PANELS for target in panel["targets"]}
    assert sources == {"${datasource}"}
    assert all('model_name=~"$model"' in expression for _, expression, _ in TARGETS)
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
