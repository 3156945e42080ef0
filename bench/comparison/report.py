"""Shows a comparison as tables for people."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from speclen.bench.comparison.rounds import Comparison, Ratio
from speclen.bench.serving.block import BlockFigures

# heading, figure of one block, format. Seconds unless the heading says otherwise.
Column = tuple[str, Callable[[BlockFigures], float | None], str]


def per(above: float, below: float) -> float | None:
    return above / below if below else None


# Two tables, so that each fits a terminal of 80 columns.
LATENCY: tuple[Column, ...] = (
    ("mean", lambda b: b.mean_latency_s, "{:.3f}"),
    ("p50", lambda b: b.latency_p50_s, "{:.3f}"),
    ("p95", lambda b: b.latency_p95_s, "{:.3f}"),
    ("p99", lambda b: b.latency_p99_s, "{:.3f}"),
    ("first token", lambda b: b.ttft_mean_s, "{:.3f}"),
)
WORK: tuple[Column, ...] = (
    ("tokens/s", lambda b: per(b.num_tokens, b.seconds), "{:.0f}"),
    ("batch size", lambda b: per(b.num_row_steps, b.num_steps), "{:.1f}"),
    ("proposed", lambda b: per(b.num_proposed, b.num_row_steps), "{:.2f}"),
    ("accepted", lambda b: per(b.num_accepted, b.num_row_steps), "{:.2f}"),
)


def print_comparison(document: dict[str, Any], comparison: Comparison, console: Console) -> None:
    console.print(
        f"[bold]{document['track']}[/bold] ({document['summary']}): {document['num_rounds']} rounds of blocks of "
        f"{document['block_s']:g} s, every policy served the same requests; means over blocks"
    )
    if sizes := document.get("at_once"):
        print_by_size(dict(zip(sizes, comparison.parts, strict=True)), console)
    else:
        console.print(figure_table("request latency, seconds", LATENCY, comparison))
        console.print(figure_table("work; proposed and accepted are tokens per row and step", WORK, comparison))
        print_ratios(comparison, console)
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
    return [*document["notes"], told]


def figure_table(title: str, columns: Sequence[Column], comparison: Comparison) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in ("policy", *(column[0] for column in columns), "blocks", "failed"):
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for name in comparison.policies:
        blocks = [one.blocks[name] for one in comparison.rounds if name in one.blocks]
        cells = [name]
        for _, figure, form in columns:
            values = [value for block in blocks if (value := figure(block)) is not None]
            cells.append(form.format(np.mean(values)) if values else "–")
        failed = sum(block.num_failed for block in blocks)
        table.add_row(*cells, str(len(blocks)), f"[red]{failed}[/red]" if failed else "0")
    return table


def print_ratios(comparison: Comparison, console: Console) -> None:
    """The first policy, which is the one that the comparison is about, against every other one."""
    first, *others = comparison.policies
    if not others:
        return
    title = f"mean latency of {first} against the others (below 1: {first} is faster), 95% confidence over blocks"
    table = Table(title=title, title_justify="left")
    for heading in ("against", "ratio", "interval", "that is"):
        table.add_column(heading, justify="left" if heading in ("against", "that is") else "right")
    best = comparison.best_fixed()
    for name in others:
        cells = ratio_cells(comparison.ratio(first, name))
        table.add_row(f"{name} (best fixed)" if name == best else name, *cells)
    console.print(table)


def print_by_size(parts: dict[int, Comparison], console: Console) -> None:
    """parts: by requests at a time."""
    sizes = sorted(parts)
    first, *others = parts[sizes[0]].policies
    console.print("by requests at a time:")
    rate, ratio = Table(title="tokens/s", title_justify="left"), Table(title_justify="left")
    ratio.title = f"latency over that of {first} (above 1: {first} is faster)"
    for table in (rate, ratio):
        for heading in ("policy", *map(str, sizes)):
            table.add_column(heading, justify="left" if heading == "policy" else "right")
    for name in (first, *others):
        blocks = [[one.blocks[name] for one in parts[size].rounds if name in one.blocks] for size in sizes]
        sums = [(sum(b.num_tokens for b in mine), sum(b.seconds for b in mine)) for mine in blocks]
        rate.add_row(name, *(f"{tokens / seconds:.0f}" if seconds else "–" for tokens, seconds in sums))
    for name in others:
        intervals = [parts[size].ratio(name, first).interval for size in sizes]
        ratio.add_row(name, *("–" if i is None else f"{i.value:.3f} ±{100 * i.half_width:.1f}%" for i in intervals))
    console.print(rate)
    console.print(ratio)


def ratio_cells(ratio: Ratio) -> tuple[str, str, str]:
    if ratio.interval is None:
        return "–", "–", "fewer than two blocks on both sides"
    value, low, high = ratio.interval.value, ratio.interval.low, ratio.interval.high
    return f"{value:.3f}", f"{low:.3f} to {high:.3f}", in_words(value, low, high)


def in_words(value: float, low: float, high: float) -> str:
    if low <= 1.0 <= high:
        return "no difference shown"
    return f"{100 * (1 - value):.1f}% lower" if value < 1 else f"{100 * (value - 1):.1f}% higher"
