"""Shows a comparison: tables for people, JSON for programs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from speclen.bench.comparison.compare import Comparison, Ratio, best_fixed
from speclen.bench.comparison.stats import Distribution
from speclen.bench.comparison.summary import RunSummary

# heading, figure of one run, format. Seconds unless the heading says otherwise.
Column = tuple[str, Callable[[RunSummary], float | None], str]


def part(distribution: Distribution | None, name: str) -> float | None:
    return None if distribution is None else float(getattr(distribution, name))


# Two tables, so that each fits a terminal of 80 columns.
LATENCY: tuple[Column, ...] = (
    ("mean", lambda s: part(s.latency, "mean"), "{:.3f}"),
    ("p50", lambda s: part(s.latency, "p50"), "{:.3f}"),
    ("p95", lambda s: part(s.latency, "p95"), "{:.3f}"),
    ("p99", lambda s: part(s.latency, "p99"), "{:.3f}"),
    ("first token", lambda s: part(s.ttft, "mean"), "{:.3f}"),
    ("per token", lambda s: part(s.tpot, "mean"), "{:.4f}"),
)
WORK: tuple[Column, ...] = (
    ("goodput, 1/s", lambda s: s.goodput_per_s, "{:.2f}"),
    ("tokens/s", lambda s: s.tokens_per_s, "{:.0f}"),
    ("batch size", lambda s: s.mean_batch_size, "{:.1f}"),
    ("length", lambda s: s.mean_length, "{:.2f}"),
    ("tokens/step", lambda s: s.tokens_per_row_step, "{:.2f}"),
)


def print_comparison(comparison: Comparison, console: Console) -> None:
    track = comparison.track
    counted = len(track.counted(comparison.from_s))
    target = comparison.target_s_per_token
    console.print(
        f"[bold]{track.name}[/bold]: {len(track.arrivals)} requests in {track.duration_s:.0f} s, {counted} of them "
        f"counted; {comparison.repeats} interleaved repeats, of which the means are shown"
    )
    console.print(run_table("request latency, seconds", LATENCY, comparison))
    good = f" (goodput: at most {1e3 * target:.1f} ms per token)" if target else ""
    console.print(run_table(f"work{good}", WORK, comparison))
    print_ratios(comparison, console)
    for note in comparison.notes:
        console.print(f"[yellow]{note}[/yellow]")
    for reason, count in failures(comparison).most_common():
        console.print(f"[red]{count} requests failed: {reason}[/red]")


def failures(comparison: Comparison) -> Counter[str]:
    """Counted requests without a full answer, by policy and reason."""
    found: Counter[str] = Counter()
    for summary in comparison.summaries:
        for reason, count in summary.failures.items():
            found[f"{summary.contender}, {reason}"] += count
    return found


def run_table(title: str, columns: Sequence[Column], comparison: Comparison) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in ("policy", *(column[0] for column in columns), "failed"):
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for contender in comparison.contenders:
        table.add_row(*row(contender, columns, comparison.of(contender)))
    return table


def row(contender: str, columns: Sequence[Column], summaries: Sequence[RunSummary]) -> list[str]:
    cells = [contender]
    for _, figure, form in columns:
        values = [value for summary in summaries if (value := figure(summary)) is not None]
        cells.append(form.format(np.mean(values)) if values else "–")
    failed = sum(summary.num_failed for summary in summaries)
    return [*cells, f"[red]{failed}[/red]" if failed else "0"]


def print_ratios(comparison: Comparison, console: Console) -> None:
    """Every contender against the first one, which is the one that the comparison is about."""
    first = comparison.contenders[0]
    ratios = [ratio for ratio in comparison.ratios if ratio.contender == first]
    if not ratios:
        return
    title = f"mean latency of {first} against the others (below 1: {first} is faster), 95% confidence"
    table = Table(title=title, title_justify="left")
    for heading in ("against", "ratio", "interval", "that is"):
        table.add_column(heading, justify="left" if heading in ("against", "that is") else "right")
    best = best_fixed(comparison)
    for ratio in ratios:
        name = f"{ratio.reference} (best fixed)" if ratio.reference == best else ratio.reference
        table.add_row(name, *ratio_cells(ratio))
    console.print(table)


def ratio_cells(ratio: Ratio) -> tuple[str, str, str]:
    if ratio.interval is None:
        return "–", "–", "nothing finished on both sides"
    value, low, high = ratio.interval.value, ratio.interval.low, ratio.interval.high
    left_out = f"; {ratio.num_left_out} failed requests left out" if ratio.num_left_out else ""
    return f"{value:.3f}", f"{low:.3f} to {high:.3f}", in_words(value, low, high) + left_out


def in_words(value: float, low: float, high: float) -> str:
    if low <= 1.0 <= high:
        return "no difference shown"
    return f"{100 * (1 - value):.1f}% lower" if value < 1 else f"{100 * (value - 1):.1f}% higher"


def to_json(comparison: Comparison, facts: dict[str, Any]) -> dict[str, Any]:
    """Everything but single requests."""
    track = asdict(comparison.track)
    track["num_arrivals"] = len(track.pop("arrivals"))
    return {
        "format": "speclen-serve-1",
        **facts,
        "track": track,
        "contenders": list(comparison.contenders),
        "repeats": comparison.repeats,
        "counted_from_s": comparison.from_s,
        "num_counted": len(comparison.track.counted(comparison.from_s)),
        "target_ms_per_token": None if comparison.target_s_per_token is None else 1e3 * comparison.target_s_per_token,
        "mean_latency_s": {name: comparison.mean_latency_s(name) for name in comparison.contenders},
        "best_fixed": best_fixed(comparison),
        "ratios": [asdict(ratio) for ratio in comparison.ratios],
        "notes": list(comparison.notes),
        "runs": [asdict(summary) for summary in comparison.summaries],
    }


def write_requests(comparison: Comparison, path: Path) -> None:
    """One JSON line per request and run, for whoever wants to compute something else."""
    with path.open("w", encoding="utf-8") as file:
        for run in comparison.runs:
            for outcome in run.outcomes:
                line = {"contender": run.contender, "repeat": run.repeat, **asdict(outcome)}
                file.write(json.dumps(line) + "\n")


def provenance() -> dict[str, Any]:
    """The command, the commit it ran at, and when it is not exactly that commit."""
    return {
        "command": "speclen " + " ".join(sys.argv[1:]),
        "commit": git("rev-parse", "--short=12", "HEAD"),
        "uncommitted_changes": bool(git("status", "--porcelain", "--untracked-files=no")),
    }


def git(*arguments: str) -> str | None:
    """None outside a repository, for example in an installed package."""
    folder = Path(__file__).resolve().parent
    answer = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    return answer.stdout.strip() if answer.returncode == 0 else None
