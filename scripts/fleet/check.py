"""The stages of scripts/fleet_check: a fleet on simulated Ray nodes, under load, and three deaths.

Two different workers share one address: a worker, the controller and a node are killed, and load rises and falls. Exits
with 1 if a check fails.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from load import Clients, statuses
from nodes import Up, add_node, node_of, seconds_until
from ray.cluster_utils import Cluster

from speclen.v1 import generation_pb2 as pb

FOLDER = Path("build/fleet").absolute()  # for the database and logs
WORKERS, MAX_WORKERS, ROWS = 2, 3, 8
CLIENTS, HTTP_CLIENTS = 4, 1
CROWD = 24  # clients that are more than two workers should have
TYPED = (
    "OK",
    "UNAVAILABLE",
    "INTERNAL",
    "CANCELLED",
    "RESOURCE_EXHAUSTED",
    "DEADLINE_EXCEEDED",
    "HTTP 5",
    "BROKEN_OFF",
)
LEARN_S, SETTLE_S = 60.0, 15.0  # seconds of load: before the first kill; before and after each kill
WORKER_AIM_S, CONTROLLER_AIM_S = 30.0, 15.0
RECOVERY_S, SCALING_S = 90.0, 180.0
TABLES = "SELECT count(DISTINCT context_id) FROM arm_estimates WHERE num_steps > 0"
REPORTS = "SELECT count(*) FROM step_reports"


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background jobs with SIGINT ignored
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    report, began = Report(), time.monotonic()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    nodes = [add_node(cluster, backend) for backend in ("openvino", "torch")]
    up = Up(cluster.address, FOLDER)
    try:
        command = up.start(WORKERS, MAX_WORKERS, ROWS)
        report.say("", f"`{command}` served after {time.monotonic() - began:.0f} s.")
        nodes.append(add_node(cluster, "torch"))  # only now, so that both workers did not start on nodes of one kind
        clients = Clients(up, CLIENTS, HTTP_CLIENTS)
        Check(report, up, cluster, nodes, clients).run()
        ended = up.stop() == 0 and seconds_until(up.look, 0.1) is None
        report.check(ended, "Ctrl-C ends everything: nothing answers any more")
    finally:
        if up.process.poll() is None:
            up.stop()
        ray.shutdown()
        cluster.shutdown()
    sys.exit(1 if report.failures else 0)


@dataclass
class Report:
    """Every line is printed as it comes; failures are kept."""

    failures: list[str] = field(default_factory=list)

    def say(self, *lines: str) -> None:
        print(*lines, sep="\n", flush=True)

    def check(self, true: bool, what: str) -> None:
        self.say(f"- {'passed' if true else '**FAILED**'}: {what}")
        if not true:
            self.failures.append(what)


@dataclass
class Check:
    """A fleet with clients, and the faults that are injected."""

    report: Report
    up: Up
    cluster: Cluster
    nodes: list[Any]
    clients: Clients

    def run(self) -> None:
        time.sleep(LEARN_S)
        self.report.check(self.up.count(TABLES) == 2, "both kinds of worker have a table of their own")
        self.kill_worker()
        self.kill_controller()
        self.kill_node()
        self.nodes.append(add_node(self.cluster, "torch"))
        self.crowd()
        self.clients.stop()
        for over in ("gRPC", "HTTP"):
            mine = [each for each in self.clients.requests if each.over == over]
            good = all(each.status.startswith(TYPED) for each in mine) and any(each.status == "OK" for each in mine)
            self.report.check(
                good, f"{over}: of {len(mine)} requests all ended with OK or a typed error: {statuses(mine)}"
            )

    def kill_worker(self) -> None:
        self.report.say("", "## A worker is killed (SIGKILL)", "")
        victim = self.two_workers()[0]
        kill = lambda: os.kill(victim.server.process_id, signal.SIGKILL)  # noqa: E731
        self.died(kill, lambda: self.replaced(victim), WORKER_AIM_S, "a new worker serves")

    def kill_controller(self) -> None:
        self.report.say("", "## The controller is killed (SIGKILL)", "")
        known = next(each for each in self.two_workers() if each.controller.process_id)
        victim, num_reports = known.controller.process_id, self.up.count(REPORTS)

        def recovered() -> bool:
            now = self.up.workers(2).values()
            return any(one.controller.process_id not in (0, victim) and one.table_source == "controller" for one in now)

        kill = lambda: os.kill(victim, signal.SIGKILL)  # noqa: E731
        self.died(kill, recovered, CONTROLLER_AIM_S, "workers report to a new one")
        kept = self.up.count(REPORTS) >= num_reports
        self.report.check(kept, f"no report that was on disk is lost ({num_reports} before)")

    def kill_node(self) -> None:
        """A node is removed without notice: its worker is placed on the free node."""
        self.report.say("", "## A node is lost, with its worker", "")
        victim = self.two_workers()[0]
        node = node_of(victim.server.process_id, self.nodes)
        kill = lambda: self.cluster.remove_node(node, allow_graceful=False)  # noqa: E731
        self.died(kill, lambda: self.replaced(victim), WORKER_AIM_S, "a new worker serves on another node")

    def crowd(self) -> None:
        """Load rises and falls: a worker is added and removed, and no request is lost."""
        self.report.say("", "## A crowd comes and goes", "")
        began, crowded = time.monotonic(), Clients(self.up, CROWD)
        workers: dict[str, pb.GetServerInfoResponse] = {}

        def has_grown() -> bool:
            workers.update(self.up.workers(MAX_WORKERS, 30))
            return len(workers) >= MAX_WORKERS

        grown_s = seconds_until(has_grown, SCALING_S)
        time.sleep(SETTLE_S)
        crowded.stop()
        processes = [Path(f"/proc/{each.server.process_id}") for each in workers.values()]
        shrunk_s = seconds_until(lambda: not all(each.exists() for each in processes), SCALING_S)
        time.sleep(SETTLE_S)
        end = time.monotonic()
        ended = [each for one in (self.clients, crowded) for each in one.between(began, end) if each.ended]
        failed = [each for each in ended if each.status != "OK"]
        self.report.check(grown_s is not None, f"a third worker serves {told(grown_s)} after {CROWD} more clients came")
        self.report.check(shrunk_s is not None, f"it is gone {told(shrunk_s)} after they left")
        self.report.check(not failed, f"no request was lost by it: {statuses(ended)}")

    def two_workers(self) -> list[pb.GetServerInfoResponse]:
        """The two active workers. Raises RuntimeError if there are not two in time."""
        found: list[pb.GetServerInfoResponse] = []

        def look() -> bool:
            found[:] = self.up.workers(2, 30).values()
            return len(found) == 2 and any(each.controller.process_id for each in found)

        if seconds_until(look, RECOVERY_S) is None:
            raise RuntimeError("the fleet did not come to the state that this stage begins with")
        return found

    def replaced(self, victim: pb.GetServerInfoResponse) -> bool:
        now = self.up.workers(2).values()
        return len(now) == 2 and victim.server.process_id not in [each.server.process_id for each in now]

    def died(self, kill: Callable[[], None], recovered: Callable[[], bool], aim_s: float, what: str) -> None:
        """Kill something under load; report failed requests and the time until recovery."""
        time.sleep(SETTLE_S)
        at = time.monotonic()
        kill()
        back_s = seconds_until(recovered, RECOVERY_S)
        time.sleep(SETTLE_S)
        during = self.clients.between(at, time.monotonic())
        failed = [each for each in during if each.status != "OK"]
        begun = [each for each in during if each.began < at]
        lost = sum(each.status != "OK" for each in begun)
        self.report.say(f"In flight at that moment: {len(begun)} requests, of which {lost} failed.")
        for each in failed[:3]:
            words = each.words.partition("\n")[0]
            self.report.say(f"- `{each.status}` after {each.num_tokens} tokens: {words[:160]}")
        self.report.check(back_s is not None and back_s <= aim_s, f"{what} after {told(back_s)} (aim {aim_s:g})")
        served = "requests that had not begun to stream were served, by Ray's routing or by the client's one retry"
        self.report.check(all(each.num_tokens for each in failed), served)


def told(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds:.1f} s"


if __name__ == "__main__":
    main()
