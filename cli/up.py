"""`speclen up`: a controller and workers in one terminal."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import typer

from speclen.console.errors import UserError
from speclen.console.flags import arguments, flags_from
from speclen.console.processes import Child, end_as_by_ctrl_c
from speclen.worker.config import WorkerConfig

START_TIMEOUT_S = 180.0
# Of every worker; what else it can be told, it reads from the environment and the configuration file by itself.
OF_WORKERS = ("target", "draft", "device", "dtype", "policy", "max_batch_size", "max_length")


@flags_from(WorkerConfig, *OF_WORKERS)
def up(
    workers: int = typer.Option(
        1, min=1, max=64, help="Workers to run; the second listens one port further, and so on."
    ),
    controller: str = typer.Option("127.0.0.1:7070", help="Address of the controller."),
    listen: str = typer.Option("127.0.0.1:7080", help="Address of the first worker."),
    http_listen: str = typer.Option(
        "127.0.0.1:8000", help="Address of the first worker's OpenAI-compatible HTTP front; empty for none."
    ),
    data_dir: Path = typer.Option(Path(".speclen"), help="Folder for the database and the logs."),
    quick_profile_s: float = typer.Option(20.0, min=0, help="Measure an unknown context for this long; 0: only learn."),
    demo: bool = typer.Option(False, help="Send requests at changing concurrency first, and show what was learned."),
    once: bool = typer.Option(False, help="With --demo: stop after it."),
    **settings: Any,
) -> None:
    """Run a controller and workers, and restart what dies, until Ctrl-C.

    Example: speclen up --workers 2
    """
    data_dir.mkdir(parents=True, exist_ok=True)
    end_as_by_ctrl_c()
    children = [controller_child(controller, data_dir)]
    options = arguments({**settings, "quick_profile_s": quick_profile_s})
    for index in range(workers):
        fronts = ["--http-listen", next_address("--http-listen", http_listen, index)] if http_listen else []
        address = next_address("--listen", listen, index)
        children.append(worker_child(index, address, controller, data_dir, [*options, *fronts]))
    try:
        for child in children:
            say(f"starting the {child.name} on {child.address}")
            child.start()
        for child in children:
            child.wait_until_serving(START_TIMEOUT_S, say)
            say(f"the {child.name} is serving")
        if demo:
            from speclen.console.demo import run_demo

            run_demo([child.address for child in children[1:]], data_dir / "speclen.db")
        print_addresses(children, data_dir, http_listen)
        if not once:
            supervise(children)
    except KeyboardInterrupt:
        say("\nstopping")
    finally:
        for child in reversed(children):
            child.stop(timeout_s=40.0)


def controller_child(address: str, data_dir: Path) -> Child:
    arguments = ["controller", "--listen", address, "--data-dir", str(data_dir)]
    return Child("controller", arguments, address, data_dir / "controller.log")


def worker_child(index: int, address: str, controller: str, data_dir: Path, options: list[str]) -> Child:
    arguments = ["worker", "--listen", address, "--controller", controller, *options]
    return Child(f"worker {index}", arguments, address, data_dir / f"worker-{index}.log")


def next_address(flag: str, address: str, offset: int) -> str:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise UserError(f"{flag} {address!r} is not HOST:PORT")
    return f"{host}:{int(port) + offset}"


def supervise(children: list[Child]) -> None:
    while True:
        for child in children:
            event = child.restart_if_dead(time.monotonic())
            if event:
                say(event)
        time.sleep(0.2)


def print_addresses(children: list[Child], data_dir: Path, http_listen: str) -> None:
    worker = children[1].address
    completion = (
        f'  curl {http_listen}/v1/completions --json \'{{"prompt": "def fibonacci(n):"}}\'\n' if http_listen else ""
    )
    print(
        f"""
controller  {children[0].address}    workers  {", ".join(child.address for child in children[1:])}    logs  {data_dir}/*.log

  speclen generate "def fibonacci(n):" --worker {worker}
{completion}  speclen tables --db {data_dir / "speclen.db"}
  sqlite-utils rows {data_dir / "speclen.db"} learned_table --table
""",
        flush=True,
    )


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
