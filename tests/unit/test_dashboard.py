"""Every expression of the Grafana dashboards gives values, evaluated on real scrapes of programs that are in use."""

import json
import math
from pathlib import Path

import pytest
import yaml

from tests.support.promql import quantile
from tests.support.scraped import scraped_controller, scraped_worker

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARDS = {name: json.loads((DEPLOY / "grafana" / f"{name}.json").read_text()) for name in ("workers", "controller")}
VARIABLES = {"workers": "model", "controller": "context"}
TARGETS = [
    (name, panel["title"], target["expr"], target["legendFormat"])
    for name, dashboard in DASHBOARDS.items()
    for panel in dashboard["panels"]
    for target in panel["targets"]
]
SIGNED = ("Prediction error", "Regret, estimated")


@pytest.fixture(scope="module")
def scrapes(tmp_path_factory):
    return {"workers": scraped_worker(), "controller": scraped_controller(tmp_path_factory.mktemp("controller"))}


@pytest.mark.parametrize(("name", "title", "expression", "legend"), TARGETS)
def test_expression(scrapes, name, title, expression, legend):
    plain = expression.replace("$__rate_interval", "1m").replace(f"${VARIABLES[name]}", ".*")
    found = scrapes[name].evaluate(plain)
    assert found, title
    assert all(math.isfinite(value) for value in found.values()), (title, found)
    assert title in SIGNED or min(found.values()) >= 0, (title, found)
    for labels in found:
        for label in legend.split("{{")[1:]:
            assert label.partition("}}")[0] in dict(labels), f"{title}: the legend names a label that is gone"


def test_values_are_right(scrapes):
    worker = scrapes["workers"]
    rate = worker.evaluate('sum(rate(speclen_generation_tokens_total{model_name=~".*"}[1m]))')
    assert rate[frozenset()] * worker.seconds == pytest.approx(80)
    means = worker.evaluate(
        'sum(rate(speclen_request_prompt_tokens_sum{model_name=~".*"}[1m]))'
        ' / sum(rate(speclen_request_prompt_tokens_count{model_name=~".*"}[1m]))'
    )
    assert 2 <= means[frozenset()] <= 20
    buckets = {frozenset({("le", "1.0")}): 5.0, frozenset({("le", "3.0")}): 10.0, frozenset({("le", "+Inf")}): 10.0}
    assert quantile(0.75, buckets) == pytest.approx(2.0)
    (seconds,) = scrapes["controller"].evaluate("speclen_controller_observed_step_seconds_total").values()
    assert seconds == pytest.approx(0.04), "two steps at the length in use, 20 ms each"


@pytest.mark.parametrize("expression", ["speclen_no_such_metric", 'speclen_decode_steps_total{nothing=~".*"}'])
def test_what_is_not_there_is_found_out(scrapes, expression):
    with pytest.raises(AssertionError, match="there is no"):
        scrapes["workers"].evaluate(expression)


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_dashboard_can_be_pointed_at_any_source_and_model(name):
    dashboard, variable = DASHBOARDS[name], VARIABLES[name]
    variables = {one["name"]: one for one in dashboard["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    metric = {"workers": "num_requests_running", "controller": "controller_speculation_length"}[name]
    label = {"workers": "model_name", "controller": "context"}[name]
    assert variables[variable]["query"]["query"] == f"label_values(speclen_{metric}, {label})"
    sources = {target["datasource"]["uid"] for panel in dashboard["panels"] for target in panel["targets"]}
    assert sources == {"${datasource}"}
    assert name != "workers" or all('model_name=~"$model"' in expr for one, _, expr, _ in TARGETS if one == name)
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_fill_the_grid_without_overlap(name):
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARDS[name]["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_what_the_compose_file_mounts_is_there():
    """Grafana finds the dashboards under the path that its provisioning names, and Prometheus its rules."""
    compose = yaml.safe_load((DEPLOY / "docker" / "observe.yaml").read_text())
    mounts = {}
    for service in compose["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        for source, target, *_ in (volume.split(":") for volume in service["volumes"]):
            mounts[target] = source
            assert source in compose["volumes"] or (DEPLOY / "docker" / source).is_dir(), source
    provider = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/speclen.yaml").read_text())["providers"][0]
    folder = DEPLOY / "docker" / mounts[provider["options"]["path"]]
    assert {path.stem for path in folder.glob("*.json")} == {*DASHBOARDS}
    home = compose["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/workers.json"
    source = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
    config = DEPLOY / "docker" / mounts["/etc/prometheus"] / "prometheus.yaml"
    scraping = yaml.safe_load(config.read_text())
    assert all((config.parent / rules).is_file() for rules in scraping["rule_files"])
    ports = {"controller": "9070", "worker": "9080"}
    services = yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())["services"]
    assert all(port in services[name]["expose"] for name, port in ports.items())
    assert scraping["scrape_configs"][0]["static_configs"][0]["targets"] == ["controller:9070"]
    assert scraping["scrape_configs"][1]["dns_sd_configs"][0]["port"] == 9080
