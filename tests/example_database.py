"""The database that the examples of docs/store.md were run on: two buckets, a decision, forty minutes of reports."""

from __future__ import annotations

from pathlib import Path

from store_rows import NOW, cell, context, decision, report, store_now, worker

from speclen.store.database import Store
from speclen.store.records import AcceptanceRow, Commit, LatencyCellRow

# Survival of draft positions 1 to 4 and the step time of batch size b at length s: b=1 gains from length 3, b=8 from 1.
SURVIVAL = (0.75, 0.5625, 0.4219, 0.3164)
STEP_S = {1: (0.0100, 0.0115, 0.0130, 0.0145, 0.0172), 5: (0.0120, 0.0156, 0.0215, 0.0255, 0.0304)}
IN_USE = {1: 3, 5: 1}


def cells() -> list[LatencyCellRow]:
    rows = []
    for batch_min, batch_max in ((1, 1), (5, 8)):
        for length, step_s in enumerate(STEP_S[batch_min]):
            tokens = 1 + sum(SURVIVAL[:length])
            ms, tried = 1000 * step_s / tokens, abs(length - IN_USE[batch_min]) <= 1
            rows.append(
                cell(
                    length,
                    batch_min,
                    batch_max,
                    step_s=step_s,
                    expected_tokens=tokens,
                    ms_per_token_low=0.98 * ms if tried else 0.8 * ms,
                    ms_per_token_high=1.02 * ms if tried else 1.25 * ms,
                    num_steps=1000 if length == IN_USE[batch_min] else 40 if tried else 0,
                    source="both" if tried else "profile",
                    is_best=length == IN_USE[batch_min],
                )
            )
    return rows


def write_example(path: Path) -> Path:
    models = context(device="cpu:laptop", target="large", draft="small", dtype="bfloat16", decision_version=2)
    first = decision(
        1, 2, batch_min=5, batch_max=8, ms_per_token=8.85, reason="first choice: length 2 at 8.85 ms per token"
    )
    second = decision(
        *(2, 1),
        batch_min=5,
        batch_max=8,
        previous_length=2,
        previous_ms_per_token=9.297,
        ms_per_token=8.914,
        reason="length 1 promises 8.914 ms per token, length 2 9.297 (+4.3% goodput); latency rose 60 reports ago",
    )
    acceptance = [AcceptanceRow("large", "small", 0, 0, n + 1, value, 5000.0, NOW) for n, value in enumerate(SURVIVAL)]
    store = Store.open(path)
    learned = Commit(contexts=[models], latency_cells=cells(), acceptance=acceptance, decisions=[first, second])
    assert store_now(store, learned) is None
    # Batch size 8 at length 1 took 10% longer than promised; batch size 1 at length 3 what was promised.
    small = {"batch_size": 1, "speculation_length": 3, "latency_s": 0.0145, "accepted_histogram": "[0,0,1,0]"}
    large = {"batch_size": 8, "speculation_length": 1, "latency_s": 0.01716, "accepted_histogram": "[2,6]"}
    reports = [report(n, **(small | {"num_accepted_tokens": 2 if n % 4 else 1})) for n in range(1, 41)]
    reports += [report(n, **(large | {"num_accepted_tokens": 6})) for n in range(41, 61)]
    workers = [worker(60, worker_id="gpu-7", num_repeated=64, last_seen_at=NOW)]
    assert store_now(store, Commit(workers=workers, reports=reports)) is None
    store.close()
    return path
