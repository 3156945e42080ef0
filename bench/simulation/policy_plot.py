"""Draws the outcome of `speclen bench policy`: scores by scenario, and regret over time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from speclen.bench.simulation.scenarios import SCENARIOS

if TYPE_CHECKING:
    from speclen.bench.simulation.policy import Outcome, Summary


# Fifteen policies and more take part: ten colours, each with three line styles and marks, tell thirty apart.
STYLES = ("-", "--", ":")
MARKS = (".", "x", "^")


def style(index: int) -> dict[str, Any]:
    """Colour and line of the policy with this number."""
    return {"color": f"C{index % 10}", "linestyle": STYLES[index // 10 % len(STYLES)]}


def mark(policy: str, index: int) -> str:
    return "o" if policy == "adaptive" else MARKS[index // 10 % len(MARKS)]


def draw(outcomes: list[Outcome], summaries: list[Summary], path: Path) -> None:
    """Write one picture: left the median score (whisker to the worst seed), right the median regret of all scenarios."""
    figure = Figure(figsize=(14, 7), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_scores(left, [each for each in summaries if not SCENARIOS[each.scenario].closed_loop])
    _draw_regret(right, [each for each in outcomes if each.regret])
    figure.savefig(path, dpi=120)


def draw_scores(summaries: list[Summary], path: Path) -> None:
    """Write a picture of the scores alone, the same file for the same figures."""
    with rc_context({"svg.hashsalt": "speclen"}):
        figure = Figure(figsize=(12, 14), layout="constrained")
        _draw_scores(figure.subplots(), [each for each in summaries if not SCENARIOS[each.scenario].closed_loop])
        figure.savefig(path, dpi=120, metadata={"Date": None})


def _draw_scores(axes: Axes, summaries: list[Summary]) -> None:
    scenarios = list(dict.fromkeys(each.scenario for each in summaries))
    policies = list(dict.fromkeys(each.policy for each in summaries))
    for place in range(0, len(scenarios), 2):
        axes.axhspan(place - 0.5, place + 0.5, color="0.95", zorder=0)
    for index, policy in enumerate(policies):
        mine = {each.scenario: each for each in summaries if each.policy == policy}
        rows = [
            place + 0.8 * (index + 0.5) / len(policies) - 0.4 for place, name in enumerate(scenarios) if name in mine
        ]
        medians = [mine[name].median for name in scenarios if name in mine]
        worst = [mine[name].worst for name in scenarios if name in mine]
        axes.hlines(rows, worst, medians, alpha=0.4, **style(index))
        axes.plot(medians, rows, mark(policy, index), color=f"C{index % 10}", label=policy)
    axes.set_yticks(range(len(scenarios)), [SCENARIOS[name].title for name in scenarios])
    axes.set_ylim(len(scenarios) - 0.5, -0.5)
    axes.set_xlim(left=75.0, right=101.0)
    axes.set_xlabel("goodput, % of a clairvoyant's (median, line to the worst seed)")
    axes.legend(fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=5)
    axes.grid(axis="x", alpha=0.3)


def _draw_regret(axes: Axes, outcomes: list[Outcome]) -> None:
    for index, policy in enumerate(dict.fromkeys(each.policy for each in outcomes)):
        curves = np.array([each.regret for each in outcomes if each.policy == policy])
        moments = np.linspace(0.0, 100.0, curves.shape[1])
        axes.plot(moments, np.maximum(np.median(curves, axis=0), 0.1), label=policy, **style(index))
    axes.set_yscale("log")
    axes.set_xlabel("course of a run, %")
    axes.set_ylabel("cumulative regret, steps (median over scenarios and seeds)")
    axes.legend(fontsize="small", ncols=2, handlelength=3.0)
    axes.grid(alpha=0.3)
