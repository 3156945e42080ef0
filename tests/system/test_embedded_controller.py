"""An embedded controller outlives the process that started it, ends with its last user, and is restarted after a kill."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from speclen.cli.support.client import is_listening
from speclen.cli.support.processes import Child
from speclen.process.embedded import EmbeddedController, serving, start_early
from speclen.store.database import Store
from speclen.store.files import is_locked
from speclen.v1 import generation_pb2 as pb
from speclen.v1 import generation_pb2_grpc as rpc
from tests.support.addresses import free_address
from tests.support.control_fakes import running_controller
from tests.support.store_rows import rows
from tests.support.waiting import on_loop_until, until

# A program that uses the controller: it prints an address at first and after every line that it gets.
PROGRAM = """
import asyncio, sys
from speclen.process.embedded import EmbeddedController

async def main():
    controller = EmbeddedController()
    print("at", await controller.address(), flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print("at", await controller.address(), flush=True)

asyncio.run(main())
"""


class Program:
    """A process that uses the embedded controller of a directory."""

    def __init__(self, directory: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "SPECLEN_DATA_DIR": str(directory)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def address(self) -> str:
        """The next address that it prints, between lines of its log."""
        while not (line := self.process.stdout.readline()).startswith("at "):
            assert line
        return line.split()[1]

    def ask(self) -> str:
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.address()

    def end(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.communicate(timeout=30)


@contextlib.contextmanager
def programs(directory: Path, num: int) -> Iterator[list[Program]]:
    started = [Program(directory) for _ in range(num)]
    try:
        yield started
    finally:
        for each in started:
            each.end()
        until(lambda: serving(directory / "speclen.db") is None, 30, "the controller's end")


def process_of(database: Path) -> int:
    found = serving(database)
    assert found is not None
    return found.process_id


@pytest.fixture
def database(tmp_path):
    return tmp_path / "dä ta%20#x?" / "speclen.db"  # an address quotes most of it


def test_programs_that_start_at_once_share_one_controller_which_ends_with_the_last(database):
    with programs(database.parent, 3) as started:
        addresses = {each.address() for each in started}
        assert len(addresses) == 1
        assert not Path(f"{database}.socket").stat().st_mode & 0o077, "other users may not connect"
        pid = process_of(database)
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        assert parent not in [each.process.pid for each in started], "an engine may kill all processes below it"
        started[0].end()  # one of the three has started it
        started[1].end(signal.SIGTERM)
        time.sleep(1.5)
        assert started[2].ask() in addresses
        assert process_of(database) == pid
    until(lambda: not is_locked(database), 30)
    Store.open(database).close()
    assert (database.parent / "speclen.db.log").read_text().count(" serving on ") == 1


def test_a_controller_that_is_started_early_is_kept_for_the_program_that_joins_it(database, monkeypatch):
    monkeypatch.setenv("SPECLEN_DATA_DIR", str(database.parent))
    early = start_early()
    until(lambda: serving(database) is not None, 30, "the controller's start")
    pid = process_of(database)
    with programs(database.parent, 1) as (program,):
        program.address()
        early.communicate(timeout=30)  # as the end of the program that has started it early
        program.ask()
        assert process_of(database) == pid


async def test_a_deleted_directory_is_made_again(database):
    embedded = EmbeddedController({"SPECLEN_DATA_DIR": str(database.parent)})
    address = await embedded.address()
    first = process_of(database)
    for file in database.parent.iterdir():
        file.unlink()
    await on_loop_until(lambda: serving(database) is None)
    await on_loop_until(lambda: not is_listening(address))
    await embedded.address()
    assert process_of(database) != first
    embedded.close()
    await on_loop_until(lambda: serving(database) is None)


async def test_a_controller_started_by_hand_is_joined(database):
    database.parent.mkdir()
    embedded = EmbeddedController({"SPECLEN_DATA_DIR": str(database.parent)})
    with running_controller(database.parent) as running:
        assert await embedded.address() == running.address
    embedded.close()
    assert not (database.parent / "speclen.db.log").exists()


def other_database(database: Path, monkeypatch: Any) -> Any:
    database.write_text("hello")
    return contextlib.nullcontext()


def taken_port(database: Path, monkeypatch: Any) -> Any:
    address = free_address()
    monkeypatch.setenv("SPECLEN_CONTROLLER_METRICS_LISTEN", address)
    host, port = address.split(":")
    return socket.create_server((host, int(port)))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (other_database, "is damaged .*file is not a database"),
        (taken_port, "cannot listen on .*: Address already in use"),
    ],
)
async def test_the_reason_why_a_controller_cannot_run_is_one_line(database, monkeypatch, fault, words):
    database.parent.mkdir()
    embedded = EmbeddedController({"SPECLEN_DATA_DIR": str(database.parent)})
    with fault(database, monkeypatch):
        for _ in range(2):
            with pytest.raises(
                OSError, match=f"the controller of {re.escape(str(database))} has ended: .*{words}"
            ) as error:
                await embedded.address()
            assert "\n" not in str(error.value)
    embedded.close()


@pytest.mark.timeout(200)
def test_a_worker_alone_learns_and_leaves_nothing_behind_when_it_is_killed(database, folders, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECLEN_DATA_DIR", str(database.parent))
    address = free_address()
    models = ["--target", folders[0], "--draft", folders[1], "--device", "cpu"]
    worker = Child("worker", ["worker", "--listen", address, *models], address, tmp_path / "log")
    worker.start()
    try:
        worker.wait_until_serving(120)
        with grpc.insecure_channel(address) as channel:
            request = pb.GenerateRequest(
                tokenized=pb.TokenizedInput(input_ids=[1, 2]),
                sampling_params=pb.SamplingParams(max_tokens=40, ignore_eos=True),
            )
            list(rpc.GenerationServiceStub(channel).Generate(request, timeout=60))
        until(lambda: serving(database) and rows(database, "SELECT 1 FROM step_reports LIMIT 1"), 30)
    finally:
        worker.stop(timeout_s=0.0)  # SIGKILL
    until(lambda: not is_locked(database), 30, "the controller's end")
