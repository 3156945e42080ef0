"""`speclen up`: a controller and workers in one terminal."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from speclen.cli.support.client import Client, client_from
from speclen.cli.support.errors import UserError, say, user_errors
from speclen.cli.support.flags import arguments, flags_from
from speclen.cli.support.processes import Child, end_as_by_ctrl_c, stop_all
from speclen.cli.support.progress import LiveLine
from speclen.cli.support.whose import identity
from speclen.cli.up.demo import run_demo
from speclen.cli.up.on_ray import up_on_ray
from speclen.cli.up.places import Places
from speclen.integrations.ray.settings import FleetConfig
from speclen.transport.credentials import ClientSecurity
from speclen.transport.settings import flag, settings_of
from speclen.worker.config import WorkerConfig
from speclen.worker.models.naming import check_names

DEMO_TARGET = "bundled:target-60m"  # large enough beside its draft for the best arm to change with the batch size
ANSWER_TIMEOUT_S = 10.0  # of a controller that serves, on a machine whose workers have just started
# Passed on to every worker; it reads its other settings from the environment and the configuration file.
OF_WORKERS = ("target", "draft", "device", "dtype", "backend", "policy", "max_batch_size", "max_length")

OF_FLEETS = (
    *("max_workers", "cpus_per_worker", "gpus_per_worker"),
    *("controller_cert", "controller_key", "insecure"),
)


@flags_from(FleetConfig, *OF_FLEETS)
@flags_from(WorkerConfig, *OF_WORKERS)
@flags_from(ClientSecurity)
def up(
    context: typer.Context,
    workers: int = typer.Option(1, min=1, max=64, help="Workers to run; each listens one port above the one before."),
    controller: str = typer.Option("127.0.0.1:7070", help="Address of the controller; port 0: any that is free."),
    listen: str = typer.Option("127.0.0.1:7080", help="Address of the first worker; port 0: any that is free."),
    http_listen: str = typer.Option(
        "127.0.0.1:8000", help="Address of the first worker's OpenAI-compatible HTTP front; empty for none."
    ),
    data_dir: Path = typer.Option(Path(".speclen"), help="Folder for the database and the logs."),
    demo: bool = typer.Option(
        False,
        "--demo",
        help=f"Send requests at changing concurrency first, and show what was learned; with {DEMO_TARGET} by default.",
    ),
    once: bool = typer.Option(False, "--once", help="With --demo: stop after it."),
    ray: str = typer.Option(
        "",
        metavar="[ADDRESS]",
        help="Run on the Ray cluster at this address; without one: this machine's, or a new one.",
    ),
    **settings: Any,
) -> None:
    """Run a controller and workers until Ctrl-C, and restart those that end.

    Example: speclen up --workers 2
    """
    client = client_from(settings)
    if demo and (source := context.get_parameter_source("target")) is not None and source.name == "DEFAULT":
        settings["target"] = DEMO_TARGET
    options = checked({name: value for name, value in settings.items() if name in OF_WORKERS})
    fleet = {name: value for name, value in settings.items() if name in OF_FLEETS}
    if ray:
        refuse_with_ray(context)
        fleet |= {"workers": workers, "data_dir": data_dir}
        options["token_file"] = settings["token_file"]
        up_on_ray(ray, in_full(fleet), in_full(options), listen, http_listen)
        return
    refuse_without_ray(fleet)
    if (config := context.find_root().params.get("config")) is not None:
        os.environ["SPECLEN_CONFIG"] = str(Path(config).absolute())  # for the children, too
    places = Places.choose(controller, listen, workers, client, any_port=once, http_listen=http_listen)
    run_here(places, data_dir, client, arguments(options), demo, once)


def run_here(places: Places, data_dir: Path, client: Client, options: list[str], demo: bool, once: bool) -> None:
    """Run the children until Ctrl-C, or until the end of the demonstration. options: arguments of every worker."""
    end_as_by_ctrl_c()
    children = children_of(places, data_dir, client, options)
    try:
        with LiveLine() as line:
            start_all(children, data_dir, line.show if demo else say)
        database = database_of(places.controller, client)
        if demo:
            run_demo(places.workers, database, client)
        if once:
            commands = [*learned_commands(database), "up --target MODEL --draft MODEL"]
            print(f"\nAll stopped. What was learned stays in {database}:\n\n{in_lines(commands)}\n", flush=True)
        else:
            generate = f'generate "def read_file(path):" --worker {places.workers[0]}'
            print_addresses(places, data_dir, in_lines([generate, *learned_commands(database)[: 1 + demo]]))
            supervise(children)
    except KeyboardInterrupt:
        say("\nstopping")
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f"--data-dir {data_dir} cannot be used: {reason}; name a folder that you may write to"
        ) from error
    finally:
        stop_all(children, timeout_s=40.0)


def refuse_with_ray(context: typer.Context) -> None:
    """Raises UserError for a flag that Ray does not follow."""
    for name in ("demo", "once", "controller"):
        if (source := context.get_parameter_source(name)) is not None and source.name == "COMMANDLINE":
            raise UserError(f"{flag(name)} cannot be used with --ray: drop one of them")


def in_full(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings with places as processes on Ray find them, which run in the folder of `ray start`."""

    def place(name: str, value: Any) -> Any:
        if isinstance(value, Path):
            return value.absolute()
        is_folder = name in ("target", "draft") and bool(value) and Path(value).is_dir()
        return str(Path(value).absolute()) if is_folder else value

    return {name: place(name, value) for name, value in settings.items()}


