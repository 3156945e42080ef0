"""Verbs and their flags: lazy loading, flags made from configuration classes, misspelt environment variables, help texts."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, ClassVar, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from speclen.cli.support.output import UserError
from speclen.process.settings import flag, settings_of

Command = TypeVar("Command", bound=Callable[..., None])
# By verb: module, attribute (a function or a typer.Typer of verbs), and one line for the overview.
Verbs = dict[str, tuple[str, str, str]]

OTHERS = ("SPECLEN_CONFIG", "SPECLEN_CONTROLLER", "SPECLEN_DATA_DIR", "SPECLEN_TEST_DEVICE")  # not of a single verb
# Kubernetes sets these in every pod for a service whose name begins with speclen: SPECLEN_SERVICE_HOST, SPECLEN_PORT,
# SPECLEN_WORKER_PORT_7080_TCP_ADDR and so on.
FROM_KUBERNETES = re.compile(
    r"SPECLEN(_\w+)?_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
SIMILAR = 0.75  # similarity above which a name counts as a misspelling


class LazyGroup(TyperGroup):
    """A group of verbs that are imported when used, so that `speclen tables` does not wait for torch.

    prefix: what precedes the verbs' names in help texts.
    """

    verbs: ClassVar[Verbs] = {}
    prefix = ""
    listing = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands: dict[str, Any] = dict.fromkeys(self.verbs)  # filled by `get_command`

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.verbs)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.verbs:
            return None
        module, attribute, line = self.verbs[cmd_name]
        if self.listing:
            return TyperCommand(cmd_name, help=line)
        return load_verb(f"{self.prefix}{cmd_name}", module, attribute)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self.listing = False


def load_verb(name: str, module: str, attribute: str) -> TyperCommand | TyperGroup:
    """Import a verb. name: as typed after `speclen`."""
    target = getattr(importlib.import_module(module), attribute)
    if isinstance(target, typer.Typer):
        return readable(typer.main.get_group(target), name)
    app = typer.Typer(add_completion=False)
    app.command(name.rpartition(" ")[2])(target)
    return readable(typer.main.get_command(app), name)


def readable(command: Any, name: str) -> Any:
    """Keep brackets in the help of a command, and name its environment variables once instead of at every flag.

    name: as typed after `speclen`. A LazyGroup does this for its verbs when it loads them.
    """
    for each in command.commands.values() if type(command) is TyperGroup else ():
        readable(each, f"{name} {each.name}")
    for text in [command, *command.params]:
        if getattr(text, "help", None):
            text.help = text.help.replace("[", "\\[")  # otherwise rich takes `speclen[inspect]` for a style
    for parameter in command.params:
        parameter.show_envvar = False
    if not isinstance(command, TyperGroup):
        variable = f"SPECLEN_{name.replace(' ', '_').upper()}"
        command.epilog = f"Each flag is also read from {variable}_<FLAG> and from the file of `speclen --config`."
    return command


def flags_from(config: type, *names: str) -> Callable[[Command], Command]:
    """Replace `**settings` of a command by one flag for every setting of the class, or for those named.

    The command receives the values as keyword arguments.
    """

    def decorate(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True).parameters.values()
        kept = [each for each in own if each.kind is not inspect.Parameter.VAR_KEYWORD]
        added = [parameter for parameter in parameters(config) if not names or parameter.name in names]
        command.__signature__ = inspect.Signature([*kept, *added])  # type: ignore[attr-defined]
        return command

    return decorate


def parameters(config: type) -> list[inspect.Parameter]:
    """The settings of a class as parameters from which typer makes options."""
    types = get_type_hints(config)
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            # A switch that is off by default has no --no-form.
            default=typer.Option(each.default, *([flag(name)] * (each.default is False)), help=each.metadata["help"]),
            annotation=types[name],
        )
        for name, each in settings_of(config).items()
    ]


def arguments(settings: dict[str, Any]) -> list[str]:
    """Settings as arguments for another command with the same flags."""
    return [part for name, value in settings.items() for part in (flag(name), str(value))]


def ranges(flag: str, text: str, least: int, most: int) -> tuple[int, ...]:
    """Parse a list such as 1,2,4-8 into ascending numbers. Raises UserError naming the flag."""
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


def check_environment(names: Iterable[str], verbs: Iterable[str], settings: Callable[[str], Iterable[str]]) -> None:
    """Raise UserError for an environment variable that looks like a misspelt setting, and suggest the right name.

    verbs: words that may follow SPECLEN_. settings: returns the settings of a verb, called only if a variable needs it.
    Variables unlike any of speclen's belong to other programs and are ignored.
    """
    prefixes = {f"SPECLEN_{verb.upper()}_": verb for verb in verbs}
    for name in names:
        if not name.startswith("SPECLEN_") or FROM_KUBERNETES.fullmatch(name):
            continue
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
        if prefix is not None:
            known = {setting.replace("-", "_").upper() for setting in settings(prefixes[prefix])}
            if name.removeprefix(prefix) not in known:
                close = difflib.get_close_matches(name.removeprefix(prefix), known, n=1, cutoff=SIMILAR)
                some = f"it may be one of {prefix}{{{', '.join(sorted(known)[:8])}, …}}"
                way_out = f"; did you mean {prefix}{close[0]}?" if close else f": {some}"
                raise UserError(f"the environment variable {name} is not a setting{way_out}")
        elif name not in OTHERS and (meant := nearest_name(name, prefixes)):
            raise UserError(f"the environment variable {name} is not a setting; did you mean {meant}?")


def nearest_name(name: str, prefixes: Iterable[str]) -> str:
    """The variable of ours that a name resembles, in its verb or as a whole; "" if there is none."""
    verb = "_".join(name.split("_", 2)[:2]) + "_"
    for close in difflib.get_close_matches(verb, prefixes, n=1, cutoff=SIMILAR + 0.05):
        if len(name) > len(verb):
            return close + name.removeprefix(verb)
    return "".join(difflib.get_close_matches(name, OTHERS, n=1, cutoff=SIMILAR))
