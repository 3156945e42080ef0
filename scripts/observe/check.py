"""Prometheus on real programs: what `scripts/observe_check` runs. Prints a table; fails where a panel or a rule does."""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml
from drawing import draw

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
PHASES = (1, 4, 16, 8, 2, 16)  # requests at a time
# Series that there are only once something has gone wrong.
FAULTS = ("reports_refused_total", "call_errors_total")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=180.0, help="of load")
    parser.add_argument("--pictures", type=Path, help="folder to draw the dashboards into")
    parser.add_argument("--prometheus", default="prometheus", help="the program")
    options = parser.parse_args()
    if shutil.which(options.prometheus) is None:
        sys.exit("observe_check: there is no prometheus: apt-get install prometheus, or --prometheus /path/to/it")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        server = start(stack, Path(folder), options.prometheus)
        begun = time.time()
        num_answers = load(server["http"], options.seconds)
        results = [(name, *evaluated(server["prometheus"], name, begun)) for name in ("workers", "controller")]
        failures = report(results) + rules(server["prometheus"])
        if options.pictures is not None:
            for name, dashboard, answers in results:
                draw(options.pictures / f"dashboard-{name}.png", dashboard, answers)
    print(f"{num_answers} requests answered in {options.seconds:g} s; {len(failures)} failures")
    for failure in failures:
        print(f"FAILED  {failure}")
    sys.exit(bool(failures))


def start(stack: ExitStack, folder: Path, prometheus: str) -> dict[str, str]:
    """Addresses of the worker's HTTP front and of Prometheus; everything ends with the stack."""
    names = ("control", "pages", "generate", "http", "worker_pages", "prometheus")
    at = dict(zip(names, free_addresses(len(names)), strict=True))
    speclen = [sys.executable, "-m", "speclen.cli.app"]
    controller = ["--listen", at["control"], "--metrics-listen", at["pages"], "--db", str(folder / "speclen.db")]
    stack.enter_context(running([*speclen, "controller", *controller], folder / "controller.log"))
    wait_for(at["pages"], "/metrics")
    worker = ["--listen", at["generate"], "--http-listen", at["http"], "--metrics-listen", at["worker_pages"]]
    more = ["--controller", at["control"], "--max-batch-size", "16"]
    stack.enter_context(running([*speclen, "worker", *worker, *more], folder / "worker.log"))
    config = folder / "prometheus.yaml"
    config.write_text(yaml.safe_dump(configuration(at["pages"], at["worker_pages"])))
    options = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    arguments = [*options, f"--web.listen-address={at['prometheus']}"]
    stack.enter_context(running([prometheus, *arguments], folder / "prometheus.log"))
    wait_for(at["prometheus"], "/-/ready")
    wait_for(at["http"], "/health")
    return at


def configuration(controller: str, worker: str) -> dict[str, Any]:
    """The one that is shipped, with other addresses, and quicker."""
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(DEPLOY / "prometheus" / name) for name in config["rule_files"]]
    for job, address in zip(config["scrape_configs"], (controller, worker), strict=True):
        job.pop("dns_sd_configs", None)
        job["static_configs"] = [{"targets": [address]}]
    return config


@contextmanager
def running(command: list[str], log: Path) -> Iterator[None]:
    with log.open("w") as output, subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output) as process:
        try:
            yield
        except BaseException:
            print(log.read_text()[-2000:], file=sys.stderr)
            raise
        finally:
            process.terminate()
            process.wait(60)


def free_addresses(number: int) -> list[str]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]


def wait_for(address: str, path: str) -> None:
    deadline = time.monotonic() + 120
    while True:
        try:
            with urllib.request.urlopen(f"http://{address}{path}", timeout=5):
                return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def load(address: str, seconds: float) -> int:
    """Requests at changing concurrency, a few of them wrong; returns how many were answered."""
    num_answers = 0
    for num_callers in PHASES:
        until = time.monotonic() + seconds / len(PHASES)
        with ThreadPoolExecutor(num_callers) as pool:
            callers = [pool.submit(call_until, address, number, until) for number in range(num_callers)]
            num_answers += sum(caller.result() for caller in callers)
    return num_answers


def call_until(address: str, number: int, until: float) -> int:
    num_answers = 0
    while time.monotonic() < until:
        prompt = ("import asyncio\n", "def quicksort(items):\n", "class Stack:\n")[(number + num_answers) % 3]
        body = {"prompt": prompt, "max_tokens": 96, "temperature": 0.7 if number % 2 else 0, "seed": num_answers}
        if number == 0 and num_answers % 20 == 19:
            complete(address, {**body, "temperature": -1})
        num_answers += complete(address, body)
    return num_answers


def complete(address: str, body: dict[str, Any]) -> bool:
    """True if the request was answered, which a wrong one is not."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://{address}/v1/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return bool(json.load(answer)["choices"])
    except urllib.error.HTTPError as error:
        if error.code != 400:
            raise
        return False


def evaluated(address: str, name: str, begun: float) -> tuple[dict[str, Any], Callable[[str], list[dict[str, Any]]]]:
    """A dashboard, and what Prometheus says of an expression of it, from the beginning of the load on."""
    dashboard = json.loads((DEPLOY / "grafana" / f"{name}.json").read_text())
    ended, known = time.time(), {}

    def answers(expression: str) -> list[dict[str, Any]]:
        if expression not in known:
            plain = expression.replace("$__rate_interval", "15s").replace("$model", ".*").replace("$context", ".*")
            query = {"query": plain.replace("[5m]", "[30s]"), "start": begun, "end": ended, "step": 2}
            known[expression] = ask(address, "query_range", query)["result"]
        return known[expression]

    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            answers(target["expr"])
    return dashboard, answers


def ask(address: str, path: str, query: dict[str, Any]) -> Any:
    """Raises urllib.error.HTTPError for what Prometheus does not understand."""
    with urllib.request.urlopen(
        f"http://{address}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=30
    ) as answer:
        return json.load(answer)["data"]


def report(results: list[tuple[str, dict[str, Any], Callable[[str], list[dict[str, Any]]]]]) -> list[str]:
    """Print series and last value of every expression; returns what has none."""
    failures = []
    for name, dashboard, answers in results:
        for panel in dashboard["panels"]:
            for target in panel["targets"]:
                series = answers(target["expr"])
                last = f"{float(series[0]['values'][-1][1]):.4g}" if series else "-"
                print(f"{name:<11} {panel['title']:<32} {target['legendFormat'][:26]:<26} {len(series):>3} {last:>10}")
                if not series and not any(fault in target["expr"] for fault in FAULTS):
                    failures.append(f"{name}: {panel['title']}: {target['expr']} has no series")
    return failures


def rules(address: str) -> list[str]:
    """Faults of the alert rules: an error in one, or one that fires although all is well."""
    failures = []
    for group in ask(address, "rules", {})["groups"]:
        for rule in group["rules"]:
            print(f"rule        {rule['name']:<32} {rule['state']:<26} {rule['health']}")
            if rule["health"] != "ok" or rule["state"] == "firing":
                failures.append(f"{rule['name']}: {rule['state']}, {rule['health']} {rule.get('lastError', '')}")
    return failures


if __name__ == "__main__":
    main()