def refuse_without_ray(fleet: dict[str, Any]) -> None:
    """Raises UserError for a setting that only Ray can follow."""
    for name, value in fleet.items():
        if value != settings_of(FleetConfig)[name].default:
            raise UserError(f"{flag(name)} {value} needs --ray: add it, or drop {flag(name)}")


def start_all(children: list[Child], data_dir: Path, tell: Callable[[str], None]) -> None:
    """Start the controller, then the workers, and wait until all serve. Raises UserError with the words of what ended."""
    data_dir.mkdir(parents=True, exist_ok=True)
    for child in children:
        # The controller first, alone: errors of its database come before a worker loads a model.
        tell(f"{child.name}: starting on {child.address}")
        child.start()
        if child.kind == "controller":
            wait_for(child, tell)
    for child in children[1:]:
        wait_for(child, tell)


def wait_for(child: Child, tell: Callable[[str], None]) -> None:
    child.wait_until_serving(say=tell)
    tell(f"{child.name}: serving")


def database_of(controller: str, client: Client) -> Path:
    """The controller's database, by its own word: settings of its own may name another."""
    with client.calling("controller", controller) as channel:
        database = identity(channel, "controller", ANSWER_TIMEOUT_S).database
    here = Path.cwd()
    return Path(database).relative_to(here) if Path(database).is_relative_to(here) else Path(database)


def checked(options: dict[str, Any]) -> dict[str, Any]:
    """The options. Raises UserError for what a worker would refuse after seconds of importing torch."""
    with user_errors():
        check_names(options["target"], options["draft"])
        WorkerConfig(**{**options, "policy": "adaptive" if options["policy"] == "profile" else options["policy"]})
    return options


def children_of(places: Places, data_dir: Path, client: Client, options: list[str]) -> list[Child]:
    """One controller, then its workers. They know the name of their run, and refuse servers of another.

    options: arguments of every worker.
    """
    run_id = secrets.token_hex(8)

    def child(name: str, address: str, *settings: str) -> Child:
        log_file = data_dir / f"{name.replace(' ', '-')}.log"
        arguments = [name.partition(" ")[0], "--listen", address, *settings, "--run-id", run_id]
        return Child(name, arguments, address, log_file, run_id=run_id, client=client)

    pairs = zip(places.workers, places.fronts or [""] * len(places.workers), strict=True)
    return [child("controller", places.controller, "--data-dir", str(data_dir))] + [
        child(f"worker {at}", address, "--http-listen", front, "--controller", places.controller, *options)
        for at, (address, front) in enumerate(pairs)
    ]


def supervise(children: list[Child]) -> None:
    while True:
        for child in children:
            event = child.restart_if_dead(time.monotonic())
            if event:
                say(event)
        time.sleep(0.2)


def print_addresses(places: Places, data_dir: Path, commands: str) -> None:
    fronts = f"http        {', '.join(places.fronts)}\n" if places.fronts else ""
    print(
        f"""
controller  {places.controller}    workers  {", ".join(places.workers)}
{fronts}logs        {data_dir}/*.log    Ctrl-C ends all

In another terminal:
{commands}
""",
        flush=True,
    )


def learned_commands(database: Path) -> list[str]:
    """Commands that show what was learned, with a server or without; the second needs some steps to explain."""
    db = f"--db {shlex.quote(str(database))}"
    return [f"tables {db}", f"explain --batch 8 {db}"]


def in_lines(commands: list[str]) -> str:
    return "\n".join(f"  {program()} {command}" for command in commands)


def program() -> str:
    """The command's name, or its path where no folder of PATH has it."""
    beside = Path(sys.executable).with_name("speclen")
    if shutil.which("speclen") or not beside.exists():
        return "speclen"
    return shlex.quote(str(beside.relative_to(Path.cwd()) if beside.is_relative_to(Path.cwd()) else beside))
