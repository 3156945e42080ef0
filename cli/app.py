"""The root of the `speclen` command: finds verbs, reads the configuration file, prints errors.

A setting comes from the first of these that has it: the flag, `SPECLEN_<VERB>_<FLAG>` in the environment, the verb's section
of the TOML file named by `--config` or `SPECLEN_CONFIG`, `SPECLEN_CLIENT_<FLAG>`, the section [client], the default.
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
from speclen.process.embedded import DATA_DIR
from speclen.process.supervision import end_with_parent

VERBS: Verbs = {
    "up": ("speclen.cli.up", "up", "Run a controller and workers in one terminal."),
    "controller": (
        "speclen.cli.controller",
        "controller",
        "Run the controller, which learns arms and keeps them.",
    ),
    "worker": ("speclen.cli.worker", "worker", "Run a worker, which serves Generate and reports every step."),
    "generate": ("speclen.cli.generate", "generate", "Send one prompt to a worker and print what it generates."),
    "top": ("speclen.cli.top", "top", "Watch workers: requests, throughput, lengths in use."),
    "tables": ("speclen.cli.tables", "tables", "Show the learned table of a database."),
    "gain": ("speclen.cli.gain", "gain", "Show the measured gain over the baseline."),
    "hold": ("speclen.cli.hold", "hold", "Hold arms at batch ranges, whatever is learned."),
    "explain": ("speclen.cli.explain", "explain", "Show the estimates behind the arm of a batch size."),
    "replay": ("speclen.cli.replay", "replay", "Repeat decisions from stored reports."),
    "profile": ("speclen.cli.profile", "app", "Measure step times and acceptance offline, and show them."),
    "backup": ("speclen.cli.backup", "backup", "Copy the database of a running controller."),
    "restore": ("speclen.cli.backup", "restore", "Restore the database from a backup."),
    "export": ("speclen.cli.export", "export", "Write the learned table as JSON, or for another engine."),
    "doctor": ("speclen.cli.doctor", "doctor", "Check a database and say what to do."),
    "dashboard": ("speclen.cli.dashboard", "dashboard", "Show what was learned in a web browser, with charts."),
    "bench": ("speclen.cli.bench", "app", "Measure speclen: serving, steps, policies, the controller."),
}
# Verbs that call our servers, and the client settings that each of them takes.
PROTECTION = ("ca", "cert", "key", "token_file")
CLIENTS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("generate",): ("worker", *PROTECTION),
    ("top",): ("worker", *PROTECTION),
    ("hold",): ("controller", *PROTECTION),
    ("profile", "run"): ("controller", *PROTECTION),
    ("profile", "import"): ("controller", *PROTECTION),
    ("up",): PROTECTION,
}
# Packages of `speclen[worker]`, which most verbs do not need.
ENGINE = ("torch", "transformers", "tokenizers", "huggingface_hub", "safetensors", "fastapi", "starlette", "uvicorn")
CLIENT_SETTINGS = ("worker", "controller", *PROTECTION)


class SpeclenGroup(LazyGroup):
    """All verbs; for an unknown one the error suggests the nearest."""

    verbs = VERBS

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            raise UserError(f"there is no verb {args[0]!r}{suggestion(args[0], VERBS)}")
        return super().resolve_command(ctx, with_ray_address(args))


def with_ray_address(arguments: list[str]) -> list[str]:
    """Insert the address `auto` after `up --ray` without one: click has no option whose value may be missing."""
    at = arguments.index("--ray") + 1 if arguments[:1] == ["up"] and "--ray" in arguments else 0
    if at and (at == len(arguments) or arguments[at].startswith("-")):
        return [*arguments[:at], "auto", *arguments[at:]]
    return arguments


def settings_from(path: Path, group: SpeclenGroup, ctx: typer.Context) -> dict[str, Any]:
    """Read the defaults of every verb from a TOML file. Raises UserError for an unknown section or key."""
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
    """Add settings shared by several verbs to each of them: first from the environment, then from [client]."""
    shared = defaults.pop("client", {})
    shared |= {name: value for name in CLIENT_SETTINGS if (value := os.environ.get(f"SPECLEN_CLIENT_{name.upper()}"))}
    for verb, names in CLIENTS.items():
        given = defaults
        for name in verb:
            given = given.setdefault(name, {})
        given |= {name: shared[name] for name in names if name in shared and name not in given}
        if verb == ("top",) and isinstance(given.get("worker"), str):  # the only verb that takes several addresses
            given["worker"] = given["worker"].replace(",", " ").split()
    if address := os.environ.get("SPECLEN_CONTROLLER"):
        defaults.setdefault("worker", {}).setdefault("controller", address)
    if directory := os.environ.get(DATA_DIR):
        for name in ("controller", "up"):
            defaults.setdefault(name, {}).setdefault("data_dir", directory)
    return defaults


def settings_of_verb(verb: str) -> set[str]:
    """Names of the settings that a verb reads from the environment; a sub-command's begin with its name."""
    if verb == "client":
        return set(CLIENT_SETTINGS)
    return names_of(load_verb(verb, *VERBS[verb][:2]))


def names_of(command: Any) -> set[str]:
    names = {parameter.name for parameter in command.params if parameter.name}
    for name in getattr(command, "commands", {}):
        names |= {f"{name}_{setting}" for setting in names_of(command.get_command(None, name))}
    return names


def checked_keys(values: dict[str, Any], command: Any, where: str) -> dict[str, Any]:
    """The values by click's names of the command's parameters; sub-commands are sub-sections. Raises UserError."""
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
        if wanted := expected_type(value, parameters[name]):
            raise UserError(f"{where}: {key} is {value!r}, but must be {wanted}")
        checked[name] = value
    return checked


def expected_type(value: Any, parameter: Any) -> str:
    """The type that a TOML value lacks, in words; "" if it fits. click alone would truncate 3.9 to 3 and read true as 1.

    A string always fits, because it is parsed like an environment variable.
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
    # Before gRPC is imported. Its errors arrive as statuses; its own log prints pages about a wrong certificate.
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
        words = f"speclen: the engine is not installed here ({missing} is missing): pip install 'speclen[worker]'"
        print(wrapped(words), file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # the reader closed the pipe
        sys.exit(1)


if __name__ == "__main__":
    main()
