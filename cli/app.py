"""The root of the `speclen` command: finds verbs, reads the configuration file, prints errors.

Settings of a verb come from its flags, then `SPECLEN_<VERB>_<FLAG>` in the environment, then the verb's section of the
TOML file that `--config` or `SPECLEN_CONFIG` names, then the default. Settings of all clients, `SPECLEN_CLIENT_<FLAG>` and
then the section [client], come after those of one verb.
"""

from __future__ import annotations

import difflib
import os
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import typer

from speclen.cli.support.flags import LazyGroup, Verbs, check_environment, load_verb
from speclen.cli.support.output import UserError, printing, wrapped
from speclen.transport.embedded import DATA_DIR
from speclen.transport.lifeline import end_with_parent

VERBS: Verbs = {
    "up": ("speclen.cli.up", "up", "Run a controller and workers in one terminal."),
    "controller": (
        "speclen.cli.controller",
        "controller",
        "Run the controller, which learns arms and keeps them in SQLite.",
    ),
    "worker": ("speclen.cli.worker", "worker", "Run a worker: serves Generate and reports every step."),
    "generate": ("speclen.cli.generate", "generate", "Send one prompt to a worker and print what it generates."),
    "top": ("speclen.cli.top", "top", "Watch workers: requests, throughput, lengths in use."),
    "tables": ("speclen.cli.tables", "tables", "Show the learned table of a database."),
    "gain": ("speclen.cli.gain", "gain", "Show the measured gain over the baseline."),
    "hold": ("speclen.cli.hold", "hold", "Hold arms at ranges of batch sizes, whatever is learned."),
    "explain": (
        "speclen.cli.explain",
        "explain",
        "Show the estimates behind the arm of a batch size.",
    ),
    "replay": ("speclen.cli.replay", "replay", "Repeat decisions from stored reports."),
    "profile": ("speclen.cli.profile", "app", "Measure step times and acceptance offline, and show them."),
    "backup": ("speclen.cli.backup", "backup", "Copy the database of a running controller."),
    "restore": ("speclen.cli.backup", "restore", "Restore the database from a backup."),
    "export": ("speclen.cli.export", "export", "Write the learned table as JSON, or for another engine."),
    "doctor": ("speclen.cli.doctor", "doctor", "Check a database and say what to do."),
    "dashboard": ("speclen.cli.dashboard", "dashboard", "Show what was learned in a web browser, with charts."),
    "bench": ("speclen.cli.bench", "app", "Measure speclen: serving, single steps, policies, the controller."),
}
# The verbs that call our servers, and what each takes from the settings of all clients.
PROTECTION = ("ca", "cert", "key", "token_file")
CLIENTS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("generate",): ("worker", *PROTECTION),
    ("top",): ("worker", *PROTECTION),
    ("hold",): ("controller", *PROTECTION),
    ("profile", "run"): ("controller", *PROTECTION),
    ("profile", "import"): ("controller", *PROTECTION),
    ("up",): PROTECTION,
}
# Of `speclen[worker]`: what other verbs do without.
ENGINE = ("torch", "transformers", "tokenizers", "huggingface_hub", "safetensors", "fastapi", "starlette", "uvicorn")
CLIENT_SETTINGS = ("worker", "controller", *PROTECTION)


class SpeclenGroup(LazyGroup):
    """The verbs; an unknown one is refused with a suggestion."""

    verbs = VERBS

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            raise UserError(f"there is no verb {args[0]!r}{suggestion(args[0], VERBS)}")
        return super().resolve_command(ctx, with_ray_address(args))


def with_ray_address(arguments: list[str]) -> list[str]:
    """`up --ray` may go without its address, which is then found: no other option has a value that may be missing."""
    if arguments[:1] != ["up"]:
        return arguments
    follows = zip(arguments, [*arguments[1:], "-"], strict=True)
    return [
        part for word, after in follows for part in ([word, "auto"] if word == "--ray" and after[:1] == "-" else [word])
    ]


def settings_from(path: Path, group: SpeclenGroup, ctx: typer.Context) -> dict[str, Any]:
    """Defaults for every verb from a TOML file; a section or key that no verb knows is an error."""
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UserError(f"the configuration file {path} cannot be read ({error.strerror}): name another") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"the configuration file {path} is not valid TOML: {error}") from error
    defaults: dict[str, Any] = {}
    for verb, values in content.items():
        if verb not in (*VERBS, "client"):
            raise UserError(f"{path}: unknown section [{verb}]{suggestion(verb, [*VERBS, 'client'])}")
        if not isinstance(values, dict):
            raise UserError(f"{path}: {verb} must be a section, [{verb}]")
        if verb == "client":
            defaults[verb] = checked_client_keys(values, f"{path}: [client]")
        else:
            defaults[verb] = checked_keys(values, group.get_command(ctx, verb), f"{path}: [{verb}]")
    return defaults


def checked_client_keys(values: dict[str, Any], where: str) -> dict[str, Any]:
    for key in values:
        if key.replace("-", "_") not in CLIENT_SETTINGS:
            raise UserError(f"{where} has no setting {key!r}{suggestion(key, CLIENT_SETTINGS)}")
    return {key.replace("-", "_"): value for key, value in values.items()}


