"""Flags made from configuration classes, and help that reads well at 80 columns."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import chain
from typing import Any, TypeVar, get_type_hints

import typer
from typer.core import TyperGroup

from speclen.cli.support.errors import UserError
from speclen.transport.settings import flag, settings_of

Command = TypeVar("Command", bound=Callable[..., None])


def flags_from(config: type, *names: str) -> Callable[[Command], Command]:
    """Give a command, in place of its `**settings`, a flag for every setting of the class, or for those named.

    The command gets what was given, or the defaults, as keyword arguments.
    """

    def decorate(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True).parameters.values()
        kept = [each for each in own if each.kind is not inspect.Parameter.VAR_KEYWORD]
        added = [parameter for parameter in parameters(config) if not names or parameter.name in names]
        command.__signature__ = inspect.Signature([*kept, *added])  # type: ignore[attr-defined]
        return command

    return decorate


def parameters(config: type) -> list[inspect.Parameter]:
    """The settings of a class as parameters that typer makes options of."""
    types = get_type_hints(config)
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            # A switch that is off has one form: there is no --no-insecure.
            default=typer.Option(each.default, *([flag(name)] * (each.default is False)), help=each.metadata["help"]),
            annotation=types[name],
        )
        for name, each in settings_of(config).items()
    ]


def arguments(settings: dict[str, Any]) -> list[str]:
    """Settings as arguments for another command that has the same flags."""
    return [part for name, value in settings.items() for part in (flag(name), str(value))]


def ranges(flag: str, text: str, least: int, most: int) -> tuple[int, ...]:
    """Ascending numbers of a list such as 1,2,4-8. Raises UserError naming the flag."""
    spans: list[range] = []
    try:
        for part in text.split(","):
            low, _, high = part.partition("-")
            spans.append(range(int(low), int(high or low) + 1))
    except ValueError:
        raise UserError(f"{flag} {text!r} is not a list of whole numbers such as 1,2,4-8") from None
    spans = [span for span in spans if span]
    if not spans or min(span.start for span in spans) < least or max(span.stop for span in spans) > most + 1:
        raise UserError(f"{flag} {text!r} must lie between {least} and {most}")
    return tuple(sorted(set(chain.from_iterable(spans))))


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
