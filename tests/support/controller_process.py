"""A `speclen controller` in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from speclen.cli.support.processes import Child
from tests.support.addresses import free_address


@contextmanager
def running_controller(folder: Path, *options: str, run_id: str = "") -> Iterator[Child]:
    """A controller that keeps its database in the folder, stopped at the end."""
    folder.mkdir(exist_ok=True)
    address = free_address()
    arguments = ["controller", "--listen", address, "--data-dir", str(folder), *options]
    child = Child("controller", arguments, address, folder / "log")
    if run_id:
        child.arguments += ["--run-id", run_id]
    child.start()
    try:
        child.wait_until_serving(30)
        yield child
    finally:
        child.stop(20)