def with_client_defaults(defaults: dict[str, Any]) -> dict[str, Any]:
    """Settings of several verbs under each of them: the verb's own first, then the environment's, then [client]'s."""
    of_all = defaults.pop("client", {})
    of_all |= {name: value for name in CLIENT_SETTINGS if (value := os.environ.get(f"SPECLEN_CLIENT_{name.upper()}"))}
    for verb, names in CLIENTS.items():
        given = defaults
        for name in verb:
            given = given.setdefault(name, {})
        given |= {name: of_all[name] for name in names if name in of_all and name not in given}
        if verb == ("top",) and isinstance(given.get("worker"), str):  # the one verb that takes several
            given["worker"] = given["worker"].replace(",", " ").split()
    if address := os.environ.get("SPECLEN_CONTROLLER"):
        defaults.setdefault("worker", {}).setdefault("controller", address)
    if directory := os.environ.get(DATA_DIR):
        for name in ("controller", "up"):
            defaults.setdefault(name, {}).setdefault("data_dir", directory)
    return defaults


def settings_of_verb(verb: str) -> set[str]:
    """Names of the settings that variables of a verb may set, sub-commands' behind the name of theirs."""
    if verb == "client":
        return set(CLIENT_SETTINGS)
    return names_of(load_verb(verb, *VERBS[verb][:2]))


def names_of(command: Any) -> set[str]:
    names = {parameter.name for parameter in command.params if parameter.name}
    for name in getattr(command, "commands", {}):
        names |= {f"{name}_{setting}" for setting in names_of(command.get_command(None, name))}
    return names


def checked_keys(values: dict[str, Any], command: Any, where: str) -> dict[str, Any]:
    """The values under the names that click knows the command's parameters by; sub-commands are sub-sections."""
    parameters = {p.name: p for p in command.params if p.name}
    names = {name.replace("_", "-"): name for name in parameters}
    subcommands = getattr(command, "commands", {})
    checked: dict[str, Any] = {}
    for key, value in values.items():
        if key in subcommands and isinstance(value, dict):
            checked[key] = checked_keys(value, command.get_command(None, key), f"{where} {key}")
            continue
        name = names.get(key.replace("_", "-"))
        if name is None:
            raise UserError(f"{where} has no setting {key!r}{suggestion(key, [*names, *subcommands])}")
        if wanted := not_of_its_type(value, parameters[name]):
            raise UserError(f"{where}: {key} is {value!r}, but must be {wanted}")
        checked[name] = value
    return checked


def not_of_its_type(value: Any, parameter: Any) -> str:
    """The kind that a value of a TOML file must have, "" if it has. click would cut 3.9 to 3, and take true for 1.

    A string is taken for whatever it says, as in a variable.
    """
    if isinstance(value, str):
        return ""
    if getattr(parameter, "multiple", False) or parameter.nargs != 1:
        return "" if isinstance(value, list) else "a list"
    taken, wanted = {
        "bool": ((bool,), "true or false"),
        "int": ((int,), "a whole number"),
        "float": ((int, float), "a number"),
    }.get(getattr(parameter.type_descriptor.annotation, "__name__", "str"), ((int, float), "a string"))
    return "" if type(value) in taken else wanted


def suggestion(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(sorted(known))}"


def show_version(wanted: bool) -> None:
    if wanted:
        print(f"speclen {version('speclen')}")
        raise typer.Exit


app = typer.Typer(cls=SpeclenGroup, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def root(
    ctx: typer.Context,
    config: Path | None = typer.Option(None, envvar="SPECLEN_CONFIG", help="TOML file with one section per verb."),
    _: bool = typer.Option(
        False, "--version", callback=show_version, is_eager=True, show_envvar=False, help="Print the version."
    ),
) -> None:
    """Serve language models with batched speculative decoding, and learn the best speculation lengths meanwhile.

    Example: speclen up
    """
    assert isinstance(ctx.command, SpeclenGroup)
    ctx.default_map = with_client_defaults({} if config is None else settings_from(config, ctx.command, ctx))


def main() -> None:
    end_with_parent()
    # Before gRPC is imported: what it has to say comes as a status, its own log would be pages about a wrong certificate.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        check_environment(list(os.environ), [*VERBS, "client"], settings_of_verb)
        with printing():
            typer.main.get_command(app)(auto_envvar_prefix="SPECLEN")
    except UserError as error:
        print(wrapped(f"speclen: {error}"), file=sys.stderr)
        sys.exit(2)
    except ModuleNotFoundError as error:
        if (missing := (error.name or "").partition(".")[0]) not in ENGINE:
            raise
        print(
            wrapped(f"speclen: the engine is not installed here ({missing} is missing): pip install 'speclen[worker]'"),
            file=sys.stderr,
        )
        sys.exit(2)
    except BrokenPipeError:  # the reader of the output has closed it
        sys.exit(1)


if __name__ == "__main__":
    main()
