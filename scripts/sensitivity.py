"""A simulated server made of a measured profile: where adaptation pays, by load, variation and bursts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from speclen.bench.profile.document import ProfileDocument, parse_document
from speclen.bench.simulation.profiled_server import (
    Policy,
    ProfiledMachine,
    adaptive,
    fixed,
    from_table,
    make_traffic,
    serve,
)
from speclen.bench.spread import spread

LOADS = (0.3, 0.6, 0.9)  # of the capacity with every row busy at the best length
VARIATIONS = (0.5, 1.0, 2.0, 4.0)
BURSTS = (1, 8)
MEAN_TOKENS = 64
NUM_SEEDS = 3
FIXED_LENGTHS = (0, 1, 2, 3, 4, 6, 8, 10, 12)
COMPARISONS = {
    "none": "no speculation",
    "overall_fixed": "length {overall} everywhere, the best fixed length for all of them",
    "best_fixed": "the best fixed length of each cell, in hindsight",
    "table": "the frozen table of the true step times",
    "cold_best_fixed": "(started without a profile) the best fixed length of each cell",
}


def profiles_in(paths: Sequence[Path]) -> dict[str, tuple[Path, ProfileDocument]]:
    """Every profile by its title, of files that hold one or, as `lengths.json`, several by title.

    Raises OSError, or ValueError for two of the same title.
    """
    found: dict[str, tuple[Path, ProfileDocument]] = {}
    for path in paths:
        content = json.loads(path.read_text("utf-8"))
        for title, values in ({title_of(path, content): content} if "format" in content else content).items():
            if title in found:
                raise ValueError(f"{path} holds {title!r}, and so does {found[title][0]}: give one of them")
            found[title] = path, parse_document(values)
    return found


def title_of(path: Path, content: dict[str, Any]) -> str:
    """What a profile is of, where it is told: one from a database has no settings."""
    settings = content.get("details", {}).get("settings", {})
    return f"temperature {settings['temperature']:g}" if "temperature" in settings else path.stem


def sensitivity_of(document: ProfileDocument, num_requests: int) -> dict[str, Any]:
    """Every cell, and what they say together."""
    world = ProfiledMachine(document.profile)
    cells = [
        sensitivity_cell(world, load, cv, burst, num_requests)
        for load in LOADS
        for cv in VARIATIONS
        for burst in BURSTS
    ]
    overall = overall_fixed(cells)
    for cell in cells:
        cell["gains"] = gains_of(cell["ms_per_token"], overall)
    return {"table": world.table()[1:], "overall_fixed": int(overall), **summary(cells, overall), "cells": cells}


def sensitivity_cell(world: ProfiledMachine, load: float, cv: float, burst: int, num_requests: int) -> dict[str, Any]:
    """Every policy's latency per token by seed; all policies of a seed have the same requests."""
    policies: dict[str, Callable[[], Policy]] = {
        str(s): lambda s=s: fixed(s)  # type: ignore[misc]
        for s in FIXED_LENGTHS
        if s in world.lengths
    }
    policies["table"] = lambda: from_table(world.table())
    policies["adaptive"] = lambda: adaptive(world, seeded=True)
    policies["adaptive_cold"] = lambda: adaptive(world)
    rate = load * world.capacity_tokens_per_s() / MEAN_TOKENS
    latencies: dict[str, list[float]] = {name: [] for name in policies}
    for seed in range(NUM_SEEDS):
        traffic = make_traffic(rate, cv, num_requests, burst, MEAN_TOKENS, seed)
        for name, make in policies.items():
            latencies[name].append(serve(world, traffic, make(), seed).ms_per_token)
    return {"load": load, "cv": cv, "burst": burst, "ms_per_token": latencies, "best_fixed": int(best_fixed(latencies))}


def fixed_in(latencies: dict[str, list[float]]) -> list[str]:
    return [name for name in latencies if name.isdecimal()]


def best_fixed(latencies: dict[str, list[float]]) -> str:
    """The length with the least latency on the mean over seeds."""
    return min(fixed_in(latencies), key=lambda length: np.mean(latencies[length]))


def overall_fixed(cells: list[dict[str, Any]]) -> str:
    """The one length that a user would set for all traffic: least latency on the geometric mean over the grid."""
    lengths = fixed_in(cells[0]["ms_per_token"])
    return min(lengths, key=lambda length: np.mean([np.log(cell["ms_per_token"][length]) for cell in cells]))


