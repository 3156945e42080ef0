"""Print a comparison as tables, and write it as JSON with every block."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from speclen.bench.serving.load import BlockFigures
from speclen.bench.serving.rounds import Comparison, Ratio
from speclen.cli.support.output import write_whole

# Heading, figure of one block, format. Latencies in seconds, accepted tokens by step and sequence.
COLUMNS = (
    ("mean", lambda b: b.mean_latency_s, "{:.3f}"),
    ("p95", lambda b: b.latency_p95_s, "{:.3f}"),
    ("first token", lambda b: b.ttft_mean_s or math.nan, "{:.3f}"),
    ("tokens/s", lambda b: b.tokens_per_s, "{:.0f}"),
    ("accepted", lambda b: b.num_accepted / max(1, b.num_row_steps), "{:.2f}"),
)


def to_document(comparison: Comparison, facts: dict[str, Any], so_far: bool = False) -> dict[str, Any]:
    """The comparison as JSON, without single requests. facts: settings that the figures depend on.

    so_far: True while the run continues, or if it was killed.
    """
    first, *others = comparison.policies
    return {
        **facts,
        "policies": list(comparison.policies),
        "num_rounds": len(comparison.rounds),
        "speed": "tokens per second" if comparison.closed else "inverse of the mean latency",
        "best_fixed": comparison.best_fixed(),
        "ratios": [asdict(comparison.ratio(first, name)) for name in others],
        **({"tokens_per_s": rates_by_size(comparison)} if len(facts["at_once"]) > 1 else {}),
        "notes": [*(["not finished: outputs are not checked yet"] if so_far else []), *comparison.notes()],
        "errors": comparison.errors(),
        "rounds": [asdict(one) for one in comparison.rounds],
    }


def rates_by_size(comparison: Comparison) -> dict[str, dict[str, float]]:
    """Tokens per second by policy and concurrency: concurrency times tokens over summed latency (Little's law)."""
    found: dict[str, dict[str, float]] = {}
    for name in comparison.policies:
        blocks = comparison.whole(name)
        found[name] = {
            str(size): rate_at(size, blocks) for size in sorted({size for one in blocks for size in one.by_size})
        }
    return found


def rate_at(size: int, blocks: Sequence[BlockFigures]) -> float:
    sums = [block.by_size[size] for block in blocks if size in block.by_size]
    return size * sum(tokens for tokens, _ in sums) / sum(latency_s for _, latency_s in sums)


def write_document(document: dict[str, Any], path: Path) -> None:
    """Write JSON with one line per round. Raises UserError naming the file."""
    rounds = ",\n  ".join(json.dumps(row, separators=(",", ":")) for row in document["rounds"])
    head = json.dumps({key: value for key, value in document.items() if key != "rounds"}, indent=1)[:-2]
    write_whole(path, f'{head},\n "rounds": [\n  {rounds}\n ]\n}}')


def print_comparison(document: dict[str, Any], comparison: Comparison, console: Console) -> None:
    console.print(
        f"[bold]{document['track']}[/bold] ({document['summary']}): {document['num_rounds']} rounds of blocks of "
        f"{document['block_s']:g} s, every policy served the same requests; 95% confidence over blocks"
    )
    print_policies(comparison, console)
    if "tokens_per_s" in document:
        print_by_size(document["tokens_per_s"], console)
    for line in remarks(document):
        console.print(f"[yellow]{line}[/yellow]")
    for reason, count in document["errors"].items():
        console.print(f"[red]{count} requests failed: {reason}[/red]")


def remarks(document: dict[str, Any]) -> list[str]:
    if (one := document["outputs"]) is None:
        return document["notes"]
    told = f"outputs: {one['num_same']} of {one['num_compared']} equal the first policy's in every token"
    if one["num_same"] < one["num_compared"]:
        told += f"; of the others {one['num_examined']} were examined, all are ties "
        told += f"(at most {one['worst_miss_logits']:.2g} logits)"
    best = [f"best fixed length: {document['best_fixed']}"] if document["best_fixed"] else []
    return [*best, *document["notes"], told]


def table_of(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("policy")
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def print_policies(comparison: Comparison, console: Console) -> None:
    """Print means over blocks, and the speed of the first policy relative to each."""
    first = comparison.policies[0]
    headings = [name for name, _, _ in COLUMNS]
    table = table_of("means over blocks; request latency in seconds", *headings, f"{first} relative to it")
    for name in comparison.policies:
        blocks = comparison.whole(name)
        means = [
            float(np.mean([figure(block) for block in blocks])) if blocks else math.nan for _, figure, _ in COLUMNS
        ]
        cells = (
            "–" if math.isnan(mean) else form.format(mean) for mean, (*_, form) in zip(means, COLUMNS, strict=True)
        )
        table.add_row(name, *cells, "1" if name == first else in_words(comparison.ratio(first, name)))
    console.print(table)


def print_by_size(rates: dict[str, dict[str, float]], console: Console) -> None:
    """Print tokens per second by policy and concurrency."""
    sizes = sorted({int(size) for row in rates.values() for size in row})
    table = table_of("tokens/s by requests at a time", *map(str, sizes))
    for name, row in rates.items():
        table.add_row(name, *(f"{row[str(size)]:.0f}" if str(size) in row else "–" for size in sizes))
    console.print(table)


def in_words(ratio: Ratio) -> str:
    """The ratio with half the width of its interval; a dash for fewer than two blocks without failures."""
    interval = ratio.interval
    return "–" if interval is None else f"{interval.value:.3f} ±{100 * interval.half_width:.1f}%"
