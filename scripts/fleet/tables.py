"""Words and tables of the report that scripts/fleet_check writes."""

from __future__ import annotations

from datetime import datetime

import ray
from load import Request, gap_ms, statuses
from looking import SCALING_S, first_tables

from speclen.bench.findings import Report

CLIENTS, HTTP_CLIENTS = 4, 1
OF_DEATHS = ("before", "until recovered", "after")


def begin(report: Report) -> None:
    """The page's heading."""
    report.heading(
        "A fleet on Ray, and three deaths",
        "scripts/fleet_check",
        f"Ray {ray.__version__}, four simulated nodes on one machine: a head without workers, one for a worker on "
        "OpenVINO, one for a worker on torch, a spare one; bundled:target with bundled:draft, one thread a worker. "
        f"{CLIENTS} clients stream one request after the other through Ray Serve's gRPC address, and {HTTP_CLIENTS} "
        "with OpenAI's client through its HTTP address, greedy. Milliseconds a token are those of gRPC.",
    )


def told(seconds: float | None) -> str:
    return f"not within {SCALING_S:g} s" if seconds is None else f"{seconds:.0f} s"


def tell_what_was_seen(
    report: Report, requests: list[Request], spans: list[tuple[float, float]], names: tuple[str, ...] = OF_DEATHS
) -> None:
    report.table(
        ["", *names],
        [
            ["requests that ended", *(statuses(ended(requests, *span)) for span in spans)],
            ["ms a token, p50", *(f"{gap_ms(requests, *span, 0.5):.1f}" for span in spans)],
            ["ms a token, p99", *(f"{gap_ms(requests, *span):.1f}" for span in spans)],
        ],
        apart=True,
    )


def ended(requests: list[Request], first: float, last: float) -> list[Request]:
    return [each for each in requests if first <= each.ended < last]


def starts(report: Report, loaded_at: datetime, learned_s: float) -> None:
    """From the workers' own logs: seconds from the start of loading models to the first table of the controller."""
    report.say("", "## From start to the first well-chosen length, cold and warm", "")
    rows, warm = [], []
    for at, worker, after_s in sorted(first_tables()):
        is_warm = at > loaded_at
        what = "the fleet's" if is_warm else f"a guess: under load the lengths were found within {learned_s:.1f} s more"
        rows.append([f"{at:%H:%M:%S}", worker, f"{after_s:.1f} s", what])
        warm += [after_s] if is_warm else []
    report.table(["at", "worker", "first table, since the models began to load", "which was"], rows, apart=True)
    report.check(
        bool(warm) and max(warm) < learned_s,
        f"a new worker has well-chosen lengths {max(warm, default=0.0):.1f} s after its start at most, before its first "
        f"request; the first ones needed {learned_s:.1f} s of load",
    )