def gains_of(latencies: dict[str, list[float]], overall: str) -> dict[str, list[float]]:
    """By comparison and seed, how many times as fast adaptation is."""
    best = best_fixed(latencies)

    def times(other: str, ours: str = "adaptive") -> list[float]:
        return [a / b for a, b in zip(latencies[other], latencies[ours], strict=True)]

    return {
        "none": times("0"),
        "overall_fixed": times(overall),
        "best_fixed": times(best),
        "table": times("table"),
        "cold_best_fixed": times(best, "adaptive_cold"),
    }


def summary(cells: list[dict[str, Any]], overall: str) -> dict[str, Any]:
    """What the gains are over all cells and over those of a load; and how much longer other lengths take than `overall`."""

    def others(length: str) -> list[list[float]]:
        pairs = [(cell["ms_per_token"][length], cell["ms_per_token"][overall]) for cell in cells]
        return [[a / b for a, b in zip(*pair, strict=True)] for pair in pairs]

    return {
        "gains": {name: figures([cell["gains"][name] for cell in cells]) for name in COMPARISONS},
        "gains_by_load": {
            f"{load:g}": {
                name: figures([cell["gains"][name] for cell in cells if cell["load"] == load]) for name in COMPARISONS
            }
            for load in LOADS
        },
        "times_overall_fixed": {length: figures(others(length)) for length in fixed_in(cells[0]["ms_per_token"])},
    }


def figures(ratios: list[list[float]]) -> dict[str, Any]:
    """ratios: [cells][seeds]. Spread over seeds of the median over cells; least and most of any cell and seed."""
    values = np.array(ratios)
    return {
        "median": asdict(spread(np.median(values, axis=0).tolist())),
        "least": float(values.min()),
        "most": float(values.max()),
    }


def table_of(result: dict[str, Any]) -> str:
    """The gains as a table for the paper, with those of each load below the one that a user could have set."""
    head = f"| adaptation against | median ({NUM_SEEDS} seeds) | least | most |"
    rows = [head, "|---|---|---|---|"]
    for name, words in COMPARISONS.items():
        rows.append(row_of(words.format(overall=result["overall_fixed"]), result["gains"][name]))
        if name == "overall_fixed":
            rows += [row_of(f"- at a load of {load}", of[name]) for load, of in result["gains_by_load"].items()]
    return "\n".join(rows)


def row_of(words: str, gains: dict[str, Any]) -> str:
    median = gains["median"]
    middle = f"{median['median']:.3g} ({median['low']:.3g} to {median['high']:.3g})"
    return f"| {words} | {middle} | {gains['least']:.3g} | {gains['most']:.3g} |"


def plot_sensitivity(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Median gain over the seeds by load and variation: a row for each profile and burst length."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "speclen"
    from matplotlib import pyplot as plt

    rows = [(title, result, burst) for title, result in results.items() for burst in BURSTS]
    figure, axes = plt.subplots(len(rows), 2, figsize=(10, 3.2 * len(rows)), layout="constrained", squeeze=False)
    for row, (title, result, burst) in zip(axes, rows, strict=True):
        against = {
            "best_fixed": "over each cell's best fixed length",
            "overall_fixed": f"over length {result['overall_fixed']}, the best for all cells",
        }
        for axis, (name, words) in zip(row, against.items(), strict=True):
            draw_gains(axis, [cell for cell in result["cells"] if cell["burst"] == burst], name)
            axis.set(title=f"{title}, bursts of {burst}: {words}", xlabel="variation of gaps", ylabel="load")
            axis.title.set_fontsize(9)
    figure.suptitle("Latency per token: times faster with adaptation that starts from the profile")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def draw_gains(axis: Any, cells: list[dict[str, Any]], name: str) -> None:
    """A coloured square, with its number, per load and variation."""
    grid = np.array([[np.median(c["gains"][name]) for c in cells if c["load"] == load] for load in LOADS])
    axis.imshow(grid, cmap="RdYlGn", vmin=0.8, vmax=1.2, origin="lower", aspect="auto")
    for (y, x), value in np.ndenumerate(grid):
        axis.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=9)
    axis.set_xticks(range(len(VARIATIONS)), map(str, VARIATIONS))
    axis.set_yticks(range(len(LOADS)), map(str, LOADS))
