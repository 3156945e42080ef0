"""Turn the lines that the peers printed into docs/results/peers.json and peers.md. Standard library only."""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]


def read_lines(path: Path) -> Rows:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.startswith("{")]


def best_threads(rows: Rows) -> Rows:
    """Per peer, mode and concurrency: the number of threads with the highest mean throughput, over its rounds."""
    groups: dict[tuple[str, str, int], dict[int, Rows]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        groups[row["peer"], row["mode"], row["concurrency"]][row["threads"]].append(row)
    found = []
    for (peer, mode, concurrency), by_threads in groups.items():
        rounds = max(by_threads.values(), key=lambda rows: statistics.fmean(row["tokens_per_s"] for row in rows))
        rates = [row["tokens_per_s"] for row in rounds]
        found.append(
            {
                "peer": peer,
                "mode": mode,
                "concurrency": concurrency,
                "threads": rounds[0]["threads"],
                "rounds": len(rounds),
                "tokens_per_s": statistics.fmean(rates),
                "tokens_per_s_low": min(rates),
                "tokens_per_s_high": max(rates),
                "latency_mean_s": statistics.fmean(row["latency_mean_s"] for row in rounds),
                "latency_p95_s": statistics.fmean(row["latency_p95_s"] for row in rounds),
            }
        )
    return found


def markdown(rows: Rows, facts: dict[str, Any]) -> str:
    """One line per mode, throughput and mean latency at each concurrency."""
    concurrencies = sorted({row["concurrency"] for row in rows})
    cells = {(row["peer"], row["mode"], row["concurrency"]): row for row in rows}
    modes = list(dict.fromkeys((row["peer"], row["mode"]) for row in rows))
    heading = " | ".join(f"{number} at a time" for number in concurrencies)
    lines = [f"| | {heading} |", "|---|" + "---|" * len(concurrencies)]
    for peer, mode in modes:
        found = [cells.get((peer, mode, number)) for number in concurrencies]
        texts = [
            "–"
            if row is None
            else f"{row['tokens_per_s']:.0f} ({row['tokens_per_s_low']:.0f} to {row['tokens_per_s_high']:.0f}), "
            f"{row['latency_mean_s']:.2f} s"
            for row in found
        ]
        lines.append(f"| {peer}, {mode} | {' | '.join(texts)} |")
    about = ", ".join(f"{key} {value}" for key, value in facts.items())
    return (
        "# Peers on the same machine, weights and requests\n\n"
        "Tokens per second (lowest to highest round) and mean request latency in closed loop; every mode with the "
        "number of threads that is best for it. Prompts of 64 tokens, 64 new tokens each, greedy. The target is a "
        "small model widened without changing its function, so that it costs what 59 million parameters cost.\n\n"
        + "\n".join(lines)
        + f"\n\nMeasured on: {about}. Made by `scripts/peers/run`.\n"
    )


def ratio_to_best(rows: Rows, peer: str) -> dict[int, float]:
    """Throughput of speclen with the learned length over the best mode of a peer, by concurrency."""
    ratios = {}
    for row in rows:
        others = [r["tokens_per_s"] for r in rows if r["peer"] == peer and r["concurrency"] == row["concurrency"]]
        if row["peer"] == "speclen" and row["mode"] == "adaptive" and others:
            ratios[row["concurrency"]] = row["tokens_per_s"] / max(others)
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lines", type=Path)
    parser.add_argument("facts", type=Path, help="JSON object: machine, versions, commit")
    parser.add_argument("out", type=Path, help="folder for peers.json and peers.md")
    options = parser.parse_args()
    rows = best_threads(read_lines(options.lines))
    facts = json.loads(options.facts.read_text("utf-8"))
    peers = sorted({row["peer"] for row in rows} - {"speclen"})
    ratios = {peer: ratio_to_best(rows, peer) for peer in peers}
    options.out.mkdir(parents=True, exist_ok=True)
    content = {"format": "speclen-peers-1", "facts": facts, "rows": rows, "speclen_over_best": ratios}
    (options.out / "peers.json").write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    (options.out / "peers.md").write_text(markdown(rows, facts), "utf-8")
    print(markdown(rows, facts))
    for peer, by_concurrency in ratios.items():
        for number, value in sorted(by_concurrency.items()):
            print(f"speclen over the best mode of {peer} at {number}: {value:.2f}x")


if __name__ == "__main__":
    main()
