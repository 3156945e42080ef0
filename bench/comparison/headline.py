"""Write the headline table of docs/results/README.md from the results of `speclen bench serve` that are committed.

The table stands between two markers, so that it never says anything but what docs/results/serve/*.json say. --check
fails when it does.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import typer

from speclen.bench.marked import insert
from speclen.bench.serving.tracks import SCENARIOS

ROOT = Path(__file__).resolve().parents[2]
# heading, contender it is against; the best fixed length differs by track.
COLUMNS = (
    ("no speculation", "none"),
    ("best fixed length", None),
    ("offline table", "profile"),
    ("oracle", "oracle"),
)


def read_results(folder: Path) -> list[dict[str, Any]]:
    """In the order of the tracks. Raises ValueError for a file that is no comparison, or one of a --quick run."""
    results = []
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text("utf-8"))
        if content.get("format") != "speclen-serve-1":
            raise ValueError(f"{path} is not a result of `speclen bench serve --out`")
        if content["quick"]:
            raise ValueError(f"{path} comes from --quick: run it again without")
        results.append(content | {"file": path.name})
    order = list(SCENARIOS)
    return sorted(results, key=lambda r: order.index(r["track"]["name"]) if r["track"]["name"] in order else 99)


def ratio_to(result: dict[str, Any], reference: str | None) -> str:
    """ "48% lower (45 to 51)": mean latency of adaptive against the reference, with its 95% interval."""
    for ratio in result["ratios"]:
        if ratio["contender"] == "adaptive" and ratio["reference"] == reference and ratio["interval"]:
            left_out = " *" if ratio["num_left_out"] else ""
            return in_words(**ratio["interval"]) + left_out
    return "–"


def in_words(value: float, low: float, high: float) -> str:
    if low <= 1.0 <= high:
        return f"no difference shown ({percent(low)} to {percent(high)})"
    direction, shares = (
        ("lower", (1 - value, 1 - high, 1 - low)) if value < 1 else ("higher", (value - 1, low - 1, high - 1))
    )
    return f"{100 * shares[0]:.0f}% {direction} ({100 * shares[1]:.0f} to {100 * shares[2]:.0f})"


def percent(ratio: float) -> str:
    return f"{round(100 * (ratio - 1)):+d}%"


def table(results: list[dict[str, Any]]) -> str:
    lines = [
        f"| mean latency of `adaptive` on | {' | '.join(f'against {heading}' for heading, _ in COLUMNS)} |",
        "|---|" + "---|" * len(COLUMNS),
    ]
    for result in results:
        name, best = result["track"]["name"], result["best_fixed"]
        cells = []
        for heading, reference in COLUMNS:
            tried = reference or any(contender.startswith("fixed:") for contender in result["contenders"])
            text = ratio_to(result, reference or best) if tried else "–"
            cells.append(f"{text} ({best})" if heading == "best fixed length" and text != "–" else text)
        lines.append(f"| [`{name}`](serve/{result['file']}) | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *footnotes(results)])


def footnotes(results: list[dict[str, Any]]) -> list[str]:
    """What the figures were measured on, and what takes away from them."""
    machines = {f"{r['machine']['cores']} cores of {r['machine']['processor']}" for r in results}
    targets = {f"{r['worker']['target']} ({r['context']['dtype']})" for r in results}
    notes = [
        f"Measured on {' and '.join(sorted(machines))} with {' and '.join(sorted(targets))}; 95% confidence over "
        f"{min(r['repeats'] for r in results)} or more interleaved repeats; greedy, every policy served the same requests."
    ]
    if any(ratio["num_left_out"] for r in results for ratio in r["ratios"]):
        notes.append("\\* Failed requests are left out; the result's file counts them.")
    short = [r["track"]["name"] for r in results if any("too short" in note for note in r["notes"])]
    if short:
        notes.append(f"Too short for its intervals: {', '.join(short)}.")
    return notes


def main(
    check: bool = typer.Option(False, help="Change nothing; fail when the page is not what the results say."),
    results: Path = ROOT / "docs/results/serve",
    page: Path = ROOT / "docs/results/README.md",
) -> None:
    """Update the page's headline table from the committed results."""
    try:
        found = read_results(results)
        if not found:
            raise ValueError(f"{results} holds no results: make some with `speclen bench serve --out`")
        old = page.read_text("utf-8")
        new = insert(old, "headline", table(found))
    except (OSError, ValueError, KeyError) as error:
        print(f"headline: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    if check:
        if new != old:
            print(
                "headline: the page is not what its results say: run python -m speclen.bench.comparison.headline",
                file=sys.stderr,
            )
            raise typer.Exit(1)
    else:
        page.write_text(new, "utf-8")
        print(table(found))


if __name__ == "__main__":
    typer.run(main)
