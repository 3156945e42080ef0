"""Cost of the store: rows a second, time of a commit, bytes a report, growth under retention, time of a restart.

    python -m speclen.bench.service.store --reports 2000000 --keep 1000000 --after 98000000

writes reports as the controller does (one commit after the other, of --group reports, with the estimates of one
context) into a new file, notes its size on the way, then starts a controller on it and waits until it serves. With
--after, numbers go on from there, as in a file that has seen that many reports and forgotten them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import queue
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from speclen.controller.estimator import Estimator
from speclen.controller.service.registry import Context, Worker
from speclen.controller.service.saving.rows import context_row, estimate_rows, worker_row
from speclen.controller.wire.stored import row_of
from speclen.records import Arm, ContextKey, Limits, StepRecord
from speclen.store.connection import sqlite3
from speclen.store.database import Store, StoreConfig
from speclen.store.records import ArmEstimateRow, Commit, ReportRow, StateRow
from speclen.store.retention import Retention

KEY = ContextKey("bundled:target", "bundled:draft", "cpu:bench", "float32", "0f3a9c")
LIMITS = Limits(32, 8)
EPOCH = 1_790_000_000_123_456_789
REPORTS_PER_S = 40.0  # of one worker: how far apart their times are


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reports", type=int, default=2_000_000, help="reports to write (default 2,000,000)")
    parser.add_argument("--keep", type=int, default=1_000_000, help="reports that retention keeps (default 1,000,000)")
    parser.add_argument("--group", type=int, default=10_000, help="reports per commit (default 10,000)")
    parser.add_argument("--after", type=int, default=0, help="number of the report before the first one (default 0)")
    parser.add_argument("--folder", type=Path, help="where to write the file (default: a temporary folder)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "bench.db"
        written = write(path, options.reports, options.keep, options.group, options.after)
        restarts = [restart_s(path) for _ in range(5)]
        result = {
            **written,
            "restart_s": [round(value, 3) for value in restarts],
            "sqlite": sqlite3.sqlite_version,
            "cores": os.cpu_count(),
            "load_average": round(os.getloadavg()[0], 2),
            "system": platform.platform(),
            "python": platform.python_version(),
        }
    print(json.dumps(result, indent=2))


def write(path: Path, num_reports: int, keep: int, group: int, after: int) -> dict[str, Any]:
    """Write, one commit at a time; what it took and how large the file was at ten points on the way."""
    store = Store.open(path, StoreConfig(retention=Retention(max_report_rows=keep)))
    rows = make_rows(group)
    estimates = estimates_of_one_context()
    commit_s, sizes = [], []
    if after:
        go_on_from(store, after, commit_of(rows[:1], 1, estimates))
    cpu = time.process_time()
    for first in range(0, num_reports, group):
        shift = time.time() - num_reports / REPORTS_PER_S / 64 + first / REPORTS_PER_S / 64
        seqs = range(after + first + 1, after + first + group + 1)
        reports = [
            row._replace(group_id=1 + seq // 64, seq=seq, received_at=shift)
            for row, seq in zip(rows, seqs, strict=True)
        ]
        commit_s.append(store_now(store, commit_of(reports, seqs[-1], estimates)))
        if (first // group) % max(1, num_reports // group // 10) == 0:
            sizes.append({"reports": first + group, "bytes": path.stat().st_size})
        print(f"\r{first + group:,} of {num_reports:,}", end="", file=sys.stderr)
    print(file=sys.stderr)
    cpu = time.process_time() - cpu
    store.close()
    num_bytes = path.stat().st_size
    ordered = sorted(commit_s)
    return {
        "num_reports": num_reports,
        "kept": min(keep, num_reports),
        "reports_per_s_of_writing": round(num_reports / sum(commit_s)),
        "cpu_us_per_report": round(1e6 * cpu / num_reports, 2),
        "commit_ms_median": round(1e3 * statistics.median(ordered), 2),
        "commit_ms_p99": round(1e3 * ordered[int(0.99 * (len(ordered) - 1))], 2),
        "bytes_at_end": num_bytes,
        "bytes_per_kept_report": round(num_bytes / min(keep, num_reports), 1),
        "growth": sizes,
    }


def go_on_from(store: Store, after: int, commit: Commit) -> None:
    """Leave one report, with the number `after`, from which the store counts on."""
    store_now(store, commit)
    connection = sqlite3.connect(store.path)
    with connection:
        connection.execute("UPDATE step_reports SET report_id = ?", (after,))
    connection.close()


def make_rows(count: int) -> list[ReportRow]:
    """Plausible steps of batch sizes 1 to 32 and lengths 0 to 8."""
    dice = random.Random(1)
    rows = []
    for n in range(count):
        batch_size, length = 1 << dice.randrange(6), dice.randrange(9)
        accepted = sorted(dice.choices(range(length + 1), k=batch_size))
        histogram = tuple(accepted.count(j) for j in range(length + 1))
        step = StepRecord(
            *(1, batch_size, Arm(length), dice.lognormvariate(-4, 0.3), histogram, dice.uniform(50, 900), 17),
            num_drafted_sequences=batch_size if length else 0,
            num_verified_tokens=batch_size * (length + 1),
        )
        rows.append(ReportRow._make(row_of(step, 1, 1, 1 + n % 64, EPOCH, time.time())))
    return rows


def estimates_of_one_context() -> tuple[list[ArmEstimateRow], list[StateRow]]:
    """Learned table and state as the controller writes them with every commit."""
    estimator = Estimator()
    estimator.add_context(KEY, LIMITS)
    steps = [
        StepRecord(n, 4, Arm(2), 0.02 + 0.0001 * (n % 7), (1, 2, 1), 100.0, 0, frozenset(), 0, (), 4, 12)
        for n in range(1, 201)
    ]
    estimator.observe(KEY, steps, "w")
    now = time.time()
    return estimate_rows(estimator, Context(1, KEY, LIMITS, now), now), [
        StateRow(*KEY.pair, estimator.save(KEY.pair), now)
    ]


def commit_of(
    reports: list[ReportRow], applied_seq: int, estimates: tuple[list[ArmEstimateRow], list[StateRow]]
) -> Commit:
    now = time.time()
    context = Context(1, KEY, LIMITS, now)
    workers = [
        Worker(key, f"worker-{key}", EPOCH, context, now, now, LIMITS, "127.0.0.1:7080", "adaptive")
        for key in range(1, 65)
    ]
    for worker in workers:
        worker.num_reports = worker.seqs.applied_seq = applied_seq
    return Commit(
        contexts=[context_row(context, 1, now)],
        workers=[worker_row(worker) for worker in workers],
        reports=reports,
        arm_estimates=estimates[0],
        replaced_contexts=[1],
        states=estimates[1],
    )


def store_now(store: Store, commit: Commit) -> float:
    """Seconds from submission to the disk's answer."""
    answers: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
    started = time.perf_counter()
    store.submit(commit, answers.put)
    error = answers.get()
    if error is not None:
        raise error
    return time.perf_counter() - started


def restart_s(path: Path) -> float:
    """Seconds from starting the process to the line that says it serves; the controller is then killed."""
    command = [sys.executable, "-m", "speclen.cli.app", "controller", "--listen", "127.0.0.1:0", "--db", str(path)]
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        took = time.perf_counter() - started
        process.kill()
        said = process.communicate()[1]
    if "serving" not in line:
        raise SystemExit(f"the controller did not start on {path}: {said}")
    return took


if __name__ == "__main__":
    main()
