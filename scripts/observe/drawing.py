"""Draws a Grafana dashboard from Prometheus' answers, panel by panel at its place: what it shows, though not by Grafana."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.dates import AutoDateLocator, DateFormatter, date2num
from matplotlib.ticker import FuncFormatter

COLUMNS, UNIT_INCHES = 24, 0.56
FACTORS = {"percentunit": (100.0, " %"), "s": (1.0, " s"), "ms": (1.0, " ms"), "bytes": (1e-6, " MB")}
Answers = Callable[[str], list[dict[str, Any]]]


def draw(path: Path, dashboard: dict[str, Any], answers: Answers) -> None:
    """answers: the series that Prometheus gave for an expression."""
    panels = dashboard["panels"]
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    plt.rcParams.update({"font.size": 8, "axes.grid": True, "grid.color": "#dddddd", "axes.spines.top": False})
    figure = plt.figure(figsize=(COLUMNS * UNIT_INCHES, rows * UNIT_INCHES * 0.62), layout="constrained")
    grid = figure.add_gridspec(rows, COLUMNS)
    begun, ended = span(dashboard, answers)
    for panel in panels:
        at = panel["gridPos"]
        axes = figure.add_subplot(grid[at["y"] : at["y"] + at["h"], at["x"] : at["x"] + at["w"]])
        draw_panel(axes, panel, answers)
        axes.set_xlim(begun, ended)
        axes.xaxis.set_major_locator(AutoDateLocator(minticks=3, maxticks=5))
        axes.xaxis.set_major_formatter(DateFormatter("%H:%M:%S", tz=UTC))
    figure.suptitle(f"{dashboard['title']}: the panels of deploy/grafana as Prometheus answered them", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=75)
    plt.close(figure)


def draw_panel(axes: Any, panel: dict[str, Any], answers: Answers) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    factor, unit = FACTORS.get(defaults["unit"], (1.0, ""))
    steps = {"drawstyle": "steps-post"} if defaults["custom"].get("lineInterpolation") == "stepAfter" else {}
    for target in panel["targets"]:
        for series in sorted(answers(target["expr"]), key=lambda one: first_number(one["metric"])):
            times = [datetime.fromtimestamp(float(at), UTC) for at, _ in series["values"]]
            values = [factor * float(value) for _, value in series["values"]]
            axes.plot(times, values, label=legend(target["legendFormat"], series["metric"]), linewidth=1.2, **steps)
    axes.set_title(panel["title"], fontsize=9, loc="left", fontweight="bold")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}{unit}"))
    if defaults.get("min") == 0:
        axes.set_ylim(bottom=0, top=None if axes.get_ylim()[1] > 0.1 or any(map(has_values, axes.lines)) else 1)
    if axes.lines:
        columns = {"ncols": 4 if len(axes.lines) > 4 else 2, "columnspacing": 1.0, "handlelength": 1.2}
        axes.legend(fontsize=6, loc="upper center", bbox_to_anchor=(0.5, -0.1), frameon=False, **columns)
    else:
        axes.text(0.5, 0.5, "nothing of the kind", transform=axes.transAxes, ha="center", color="#888888")


def has_values(line: Any) -> bool:
    return bool(max(line.get_ydata(), default=0) > 0)


def span(dashboard: dict[str, Any], answers: Answers) -> tuple[float, float]:
    """The first and the last moment of any series, in days, as matplotlib counts."""
    series = [one for panel in dashboard["panels"] for target in panel["targets"] for one in answers(target["expr"])]
    seconds = [float(at) for one in series for at, _ in one["values"]]
    return tuple(date2num(datetime.fromtimestamp(at, UTC)) for at in (min(seconds), max(seconds)))


def legend(template: str, labels: dict[str, str]) -> str:
    filled = re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), template)
    return filled if len(filled) < 40 else filled[:37] + "…"


def first_number(labels: dict[str, str]) -> tuple[float, str]:
    """Buckets in their order, and everything else by name."""
    text = labels.get("batch_bucket") or labels.get("batch_min") or labels.get("position") or ""
    return float(re.match(r"\d*", text)[0] or 0), str(sorted(labels.items()))
