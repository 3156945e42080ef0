"""The root of the `speclen` command: finds verbs, reads the configuration file, prints errors.

A verb is imported only when it is used, so that `speclen tables` does not wait for torch. Settings of a verb come from
its flags, then `SPECLEN_<VERB>_<FLAG>` in the environment, then the verb's section of the TOML file that `--config` or
`SPECLEN_CONFIG` names, then the default.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import tomllib
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from speclen.console.errors import UserError

# verb: (module, attribute, one line for the overview). The attribute is a function or a typer.Typer of verbs.
VERBS: dict[str, tuple[str, str, str]] = {
    "up": ("speclen.cli.up", "up", "Run a controller and workers in one terminal."),
    "controller": (
        "speclen.cli.controller",
        "controller",
        "Run the controller: learns the lengths, keeps them in SQLite.",
    ),
    "worker": ("speclen.cli.worker", "worker", "Run a worker: serves Generate and reports every step."),
    "generate": ("speclen.cli.generate", "generate", "Send one prompt to a worker and print what it generates."),
    "top": ("speclen.cli.top", "top", "Watch workers: requests, throughput, lengths in use."),
    "tables": ("speclen.cli.tables", "tables", "Show the learned table of a database."),
    "explain": ("speclen.cli.explain", "explain", "Why a batch size gets its length: the estimates behind a choice."),
    "replay": (
        "speclen.cli.replay",
        "replay",
        "Repeat decisions from stored reports; what other policies would have cost.",
    ),
    "profile": ("speclen.cli.profile", "app", "Measure step times and survival offline; look at, and hand on."),
    "backup": ("speclen.cli.backup", "backup", "Copy the database of a running controller to a file."),
    "export": ("speclen.cli.export", "export_state", "Write what was learned as JSON, to move it between fleets."),
    "import": ("speclen.cli.import_state", "import_state", "Take over what another fleet learned."),
    "doctor": ("speclen.cli.doctor", "doctor", "Check a database and say what to do."),
    "inspect": ("speclen.cli.inspect", "inspect", "Browse the database in a web browser, with charts."),
    "bench": ("speclen.cli.bench", "app", "Measure speclen: serving, single steps, policies, the controller."),
}
# Variables that are not settings of a verb.
OTHER_VARIABLES = {"SPECLEN_CONFIG", "SPECLEN_FAILPOINT"}


class LazyVerbs(TyperGroup):
    """A group whose commands are imported when they are used; the overview needs none of them."""

    listing = False

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in VERBS:
            return None
        module, attribute, summary = VERBS[cmd_name]
        if self.listing:
            return TyperCommand(cmd_name, help=summary)
        return load_verb(cmd_name, module, attribute)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self.listing = False


def load_verb(name: str, module: str, attribute: str) -> TyperCommand | TyperGroup:
    target = getattr(importlib.import_module(module), attribute)
    if isinstance(target, typer.Typer):
        return typer.main.get_group(target)
    app = typer.Typer(add_completion=False)
    app.command(name)(target)
    return typer.main.get_command(app)  # type: ignore[return-value]


def settings_from(path: Path, group: LazyVerbs, ctx: typer.Context) -> dict[str, Any]:
    """Defaults for every verb from a TOML file; a section or key that no verb knows is an error."""
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UserError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"the configuration file {path} is not valid TOML: {error}") from error
    defaults: dict[str, Any] = {}
    for verb, values in content.items():
        if verb not in VERBS:
            raise UserError(f"{path}: unknown section [{verb}]{suggestion(verb, VERBS)}")
        if not isinstance(values, dict):
            raise UserError(f"{path}: {verb} must be a section, [{verb}]")
        defaults[verb] = checked_keys(values, group.get_command(ctx, verb), f"{path}: [{verb}]")
    return defaults


def checked_keys(values: dict[str, Any], command: Any, where: str) -> dict[str, Any]:
    """The values under the names that click knows the command's parameters by; sub-commands are sub-sections."""
    names = {name.replace("_", "-"): name for name in (p.name for p in command.params) if name}
    subcommands = command.commands if isinstance(command, TyperGroup) else {}
    checked: dict[str, Any] = {}
    for key, value in values.items():
        if key in subcommands and isinstance(value, dict):
            checked[key] = checked_keys(value, subcommands[key], f"{where} {key}")
            continue
        name = names.get(key.replace("_", "-"))
        if name is None:
            raise UserError(f"{where} has no setting {key!r}{suggestion(key, [*names, *subcommands])}")
        checked[name] = value
    return checked


def suggestion(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(sorted(known))}"


def check_environment(names: Sequence[str]) -> None:
    """A variable that looks like a setting but names no verb is a spelling mistake: say so."""
    prefixes = tuple(f"SPECLEN_{verb.upper()}_" for verb in VERBS)
    for name in names:
        if name.startswith("SPECLEN_") and name not in OTHER_VARIABLES and not name.startswith(prefixes):
            raise UserError(f"the environment variable {name} is no setting: use SPECLEN_<VERB>_<FLAG>")


def show_version(wanted: bool) -> None:
    if wanted:
        print(f"speclen {version('speclen')}")
        raise typer.Exit


app = typer.Typer(cls=LazyVerbs, add_completion=False, no_args_is_help=True)


@app.callback()
def root(
    ctx: typer.Context,
    config: Path | None = typer.Option(None, envvar="SPECLEN_CONFIG", help="TOML file with one section a verb."),
    _: bool = typer.Option(
        False, "--version", callback=show_version, is_eager=True, show_envvar=False, help="Print the version."
    ),
) -> None:
    """Serve language models with batched speculative decoding, and learn the best speculation lengths meanwhile.

    Example: speclen up
    """
    if config is not None:
        assert isinstance(ctx.command, LazyVerbs)
        ctx.default_map = settings_from(config, ctx.command, ctx)


def main() -> None:
    try:
        check_environment(list(os.environ))
        typer.main.get_command(app)(auto_envvar_prefix="SPECLEN")
    except UserError as error:
        print(f"speclen: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
