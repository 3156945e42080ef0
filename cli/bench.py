"""`speclen bench`: a group of benchmarks, each imported only when it runs."""

from __future__ import annotations

import importlib
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from speclen.cli.support.flags import readable
from speclen.worker.backends.spinning import set_spins

# verb: (module, function, one line for the overview)
VERBS: dict[str, tuple[str, str, str]] = {
    "serve": ("speclen.bench.comparison.serve", "serve", "Latency of real traffic under every policy, interleaved."),
    "step": ("speclen.bench.engine.step", "step", "Cost and yield of single steps, beside transformers' generation."),
    "policy": ("speclen.bench.simulation.policy", "policy", "Policies in simulated situations, beside an oracle."),
    "controller": (
        "speclen.bench.service.controller",
        "controller",
        "Reports a second and round trips of the controller.",
    ),
    "fleet": ("speclen.bench.fleet.run", "fleet", "Load of a controller by the number of its workers."),
}


class LazyCommands(dict[str, Any]):
    """Commands by name, each made when it is looked up: what reads a configuration file needs one, not all."""

    def __getitem__(self, name: str) -> TyperCommand:
        module, function, _ = VERBS[name]
        set_spins()  # before a benchmark imports torch
        single = typer.Typer(add_completion=False)
        single.command(name)(getattr(importlib.import_module(module), function))
        return readable(typer.main.get_command(single), f"bench {name}")


class Benchmarks(TyperGroup):
    """Its commands are imported when they are used; the overview needs none of them."""

    listing = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = LazyCommands((name, None) for name in VERBS)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in VERBS:
            return None
        return TyperCommand(cmd_name, help=VERBS[cmd_name][2]) if self.listing else self.commands[cmd_name]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self.listing = False


app = typer.Typer(cls=Benchmarks, add_completion=False, no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure speclen, and what it is compared with.

    Example: speclen bench serve --track mixed --compare adaptive,fixed:0-8,n-gram --minutes 15
    """
    from speclen.cli.support.processes import end_as_by_ctrl_c  # here, for the overview's sake

    end_as_by_ctrl_c()
