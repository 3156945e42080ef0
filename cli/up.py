"""`speclen up`: a controller and workers in one terminal, on this machine or on a Ray cluster."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from speclen.cli.demo import run_demo
from speclen.cli.support.client import Client, check_available, client_from, free_port, identity
from speclen.cli.support.flags import arguments, flags_from
from speclen.cli.support.output import LiveLine, UserError, say, user_errors
from speclen.cli.support.processes import Child, end_as_by_ctrl_c, stop_all
from speclen.integrations.ray.settings import FleetConfig
from speclen.process.credentials import ClientSecurity
from speclen.process.settings import flag, settings_of, split_address
from speclen.worker.config import WorkerConfig
from speclen.worker.models.naming import check_names

DEMO_TARGET = "bundled:target-60m"  # large enough relative to its draft for the best arm to change with the batch size
ANSWER_TIMEOUT_S = 10.0  # for a controller on a machine whose workers have just started
# Passed to every worker; workers read their other settings from the environment and the configuration file.
OF_WORKERS = ("target", "draft", "device", "dtype", "backend", "policy", "baseline", "max_batch_size", "max_length")

OF_FLEETS = (
    *("max_workers", "cpus_per_worker", "gpus_per_worker"),
    *("controller_cert", "controller_key", "insecure"),
)


@flags_from(FleetConfig, *OF_FLEETS)
@flags_from(WorkerConfig, *OF_WORKERS)
@flags_from(ClientSecurity)
def up(
    context: typer.Context,
    workers: int = typer.Option(1, min=1, max=64, help="Workers to run, on consecutive ports."),
    controller: str = typer.Option("127.0.0.1:7070", help="Address of the controller; port 0: any free port."),
    listen: str = typer.Option("127.0.0.1:7080", help="Address of the first worker; port 0: any free port."),
    http_listen: str = typer.Option(
        "127.0.0.1:8000", help="Address of the first worker's OpenAI-compatible HTTP front; empty for none."
    ),
    data_dir: Path = typer.Option(Path(".speclen"), help="Folder for the database and the logs."),
    demo: bool = typer.Option(
        False,
        "--demo",
        help=f"Send requests at changing concurrency first, and show what was learned; with {DEMO_TARGET} by default.",
    ),
    once: bool = typer.Option(False, "--once", help="With --demo: stop when it ends."),
    ray: str = typer.Option(
        "",
        metavar="[ADDRESS]",
        help="Run on the Ray cluster at this address; without an address, on this machine's cluster or a new one.",
    ),
    **settings: Any,
) -> None:
    """Run a controller and workers until Ctrl-C, and restart those that end.

    Example: speclen up --workers 2
    """
    client = client_from(settings)
    if demo and (source := context.get_parameter_source("target")) is not None and source.name == "DEFAULT":
        settings["target"] = DEMO_TARGET
    options = {name: value for name, value in settings.items() if name in OF_WORKERS}
    check_options(options)
    fleet = {name: value for name, value in settings.items() if name in OF_FLEETS}
    if ray:
        for name in ("demo", "once", "controller"):
            if (source := context.get_parameter_source(name)) is not None and source.name == "COMMANDLINE":
                raise UserError(f"{flag(name)} cannot be used with --ray: drop one of them")
        fleet |= {"workers": workers, "data_dir": data_dir}
        options["token_file"] = settings["token_file"]
        up_on_ray(ray, in_full(fleet), in_full(options), listen, http_listen)
        return
    for name, value in fleet.items():
        if value != settings_of(FleetConfig)[name].default:
            raise UserError(f"{flag(name)} {value} needs --ray: add it, or drop {flag(name)}")
    if (config := context.find_root().params.get("config")) is not None:
        os.environ["SPECLEN_CONFIG"] = str(Path(config).absolute())  # inherited by the children
    places = Places.choose(controller, listen, workers, client, any_port=once, http_listen=http_listen)
    run_here(places, data_dir, client, arguments(options), demo, once)


def check_options(options: dict[str, Any]) -> None:
    """Raise UserError for options that a worker would refuse after importing torch, which takes seconds."""
    with user_errors():
        check_names(options["target"], options["draft"])
        known = {"policy": "adaptive", "baseline": "none"}  # a profile may come from each worker's environment
        WorkerConfig(**options | {name: known[name] for name in known if options[name] == "profile"})


@dataclass(frozen=True, slots=True)
class Places:
    """Addresses of the controller, the workers and their HTTP fronts (as many as workers, or none)."""

    controller: str
    workers: list[str]
    fronts: list[str]

    @classmethod
    def choose(
        cls, controller: str, listen: str, num_workers: int, client: Client, any_port: bool, http_listen: str = ""
    ) -> Places:
        """Choose addresses that are free now. any_port: use a free port where one is taken, instead of raising UserError."""

        def free(flag: str, address: str) -> str:
            if not address.endswith(":0"):
                try:
                    check_available(flag, address, client)
                    return address
                except UserError as error:
                    if not any_port:
                        raise
                    say(f"{error}; using a free port this once")
            return free_port(address)

        def consecutive(flag: str, first: str) -> list[str]:
            return [next_address(flag, first, index) for index in range(num_workers)]

        # Check the form of all addresses before probing any.
        workers = consecutive("--listen", listen)
        fronts = consecutive("--http-listen", http_listen) if http_listen else []
        return cls(
            free("--controller", controller),
            [free("--listen", address) for address in workers],
            [free("--http-listen", address) for address in fronts],
        )


def next_address(flag: str, address: str, offset: int) -> str:
    """The address with its port raised by the offset; port 0 stays."""
    with user_errors():
        _, port = split_address(flag, address)
    return f"{address.rpartition(':')[0]}:{port + offset if port else 0}"


def run_here(places: Places, data_dir: Path, client: Client, options: list[str], demo: bool, once: bool) -> None:
    """Run the children until Ctrl-C, or until the demonstration ends. options: arguments of every worker."""
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
            print(f"\nAll stopped. What was learned is kept in {database}:\n\n{in_lines(commands)}\n", flush=True)
        else:
            generate = f'generate "def read_file(path):" --worker {places.workers[0]}'
            print_addresses(places, data_dir, in_lines([generate, *learned_commands(database)[: 1 + demo]]))
            supervise(children)
    except KeyboardInterrupt:
        say("\nstopping")
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f"--data-dir {data_dir} cannot be used: {reason}; name a folder that you can write to"
        ) from error
    finally:
        stop_all(children, timeout_s=40.0)


def children_of(places: Places, data_dir: Path, client: Client, options: list[str]) -> list[Child]:
    """One controller, then its workers. They share a run id, and refuse servers of other runs.

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


