"""Help that reads well at 80 columns."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup


def readable(command: Any, name: str) -> Any:
    """A command whose help keeps its brackets, and says once what is true of every flag instead of cutting 40 names.

    name: as typed behind `speclen`. Commands that a group makes when they are looked up are left to it.
    """
    for each in command.commands.values() if type(command) is TyperGroup else ():
        readable(each, f"{name} {each.name}")
    for text in [command, *command.params]:
        if getattr(text, "help", None):
            text.help = text.help.replace("[", "\\[")  # else `speclen[inspect]` is taken for a style
    for parameter in command.params:
        parameter.show_envvar = False
    if not isinstance(command, TyperGroup):
        variable = f"SPECLEN_{name.replace(' ', '_').upper()}"
        command.epilog = f"Each flag is also read from {variable}_<FLAG> and from the file of `speclen --config`."
    return command
