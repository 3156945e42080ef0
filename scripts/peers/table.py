"""Turn the lines that the peers printed into docs/results/peers.json and peers.md. Standard library only."""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]

ANYONE = "any of them"
# Modes that do not speculate.
PLAIN = ("none", "no draft", "generate, static batches", "continuous batching")


def read_lines(path: Path) -> Rows:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.startswith("{")]


def best_threads(rows: Rows) -> Rows:
    """Per peer, mode and concurrency: the number of threads with the highest mean throughput, over its rounds.

    Numbers of threads that were left out of later rounds do not count.
    """
    groups: dict[tuple[str, str, int], dict[int, Rows]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        groups[row["peer"], row["mode"], row["concurrency"]][row["threads"]].append(row)
    found = []
    for (peer, mode, concurrency), by_threads in groups.items():
        num_rounds = max(len(rows) for rows in by_threads.values())
        complete = [rows for rows in by_threads.values() if len(rows) == num_rounds]
        rounds = max(complete, key=lambda rows: statistics.fmean(row["tokens_per_s"] for row in rows))
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
                "tokens_per_s_by_round": rates,
                "round_numbers": [row["round"] for row in rounds],
                "latency_mean_s": statistics.fmean(row["latency_mean_s"] for row in rounds),
                "latency_p95_s": statistics.fmean(row["latency_p95_s"] for row in rounds),
            }
        )
    return found


def markdown(rows: Rows, ratios: Rows, facts: dict[str, Any]) -> str:
    """One line per mode, throughput and mean latency at each concurrency; then one per peer, the ratios to its best."""
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
            else f"{row['tokens_per_s']:.0f}{spread(row['tokens_per_s_low'], row['tokens_per_s_high'], 0)}, "
            f"{row['latency_mean_s']:.2f} s"
            for row in found
        ]
        lines.append(f"| {peer}, {mode} | {' | '.join(texts)} |")
    for what in dict.fromkeys(ratio["what"] for ratio in ratios):
        lines += ["", f"| {what} | {heading} |", "|---|" + "---|" * len(concurrencies)]
        lines += ratio_lines([ratio for ratio in ratios if ratio["what"] == what], concurrencies)
    about = ", ".join(f"{key} {value}" for key, value in facts.items())
    return (
        "# Peers on the same machine, weights and requests\n\n"
        "Tokens per second (lowest to highest round, where there were several) and mean request latency in closed loop; "
        "every mode with the number of threads that is best for it. Prompts of 64 tokens, 64 new tokens each, greedy. "
        "The target is a small model widened without changing its function, so that it costs what 59 million parameters "
        "cost.\n\n" + "\n".join(lines) + f"\n\nMeasured on: {about}. Made by `scripts/peers/run`.\n"
    )


def ratio_lines(ratios: Rows, concurrencies: list[int]) -> list[str]:
    """A line of a table for every peer."""
    lines = []
    for peer in dict.fromkeys(ratio["peer"] for ratio in ratios):
        found = {ratio["concurrency"]: ratio for ratio in ratios if ratio["peer"] == peer}
        texts = [
            "–"
            if (one := found.get(number)) is None
            else f"{one['ratio']:.2f}{spread(one['ratio_low'], one['ratio_high'], 2)}, {one['best_mode']}"
            for number in concurrencies
        ]
        lines.append(f"| {peer} | {' | '.join(texts)} |")
    return lines


def spread(low: float, high: float, digits: int) -> str:
    """From the lowest round to the highest, in brackets; nothing where there was only one."""
    return "" if low == high else f" ({low:.{digits}f} to {high:.{digits}f})"


def over_best(rows: Rows) -> Rows:
    """Throughput of speclen over the best mode of every peer and of all peers, by concurrency.

    With the learned length over all modes, without speculation over those without. ratio: of the means over rounds.
    ratio_low, ratio_high: of the rounds that both took part in.
    """
    peers = [*sorted({row["peer"] for row in rows} - {"speclen"}), ANYONE]
    found = []
    for mode, what in (
        ("adaptive", "throughput of adaptive over the best mode of"),
        ("none", "throughput of none over the best mode without speculation of"),
    ):
        ours = [row for row in rows if (row["peer"], row["mode"]) == ("speclen", mode)]
        for peer in peers:
            theirs = [
                row
                for row in rows
                if row["peer"] in ((peer,) if peer != ANYONE else peers)
                and (mode == "adaptive" or row["mode"] in PLAIN)
            ]
            found += [{"what": what, "peer": peer, **ratio} for row in ours if (ratio := over(row, theirs))]
    return found


def over(row: dict[str, Any], others: Rows) -> dict[str, Any] | None:
    """A row over the best of the others at its load; None when there are none."""
    others = [other for other in others if other["concurrency"] == row["concurrency"]]
    if not others:
        return None
    best = max(others, key=lambda other: other["tokens_per_s"])
    ours, theirs = (dict(zip(one["round_numbers"], one["tokens_per_s_by_round"], strict=True)) for one in (row, best))
    rounds = [ours[number] / theirs[number] for number in ours.keys() & theirs.keys()]
    if not rounds:
        return None
    return {
        "best_mode": f"{best['peer']}, {best['mode']}",
        "concurrency": row["concurrency"],
        "ratio": row["tokens_per_s"] / best["tokens_per_s"],
        "ratio_low": min(rounds),
        "ratio_high": max(rounds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lines", type=Path)
    parser.add_argument("facts", type=Path, help="JSON object: machine, versions, commit")
    parser.add_argument("out", type=Path, help="folder for peers.json and peers.md")
    options = parser.parse_args()
    rows = best_threads(read_lines(options.lines))
    facts = json.loads(options.facts.read_text("utf-8"))
    ratios = over_best(rows)
    options.out.mkdir(parents=True, exist_ok=True)
    content = {"format": "speclen-peers-1", "facts": facts, "rows": rows, "speclen_over_best": ratios}
    (options.out / "peers.json").write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    page = markdown(rows, ratios, facts)
    (options.out / "peers.md").write_text(page, "utf-8")
    print(page)


if __name__ == "__main__":
    main()
