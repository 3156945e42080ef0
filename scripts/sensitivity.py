"""A simulated server made of a measured profile: where adaptation pays, by load, variation and bursts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from speclen.bench.simulation.profiled_server import (
    Policy,
    ProfiledMachine,
    adaptive,
    fixed,
    from_table,
    make_traffic,
    serve,
)

LOADS = (0.3, 0.6, 0.9)  # of the capacity with every row busy at the best length
VARIATIONS = (0.5, 1.0, 2.0, 4.0)
BURSTS = (1, 8)
MEAN_TOKENS = 64
COMPARED_SIZES = (1, 4, 16)
NUM_SEEDS = 1
FIXED_LENGTHS = (0, 1, 2, 3, 4, 6, 8, 10, 12)


def sensitivity_cell(world: ProfiledMachine, load: float, cv: float, burst: int, num_requests: int) -> dict[str, Any]:
    """Mean over seeds of every policy's latency per token, all on the same requests."""
    policies: dict[str, Callable[[int], Policy]] = {
        str(s): lambda seed, s=s: fixed(s) for s in FIXED_LENGTHS if s in world.lengths
    }
    policies["table"] = lambda seed: from_table(world.table())
    policies["adaptive"] = lambda seed: adaptive(world, seeded=True)
    policies["adaptive_cold"] = lambda seed: adaptive(world)
    rate = load * world.capacity_tokens_per_s() / MEAN_TOKENS
    latencies: dict[str, list[float]] = {name: [] for name in policies}
    for seed in range(NUM_SEEDS):
        traffic = make_traffic(rate, cv, num_requests, burst, MEAN_TOKENS, seed)
        for name, make in policies.items():
            latencies[name].append(serve(world, traffic, make(seed), seed).ms_per_token)
    means = {name: float(np.mean(values)) for name, values in latencies.items()}
    best = min((name for name in policies if name.isdecimal()), key=lambda name: means[name])
    return {
        "load": load,
        "cv": cv,
        "burst": burst,
        "ms_per_token": means,
        "best_fixed": int(best),
        "gain_over_none": means["0"] / means["adaptive"],
        "gain_over_best_fixed": means[best] / means["adaptive"],
        "gain_cold_over_best_fixed": means[best] / means["adaptive_cold"],
        "gain_over_table": means["table"] / means["adaptive"],
    }


def plot_sensitivity(cells: list[dict[str, Any]], overall: int, path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    titles = {
        "gain_over_best_fixed": "over the best fixed length of each cell",
        "gain_over_overall_fixed": f"over length {overall}, the best for all cells",
    }
    figure, axes = plt.subplots(len(BURSTS), 2, figsize=(10, 3.2 * len(BURSTS)), layout="constrained", squeeze=False)
    for row, burst in enumerate(BURSTS):
        for axis, (key, title) in zip(axes[row], titles.items(), strict=True):
            grid = np.array([[c[key] for c in cells if (c["load"], c["burst"]) == (load, burst)] for load in LOADS])
            axis.imshow(grid, cmap="RdYlGn", vmin=0.8, vmax=1.2, origin="lower", aspect="auto")
            for (y, x), value in np.ndenumerate(grid):
                axis.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=9)
            axis.set(title=f"{title}; bursts of {burst}", xlabel="variation of gaps", ylabel="load")
            axis.set_xticks(range(len(VARIATIONS)), map(str, VARIATIONS))
            axis.set_yticks(range(len(LOADS)), map(str, LOADS))
    figure.suptitle("Latency per token: times faster with adaptation that starts from the profile")
    figure.savefig(path)
