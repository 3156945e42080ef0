"""Print a comparison as tables, and write it as JSON with every block."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from speclen.bench.serving.rounds import Comparison, Ratio
from speclen.cli.support.output import write_whole

# Heading, figure of one block, format. Latencies in seconds, accepted tokens by step and sequence.
COLUMNS = (
    ("mean", lambda b: b.mean_latency_s, "{:.3f}"),
    ("p95", lambda b: b.latency_p95_s, "{:.3f}"),
    ("first token", lambda b: b.ttft_mean_s, "{:.3f}"),
    ("tokens/s", lambda b: b.num_tokens / b.seconds, "{:.0f}"),
    ("accepted", lambda b: b.num_accepted / max(1, b.num_row_steps), "{:.2f}"),
)


def to_document(comparison: Comparison, facts: dict[str, Any]) -> dict[str, Any]:
    """The comparison as JSON, without single requests. facts: settings that the figures depend on."""
    first, *others = comparison.policies
    return {
        **facts,
        "policies": list(comparison.policies),
        "num_rounds": len(comparison.rounds),
        "mean_latency_s": {name: comparison.mean_latency_s(name) for name in comparison.policies},
        "best_fixed": comparison.best_fixed(),
        "ratios": [asdict(comparison.ratio(first, name)) for name in others],
        **({"tokens_per_s": rates_by_size(comparison, sizes)} if (sizes := facts.get("at_once")) else {}),
        "notes": comparison.notes(),
        "errors": comparison.errors(),
        "rounds": [asdict(one) for one in comparison.rounds],
    }


def rates_by_size(comparison: Comparison, sizes: Sequence[int]) -> dict[str, dict[str, float]]:
    """Tokens per second by policy and concurrency: concurrency times tokens over summed latency (Little's law).

    Dividing by the block's duration would include its end, when fewer requests run.
    """
    found: dict[str, dict[str, float]] = {name: {} for name in comparison.policies}
    for size, part in sorted(zip(sizes, comparison.parts, strict=True)):
        for name, rates in found.items():
            blocks = [one.blocks[name] for one in part.rounds]
            if latency_s := sum(block.latency_sum_s for block in blocks):
                rates[str(size)] = size * sum(block.num_tokens for block in blocks) / latency_s
    return found


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
    if sizes := document.get("at_once"):
        print_by_size(document["tokens_per_s"], dict(zip(sizes, comparison.parts, strict=True)), console)
    else:
        print_latencies(comparison, console)
    for line in remarks(document):
        console.print(f"[yellow]{line}[/yellow]")
    for reason, count in document["errors"].items():
        console.print(f"[red]{count} requests failed: {reason}[/red]")


def remarks(document: dict[str, Any]) -> list[str]:
    one = document["outputs"]
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


def print_latencies(comparison: Comparison, console: Console) -> None:
    """Print means over blocks, and the ratio of latencies to the first policy."""
    first = comparison.policies[0]
    headings = [name for name, _, _ in COLUMNS]
    table = table_of("request latency in seconds, means over blocks", *headings, f"over {first}")
    for name in comparison.policies:
        blocks = [one.blocks[name] for one in comparison.rounds]
        cells = (form.format(np.mean([figure(block) for block in blocks])) for _, figure, form in COLUMNS)
        table.add_row(name, *cells, "1" if name == first else in_words(comparison.ratio(name, first)))
    console.print(table)


def print_by_size(rates: dict[str, dict[str, float]], parts: dict[int, Comparison], console: Console) -> None:
    """Print rates by policy and ratios to the first policy, by concurrency."""
    sizes, (first, *others) = sorted(parts), rates
    console.print("by requests at a time:")
    rate = table_of("tokens/s", *map(str, sizes))
    ratio = table_of(f"latency over that of {first} (above 1: {first} is faster)", *map(str, sizes))
    for name, row in rates.items():
        rate.add_row(name, *(f"{row[str(size)]:.0f}" if str(size) in row else "–" for size in sizes))
    for name in others:
        ratio.add_row(name, *(in_words(parts[size].ratio(name, first)) for size in sizes))
    console.print(rate)
    console.print(ratio)


def in_words(ratio: Ratio) -> str:
    """The ratio with half the width of its interval; a dash for fewer than two blocks without failures."""
    interval = ratio.interval
    return "–" if interval is None else f"{interval.value:.3f} ±{100 * interval.half_width:.1f}%"
