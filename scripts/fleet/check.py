"""The stages of scripts/fleet_check: a fleet on simulated Ray nodes, under load, and three deaths."""

from __future__ import annotations

import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import typer
from load import Clients, statuses
from looking import RECOVERY_S, count, distinct, left_over, num_tables, quietly, took, wait_for
from nodes import Up, add_node, end_process, make_nodes, node_of

from speclen.bench.findings import Report
from speclen.v1 import generation_pb2 as pb

WORKERS, MAX_WORKERS, ROWS = 2, 3, 8
CLIENTS, HTTP_CLIENTS = 4, 1
CROWD = 24  # clients that are more than two workers should have
TYPED = ("UNAVAILABLE", "INTERNAL", "CANCELLED", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "HTTP 5", "BROKEN_OFF")
WORKER_AIM_S, CONTROLLER_AIM_S = 30.0, 15.0


def main(
    folder: Path = typer.Option(Path("build/fleet"), help="Where database and logs go."),
    learn_s: float = typer.Option(60.0, help="Seconds of load before the first death."),
    settle_s: float = typer.Option(15.0, help="Seconds of load before and after each death."),
) -> None:
    """Two unlike workers behind one address: a worker, the controller and a node die, a crowd comes and goes. Exits 1 where
    a check fails.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background is born ignoring it
    folder = folder.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    report = Report()
    cluster, nodes = make_nodes()
    up: Up | None = None
    try:
        began = time.monotonic()
        up = Up.start(cluster.address, folder, WORKERS, MAX_WORKERS, ROWS)
        asked = f"speclen up --ray ADDRESS --workers {WORKERS} --max-workers {MAX_WORKERS} --max-batch-size {ROWS}"
        report.say("", f"`{asked}` served after {time.monotonic() - began:.0f} s.")
        # Only now, so that each kind of node has got a worker.
        nodes.append(add_node(cluster, "torch"))
        run(report, up, cluster, nodes, learn_s, settle_s)
        report.check(up.stop() == 0 and not left_over(up), "Ctrl-C ends everything: nothing answers any more")
        up = None
    finally:
        if up is not None:
            up.stop()
        ray.shutdown()
        cluster.shutdown()
    sys.exit(1 if report.failures else 0)


def run(report: Report, up: Up, cluster: Any, nodes: list[Any], learn_s: float, settle_s: float) -> None:
    assert up.client is not None
    clients = Clients(up.client, up.address, CLIENTS, up.http, up.token, HTTP_CLIENTS)
    clients.start()
    try:
        time.sleep(learn_s)
        report.check(num_tables(up.database) == 2, "both kinds of worker have a table of their own")
        kill_worker(report, up, clients, settle_s)
        kill_controller(report, up, clients, settle_s)
        kill_node(report, up, clients, cluster, nodes, settle_s)
        nodes.append(add_node(cluster, "torch"))
        crowd(report, up, clients, settle_s)
    finally:
        clients.stop()
    for over in ("gRPC", "HTTP"):
        mine = [each for each in clients.requests if each.over == over]
        typed = all(each.status == "OK" or each.status.startswith(TYPED) for each in mine)
        done = any(each.status == "OK" for each in mine)
        report.check(
            typed and done, f"{over}: of {len(mine)} requests all ended with OK or a typed error: {statuses(mine)}"
        )


def kill_worker(report: Report, up: Up, clients: Clients, settle_s: float) -> None:
    workers = wait_for(lambda: distinct(up, 2))
    victim = next(iter(workers.values())).server.process_id
    report.say("", "## A worker is killed (SIGKILL)", "")

    def recovered() -> bool:
        now = distinct(up, 2, looks=4)
        return len(now) == 2 and all(each.server.process_id != victim for each in now.values())

    died(report, clients, lambda: end_process(victim), recovered, settle_s, WORKER_AIM_S, "a new worker serves")


def kill_controller(report: Report, up: Up, clients: Clients, settle_s: float) -> None:
    known = wait_for(lambda: [one for one in distinct(up, 2).values() if one.controller.process_id])
    victim = known[0].controller.process_id
    num_reports = count(up.database, "step_reports")
    report.say("", "## The controller is killed (SIGKILL)", "")

    def recovered() -> bool:
        now = distinct(up, 2, looks=4).values()
        return any(each.controller.process_id not in (0, victim) and each.table_source == "controller" for each in now)

    died(
        report,
        clients,
        lambda: end_process(victim),
        recovered,
        settle_s,
        CONTROLLER_AIM_S,
        "workers report to a new one",
    )
    report.check(
        count(up.database, "step_reports") >= num_reports, f"no report that was on disk is lost ({num_reports} before)"
    )


def kill_node(report: Report, up: Up, clients: Clients, cluster: Any, nodes: list[Any], settle_s: float) -> None:
    """A node goes, as if its plug were pulled: its worker is placed on the node that is free."""
    before = wait_for(lambda: two_of(distinct(up, 2)))
    victim = next(iter(before.values()))
    node = node_of(victim.server.process_id, nodes)
    report.say("", "## A node is lost, with its worker", "")

    def recovered() -> bool:
        now = distinct(up, 2, looks=4)
        return len(now) == 2 and victim.worker.worker_id not in now

    def kill() -> None:
        cluster.remove_node(node, allow_graceful=False)

    died(report, clients, kill, recovered, settle_s, WORKER_AIM_S, "a new worker serves on another node")


def crowd(report: Report, up: Up, clients: Clients, settle_s: float) -> None:
    """Many more clients come, and go again: a worker is added, and taken away, and nobody loses a request by it."""
    assert up.client is not None
    report.say("", "## A crowd comes and goes", "")
    crowded = Clients(up.client, up.address, CROWD)
    began = time.monotonic()
    crowded.start()
    workers: dict[str, pb.GetServerInfoResponse] = {}

    def has_grown() -> bool:
        workers.update(distinct(up, MAX_WORKERS))
        return len(workers) >= MAX_WORKERS

    grown = took(has_grown)
    processes = [Path(f"/proc/{each.server.process_id}") for each in workers.values()]
    time.sleep(settle_s)
    crowded.stop()
    shrunk = took(lambda: not all(each.exists() for each in processes))
    time.sleep(settle_s)
    end = time.monotonic()
    requests = clients.requests + crowded.requests
    report.check(grown is not None, f"a third worker serves {told(grown)} after {CROWD} more clients came")
    report.check(shrunk is not None, f"it is gone {told(shrunk)} after they left")
    failed = [each for each in requests if began <= (each.ended or end) < end and each.status != "OK"]
    report.check(not failed, f"no request was lost by it: {statuses(failed)}")


def told(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds:.0f} s"


def two_of(found: dict[str, pb.GetServerInfoResponse]) -> dict[str, pb.GetServerInfoResponse] | None:
    return found if len(found) == 2 else None


def died(
    report: Report,
    clients: Clients,
    kill: Callable[[], None],
    recovered: Callable[[], bool],
    settle_s: float,
    aim_s: float,
    what: str,
) -> None:
    """Load, a death, load: what clients saw, and when it was as before."""
    time.sleep(settle_s)
    at = time.monotonic()
    kill()
    while not quietly(recovered) and time.monotonic() - at < RECOVERY_S:
        time.sleep(0.2)
    back = time.monotonic()
    time.sleep(settle_s)
    end = time.monotonic()
    during = clients.between(at, end)
    failed = [each for each in during if each.status != "OK"]
    begun = [each for each in during if each.began < at]
    lost = [each for each in begun if each.status != "OK"]
    report.say(f"In flight at that moment: {len(begun)} requests, of which {len(lost)} failed.")
    for each in failed[:3]:
        report.say(f"- `{each.status}` after {each.num_tokens} tokens: {str(each.words)[:160]}")
    report.check(back - at <= aim_s, f"{what} after {back - at:.1f} s (aim {aim_s:g})")
    report.check(
        all(each.had_begun_to_stream or each.status == "OK" for each in failed),
        "whoever had not begun to stream was served: by Ray's routing, or by the client's one retry",
    )


if __name__ == "__main__":
    typer.run(main)