def start_all(children: list[Child], data_dir: Path, tell: Callable[[str], None]) -> None:
    """Start the controller, then the workers, and wait until all serve. Raises UserError if one ends, with its message."""
    data_dir.mkdir(parents=True, exist_ok=True)

    def wait(child: Child) -> None:
        child.wait_until_serving(say=tell)
        tell(f"{child.name}: serving")

    for child in children:
        # The controller starts first and alone: errors of its database appear before a worker loads a model.
        tell(f"{child.name}: starting on {child.address}")
        child.start()
        if child.kind == "controller":
            wait(child)
    for child in children[1:]:
        wait(child)


def database_of(controller: str, client: Client) -> Path:
    """The controller's database as the controller reports it, because its own settings may name another one."""
    with client.calling("controller", controller) as channel:
        database = identity(channel, "controller", ANSWER_TIMEOUT_S).database
    here = Path.cwd()
    return Path(database).relative_to(here) if Path(database).is_relative_to(here) else Path(database)


def supervise(children: list[Child]) -> None:
    """Restart children that end, until interrupted."""
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
{fronts}logs        {data_dir}/*.log    Ctrl-C stops everything

In another terminal:
{commands}
""",
        flush=True,
    )


def learned_commands(database: Path) -> list[str]:
    """Commands that show what was learned. They need no server; the second needs some steps to explain."""
    db = f"--db {shlex.quote(str(database))}"
    return [f"tables {db}", f"explain --batch 8 {db}"]


def in_lines(commands: list[str]) -> str:
    return "\n".join(f"  {program()} {command}" for command in commands)


def program() -> str:
    """`speclen`, or the path of the executable if it is not on PATH."""
    path = Path(sys.executable).with_name("speclen")
    if shutil.which("speclen") or not path.exists():
        return "speclen"
    return shlex.quote(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))


def in_full(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings with absolute paths, because processes on Ray run in the folder of `ray start`."""

    def place(name: str, value: Any) -> Any:
        if isinstance(value, Path):
            return value.absolute()
        is_folder = name in ("target", "draft") and bool(value) and Path(value).is_dir()
        return str(Path(value).absolute()) if is_folder else value

    return {name: place(name, value) for name, value in settings.items()}


def up_on_ray(address: str, fleet: dict[str, Any], worker: dict[str, Any], listen: str, http_listen: str) -> None:
    """Run controller and workers on the cluster until Ctrl-C. Raises UserError if that cannot work."""
    end_as_by_ctrl_c()
    # Empty settings are left out, so that each node can set them in its environment.
    given = {name: value for name, value in worker.items() if value not in ("", None)}
    try:
        config = FleetConfig(**fleet, worker=given)
        from speclen.integrations.ray.cluster import fleet as running  # Ray takes seconds to import
        from speclen.integrations.ray.cluster import join

        say(f"joining the Ray cluster {'of this machine' if address == 'auto' else f'at {address}'}")
        join(address)
        with running(config, listen, http_listen, say) as served:
            print_ray_address(served, listen, http_listen)
            while True:
                time.sleep(1.0)
    except KeyboardInterrupt:
        say("\nstopped")
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise UserError("Ray is not installed: pip install 'speclen[ray]'") from error
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error


def print_ray_address(config: FleetConfig, listen: str, http_listen: str) -> None:
    token: Path | None = config.worker.get("token_file")
    address, database = f"127.0.0.1:{listen.rpartition(':')[2]}", config.data_dir / "speclen.db"
    print(
        f"""
workers     {config.workers} behind  {address}    http  {http_listen}
database    {database}    Ctrl-C stops everything

In another terminal:
  speclen generate "def read_file(path):" --worker {address}{f" --token-file {token}" if token else ""}
  speclen tables --db {shlex.quote(str(database))}
""",
        flush=True,
    )
