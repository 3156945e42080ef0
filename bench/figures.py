"""Figures with their spread, from repeats that were run interleaved; and tables of tokens per second.

As a program: python -m speclen.bench.figures RESULT.json... prints tokens per second by policy and number of requests, and
python -m speclen.bench.figures RESULT.json... --plot PICTURE.svg draws them over time.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Spread:
    """Median of some repeats, with minimum and maximum."""

    median: float
    low: float
    high: float
    repeats: int

    def __str__(self) -> str:
        interval = f" ({figure(self.low)} to {figure(self.high)})" if self.repeats > 1 else ""
        return f"{figure(self.median)}{interval}"


def figure(value: float) -> str:
    """A number with three significant digits, or with all digits before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def spread(values: Sequence[float]) -> Spread:
    """Median and range of the values. Raises ValueError if there are none."""
    if not values:
        raise ValueError("no repeats to summarise")
    return Spread(statistics.median(values), min(values), max(values), len(values))


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Spread of the repeats' ratios. A slowdown during one repeat changes its numerator and denominator alike."""
    return spread([a / b for a, b in zip(numerators, denominators, strict=True)])


LEARNED = ("adaptive", "seeded", "profile")  # policies with a table by batch size
Rates = Mapping[str, Mapping[str, float]]  # by policy and number of concurrent requests


def as_table(name: str, rates: Rates) -> str:
    """Tokens per second by number of requests; in brackets relative to the best without a table."""
    sizes = sorted({int(size) for row in rates.values() for size in row})
    width = max(map(len, (*rates, name))) + 12
    lines = [f"{name}, tokens/s".ljust(width) + "".join(f"{size} at once".rjust(16) for size in sizes)]
    for policy, row in rates.items():
        line = f"  {policy}".ljust(width)
        for size in map(str, sizes):
            best = max((one.get(size, 0.0) for other, one in rates.items() if other not in LEARNED), default=0.0)
            known = size in row and best
            line += (f"{row[size]:,.0f} ({row[size] / best:.2f})" if known else "–").rjust(16)
        lines.append(line)
    return "\n".join(lines)


def best_constant(rounds: Sequence[Mapping[str, Any]]) -> str:
    """The policy without a table that generated most tokens per second. Raises ValueError if there is none."""
    names = [name for name in rounds[0]["blocks"] if name not in (*LEARNED, "none")]
    rates = {name: total_rate([one["blocks"][name] for one in rounds if name in one["blocks"]]) for name in names}
    return max(rates, key=lambda name: rates[name])


def total_rate(blocks: Sequence[Mapping[str, Any]]) -> float:
    return float(sum(block["num_tokens"] for block in blocks) / sum(block["seconds"] for block in blocks))


def plot_over_time(document: Mapping[str, Any], out: Path) -> None:
    """Draw tokens per second over the seconds of a block, means over rounds: adaptive, the best constant, none."""
    from matplotlib.figure import Figure

    rounds = document["rounds"]
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    constant = best_constant(rounds)
    for name, colour in (("adaptive", "tab:blue"), (constant, "tab:orange"), ("none", "tab:gray")):
        blocks = [one["blocks"][name] for one in rounds if name in one["blocks"]]
        end = max(len(block["tokens_by_s"]) for block in blocks)
        seconds = [
            statistics.fmean(block["tokens_by_s"][at] if at < len(block["tokens_by_s"]) else 0 for block in blocks)
            for at in range(end)
        ]
        label = f"{name}: {total_rate(blocks):,.0f} tokens/s"
        axes.step(range(end), seconds, where="post", color=colour, label=label)
    axes.set_title(f"{document['track']}: {document['summary']}", fontsize=9)
    axes.set(xlabel="seconds", ylabel="tokens/s", xlim=(0, None), ylim=(0, None))
    axes.legend(fontsize=8)
    figure.savefig(out, dpi=130)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="+", help="results of speclen bench serve")
    parser.add_argument("--plot", type=Path, help="picture of the first result's tokens per second over time")
    options = parser.parse_args()
    documents = {path.stem: json.loads(path.read_text()) for path in options.results if path.exists()}
    for name, document in documents.items():
        if "tokens_per_s" in document:
            print(as_table(name, document["tokens_per_s"]))
    if options.plot is not None:
        plot_over_time(documents[options.results[0].stem], options.plot)
