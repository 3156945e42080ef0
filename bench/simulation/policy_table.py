"""Write the table and the picture of docs/policy.md from docs/results/policy.json, after adding newer runs to it.

`python -m speclen.bench.simulation.policy_table NEW.json` takes the result of `speclen bench policy --json`: its runs
replace those of the same scenario and policy, so that after a change of one policy only that one needs to be run again.
The table of plans comes from docs/results/plans.json, what `speclen bench plans --json` printed.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import typer

from speclen.bench.marked import insert
from speclen.bench.simulation.copying.plans import HEADINGS, Run, cells
from speclen.bench.simulation.policy import COMPARED, Summary
from speclen.bench.simulation.scenarios import SCENARIOS

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "docs" / "results" / "policy.json", ROOT / "docs" / "policy.md"
PLANS = ROOT / "docs" / "results" / "plans.json"
PICTURE = ROOT / "docs" / "images" / "policy.svg"
DRAWN = ("profile", "throughput-aware")  # beside adaptive and the best fixed length
FIXED = "best fixed"
BEFORE = "before"  # the estimator before this one, which cannot be played any more: reports arrived four at a time then


def merge(old: dict[str, Any], new: dict[str, Any], commit: str) -> dict[str, Any]:
    """Raises ValueError when the new runs are of other seeds than those that are there, or of another length.

    They may be of fewer: every row says of how many (`num_seeds`).
    """
    (first, last), (low, high) = new["seeds"], old["seeds"]
    if not low <= first <= last <= high:
        raise ValueError(f"seeds is {new['seeds']} in the new runs, but {old['seeds']} in those that are there")
    if old["steps"] != new["steps"]:
        raise ValueError(f"steps is {new['steps']} in the new runs, but {old['steps']} in those that are there")
    replaced = {(row["scenario"], row["policy"]) for row in new["summary"]}
    for kind in ("summary", "runs"):
        kept = [row for row in old[kind] if (row["scenario"], row["policy"]) not in replaced]
        old[kind] = kept + [{k: v for k, v in row.items() if k != "regret"} for row in new[kind]]
    for scenario, policy in sorted(replaced):
        old.setdefault("commits", {})[f"{scenario} {policy}"] = commit
    return old


def cell(row: dict[str, Any] | None, decimals: int = 0) -> str:
    """Median and worst."""
    return "–" if row is None else f"{row['median']:.1f}/{row['worst']:.{decimals}f}"


def best_fixed(document: dict[str, Any], scenario: str) -> dict[str, Any] | None:
    """The best of the fixed lengths that were played there."""
    fixed = [row for row in document["summary"] if row["scenario"] == scenario and row["policy"].startswith("fixed:")]
    # In a closed loop the figure is latency: lower is better.
    best = min if SCENARIOS[scenario].closed_loop else max
    return best(fixed, key=lambda row: row["median"]) if fixed else None


def drawn(document: dict[str, Any]) -> list[Summary]:
    """What the picture shows: adaptive, and what one might use in its place."""
    rows = {(row["scenario"], row["policy"]): row for row in document["summary"]}
    shown = []
    for name in SCENARIOS:
        shown += [rows[name, policy] for policy in ("adaptive", *DRAWN) if (name, policy) in rows]
        if (best := best_fixed(document, name)) is not None:
            shown.append(best | {"policy": FIXED})
    return [Summary(**row) for row in shown]


def lines(document: dict[str, Any]) -> list[str]:
    """The table's lines: every scenario, adaptive first, and the best of the fixed lengths for all of them."""
    rows = {(row["scenario"], row["policy"]): row for row in document["summary"]}
    others = [name for name in COMPARED if name != "adaptive" and not name.startswith("fixed:")]
    order = [BEFORE, "profile", FIXED, *(name for name in others if name != "profile")]
    table = [
        f"| {' | '.join(['Scenario', '**adaptive**', *order, 'adaptive recovers in', 'regret'])} |",
        "|---" * (len(order) + 4) + "|",
    ]
    for name, scenario in SCENARIOS.items():
        ours = rows.get((name, "adaptive"))
        best = best_fixed(document, name)
        cells = [cell(best if policy == FIXED else rows.get((name, policy))) for policy in order]
        recovery = regret = ""
        if ours and ours["recovery_median"] is not None:
            recovery = f"{ours['recovery_median']:.0f} / {ours['recovery_worst']:.0f}"
        if ours and ours["regret_median"] is not None:
            regret = f"{ours['regret_median']:.0f}"
        table.append(f"| {' | '.join([scenario.title, f'**{cell(ours, decimals=1)}**', *cells, recovery, regret])} |")
    return table


def plans_lines() -> list[str]:
    """The table of plans in simulated texts, from the result of `speclen bench plans --json`."""
    runs = [Run(**row) for row in json.loads(PLANS.read_text("utf-8"))["runs"]]
    names = list(dict.fromkeys(run.scenario for run in runs))
    rows = [HEADINGS, *(cells(name, [run for run in runs if run.scenario == name]) for name in names)]
    table = [f"| {' | '.join(row)} |" for row in rows]
    return [table[0], "|---" * len(HEADINGS) + "|", *table[1:]]


def main(new: Path | None = typer.Argument(None, help="Result of `speclen bench policy --json` to add.")) -> None:
    """Add runs; write the table, and draw the picture (which needs the extra 'plot')."""
    from speclen.bench.simulation.policy_plot import draw_scores

    document = json.loads(RESULTS.read_text("utf-8"))
    if new is not None:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
        document = merge(document, json.loads(new.read_text("utf-8")), commit)
        # One row a line, for people and for git.
        text = json.dumps(document, separators=(",", ":")).replace('{"scenario"', '\n{"scenario"')
        RESULTS.write_text(text + "\n", "utf-8")
    page = insert(PAGE.read_text("utf-8"), "policy_table", "\n".join(lines(document)))
    PAGE.write_text(insert(page, "plans_table", "\n".join(plans_lines())), "utf-8")
    draw_scores(drawn(document), PICTURE)


if __name__ == "__main__":
    typer.run(main)
