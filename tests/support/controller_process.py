"""A `speclen controller` in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from speclen.cli.support.client import Client
from speclen.cli.support.processes import Child
from tests.support.addresses import free_address


@contextmanager
def running_controller(folder: Path, *options: str, run_id: str = "", client: Client | None = None) -> Iterator[Child]:
    """A controller that keeps its database in the folder, stopped at the end. client: that waits for it."""
    folder.mkdir(exist_ok=True)
    address = free_address()
    arguments = ["controller", "--listen", address, "--data-dir", str(folder), "--run-id", run_id, *options]
    child = Child("controller", arguments, address, folder / "log", run_id=run_id, client=client or Client())
    child.start()
    try:
        child.wait_until_serving(30)
        yield child
    finally:
        child.stop(20)
