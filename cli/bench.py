"""`speclen bench`: the group of benchmarks."""

from __future__ import annotations

import typer

from speclen.cli.support.flags import LazyGroup, Verbs
from speclen.worker.backends import set_spins

VERBS: Verbs = {
    "serve": (
        "speclen.bench.serving.serve",
        "serve",
        "Latency of real traffic under every policy, interleaved.",
    ),
    "step": ("speclen.bench.step", "step", "Time and accepted tokens of single steps."),
    "policy": ("speclen.bench.simulation.policy", "policy", "The estimator and its variants in simulated worlds."),
    "gain": (
        "speclen.bench.simulation.gain",
        "gain",
        "What the comparison with a baseline saves and costs, simulated.",
    ),
    "controller": (
        "speclen.bench.fleet",
        "controller",
        "Reports per second and round trips of the controller.",
    ),
    "fleet": ("speclen.bench.fleet", "fleet", "Load of a controller by number of workers."),
}

set_spins()  # takes effect only before torch is imported


class Benchmarks(LazyGroup):
    verbs = VERBS
    prefix = "bench "


app = typer.Typer(cls=Benchmarks, add_completion=False, no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure speclen and what it is compared with.

    Example: speclen bench serve --track mixed --compare adaptive,fixed:0-8,n-gram --minutes 15
    """
    from speclen.cli.support.processes import end_as_by_ctrl_c  # imported here to keep the overview fast

    end_as_by_ctrl_c()
