"""Groups of verbs that are imported when they are used, so that `speclen tables` does not wait for torch."""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

from speclen.cli.support.flags import readable

# verb: (module, attribute, one line for the overview). The attribute is a function or a typer.Typer of verbs.
Verbs = dict[str, tuple[str, str, str]]


class LazyGroup(TyperGroup):
    """A group of `verbs`; the overview imports none of them. prefix: of their names, for help texts."""

    verbs: ClassVar[Verbs] = {}
    prefix = ""
    listing = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = dict.fromkeys(self.verbs)  # each is made when it is looked up

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.verbs)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.verbs:
            return None
        module, attribute, line = self.verbs[cmd_name]
        return (
            TyperCommand(cmd_name, help=line)
            if self.listing
            else load_verb(f"{self.prefix}{cmd_name}", module, attribute)
        )

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self.listing = False


def load_verb(name: str, module: str, attribute: str) -> TyperCommand | TyperGroup:
    """Import a verb. name: as typed behind `speclen`."""
    target = getattr(importlib.import_module(module), attribute)
    if isinstance(target, typer.Typer):
        return readable(typer.main.get_group(target), name)
    app = typer.Typer(add_completion=False)
    app.command(name.rpartition(" ")[2])(target)
    return readable(typer.main.get_command(app), name)
