"""The embedded controller: without an address, programs use the controller of a data directory, and start it if needed.

All programs on a machine that use a data directory share its controller, which ends after the last of them. Locks on files
next to the database show which processes are active. The kernel releases them when a process ends, even if it is killed:

    speclen.db.controller   address of the controller that serves the database; locked by it
    speclen.db.users        each program that uses the embedded controller holds a shared lock; without any, it ends
    speclen.db.start        locked while a program starts the controller, so that the others join it
    speclen.db.log          log of the embedded controller
    speclen.db.socket       socket of the embedded controller, accessible only to its user
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import structlog

from speclen.process.settings import installed_version, unix_address
from speclen.process.supervision import FIRST_PAUSE_S, LONGEST_PAUSE_S, STEADY_S, end_after

log = structlog.get_logger()

EMBEDDED, OFF = "embedded", "off"  # in place of a controller's address
DATA_DIR = "SPECLEN_DATA_DIR"
DATABASE_NAME = "speclen.db"
LOOK_S = 0.05  # between checks of a lock, or of a controller that starts
LOCK_PATIENCE_S = 0.5  # for a lock that others hold only for an instant
START_S = 60.0  # until a child serves; a large database takes seconds to open
EARLY_S = 600.0  # time for which a controller that was started early is kept while models load
MOST_LOG_BYTES = 1 << 20  # a longer log is emptied at the next start

FindController = Callable[[], Awaitable[str]]  # returns HOST:PORT; raises the reason if no controller is found


def at(address: str) -> FindController:
    """A finder that always returns this address."""

    async def find() -> str:
        return address

    return find


def data_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """SPECLEN_DATA_DIR, or the user's state directory by XDG. Raises ValueError if there is neither."""
    if given := environment.get(DATA_DIR):
        return Path(given).expanduser().absolute()
    state = Path(environment.get("XDG_STATE_HOME", ""))
    if state.is_absolute():
        return state / "speclen"
    try:
        return Path.home() / ".local" / "state" / "speclen"
    except RuntimeError:
        raise ValueError(f"this user has no home directory for what is learned: name one with {DATA_DIR}") from None


def make_directory(directory: Path) -> None:
    """Make a data directory that only its owner can access. Raises OSError with one sentence if it cannot be used."""
    way_out = f"name another directory with {DATA_DIR}"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = directory.stat().st_uid
    except OSError as error:
        raise OSError(f"the data directory {directory} cannot be made ({error.strerror}): {way_out}") from error
    if owner != os.geteuid():
        raise OSError(f"the data directory {directory} belongs to another user (uid {owner}): {way_out}")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise OSError(f"the data directory {directory} cannot be written: {way_out}")


# Finding the controller of a database.


class Serving(NamedTuple):
    """A controller that serves a database."""

    address: str
    host: str
    process_id: int
    version: str


@contextlib.contextmanager
def published(database: Path, address: str) -> Iterator[None]:
    """Publish for the duration of the block that this process serves the database."""
    content = Serving(address, socket.gethostname(), os.getpid(), installed_version())
    try:
        descriptor = open_beside(database, "controller")
    except OSError as error:
        log.warning("other programs will not find this controller by its database", reason=str(error))
        yield
        return
    try:
        if not lock(descriptor, fcntl.LOCK_EX):
            log.warning("other programs will not find this controller by its database", reason="its file is locked")
        else:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(content._asdict()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def serving(database: Path) -> Serving | None:
    """The controller that serves the database; None if there is none, or it does not publish its address."""
    try:
        descriptor = os.open(sibling(database, "controller"), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if lock(descriptor, fcntl.LOCK_SH, 0.0):
            return None  # left by a process that has ended
        return Serving(**json.loads(os.read(descriptor, 4096)))
    except (ValueError, TypeError):
        return None  # the file is being written
    finally:
        os.close(descriptor)


def sibling(database: Path, what: str) -> Path:
    """Path of one of our files, next to the database file itself (symbolic links are followed)."""
    real = Path(os.path.realpath(database))
    return real.with_name(f"{real.name}.{what}")


def open_beside(database: Path, what: str) -> int:
    return os.open(sibling(database, what), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)


def lock(descriptor: int, kind: int, patience_s: float = LOCK_PATIENCE_S) -> bool:
    """Take a lock within patience_s; False if another process still holds it. kind: LOCK_EX or LOCK_SH."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.005)


# The embedded controller's own process.


def end_when_unused(database: Path) -> None:
    """Let this process end once no program uses the database's embedded controller. None can until it has ended."""
    users = open_beside(database, "users")
    end_after(partial(fcntl.flock, users, fcntl.LOCK_EX), "no program uses this controller any more, so it ends")


def detach() -> Callable[[], None]:
    """Continue in a process that is not a descendant of the starting program: vLLM kills descendants of a slow engine.

    The original process ends with code 0 when the returned function is called, or with the new one's exit code. Call this
    before any thread is started.
    """
    reading, writing = os.pipe()
    if child := os.fork():
        os.close(writing)
        if not os.read(reading, 1):
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if code < 0:
                os.kill(os.getpid(), -code)
            os._exit(code)
        os._exit(0)
    os.close(reading)

    def serves() -> None:
        os.write(writing, b"1")
        os.close(writing)

    return serves


# Using the embedded controller from a program.


class EmbeddedController:
    """Finds the controller of a data directory, or starts one. For one event loop at a time.

    The controller runs in its own process, and outlives the program that started it while others use it.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._environment = environment
        self._users: int | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._started_at = float("-inf")
        self._pause_s = 0.0
        self._log_begin = 0
        self._joined: Serving | None = None

    async def address(self) -> str:
        """Address of the controller, which is started if there is none. Repeated starts are delayed by growing pauses.

        Raises ValueError or OSError with one sentence if it cannot be started.
        """
        database = data_directory(self._environment) / DATABASE_NAME
        make_directory(database.parent)
        await self._use(database)
        async with locked(database, "start"):
            found = serving(database) or await self._start(database)
        if found.host != socket.gethostname():
            raise OSError(
                f"{database} is served by a controller on {found.host}: name a directory of this machine with {DATA_DIR}"
            )
        if found != self._joined:
            self._joined = found
            log.info("what is learned is kept on this machine", database=str(database), process=found.process_id)
            if found.version != installed_version():
                log.warning(
                    f"the controller of {database} is of speclen {found.version} and this is {installed_version()}: to "
                    "replace it, end all programs that use it"
                )
        return found.address

    def close(self) -> None:
        """Stop using the controller, which ends if this was the last program."""
        if self._users is not None:
            os.close(self._users)
            self._users = None

    async def _use(self, database: Path) -> None:
        """Keep the controller from ending. Waits if one is about to end."""
        path = sibling(database, "users")
        if self._users is not None and path.exists() and os.path.samestat(os.fstat(self._users), path.stat()):
            return
        self.close()  # the directory was deleted
        try:
            descriptor = open_beside(database, "users")
        except OSError as error:
            raise OSError(
                f"{path} cannot be opened ({error.strerror}): name another directory with {DATA_DIR}"
            ) from error
        try:
            while not lock(descriptor, fcntl.LOCK_SH, 0.0):
                await asyncio.sleep(LOOK_S)
        except BaseException:
            os.close(descriptor)
            raise
        self._users = descriptor
        os.register_at_fork(after_in_child=self.close)  # a child of this process does not use it

    async def _start(self, database: Path) -> Serving:
        """Start a controller, unless one is already starting. Raises OSError with the last line of its log."""
        deadline, is_new = time.monotonic() + START_S, False
        while True:
            # Checked before `serving`, since a child that ends successfully serves by then.
            ended = self._child is None or self._child.poll() is not None
            if (found := serving(database)) is not None:
                return found
            if ended:
                if is_new:
                    raise OSError(f"the controller of {database} has ended: {self._last_words(database)}")
                await asyncio.sleep(self._pause())
                self._spawn(database)
                is_new = True
            elif time.monotonic() >= deadline:
                raise OSError(f"the controller of {database} does not serve yet: see {sibling(database, 'log')}")
            await asyncio.sleep(LOOK_S)

    def _pause(self) -> float:
        """Seconds to wait before a start; 0 for the first one, and if the last controller ran for long."""
        pause_s = self._pause_s if time.monotonic() - self._started_at < STEADY_S else 0.0
        self._pause_s = min(max(2 * pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
        return pause_s

    def _spawn(self, database: Path) -> None:
        """Start a child. Raises OSError, or ValueError if the directory's path is too long for a socket."""
        try:
            address = unix_address(sibling(database, "socket"))
        except ValueError as error:
            raise ValueError(f"{error}: name a shorter directory with {DATA_DIR}") from error
        with sibling(database, "log").open("ab") as words:
            if words.tell() > MOST_LOG_BYTES:
                words.truncate(0)
            self._log_begin = words.seek(0, os.SEEK_END)
            self._child = subprocess.Popen(
                # -P: do not import a folder of this name from the working directory.
                [sys.executable, "-P", "-m", "speclen.cli.app", "controller", "--embedded"]
                + ["--db", str(database), "--listen", address],
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=words,
                umask=0o077,  # other users of the machine may neither connect nor read
                start_new_session=True,  # it outlives a Ctrl-C that ends this program
            )
        self._started_at = time.monotonic()

    def _last_words(self, database: Path) -> str:
        """Why the child has ended: the signal that killed it, or the last line that it logged."""
        assert self._child is not None
        if (code := self._child.returncode) < 0:
            return f"it was sent a signal: {signal.strsignal(-code)}"
        with contextlib.suppress(OSError), sibling(database, "log").open("rb") as words:
            words.seek(self._log_begin)
            lines = words.read().decode(errors="replace").split("\n")
            if said := [line for line in lines if line.strip()]:
                return said[-1].removeprefix("speclen: ").replace("--db", DATA_DIR)
        return f"its exit code is {code}"


@contextlib.asynccontextmanager
async def locked(database: Path, what: str) -> AsyncIterator[None]:
    """Hold the lock of one of our files for the duration of the block. Waits for it."""
    descriptor = open_beside(database, what)
    try:
        while not lock(descriptor, fcntl.LOCK_EX, 0.0):
            await asyncio.sleep(LOOK_S)
        yield
    finally:
        os.close(descriptor)


# A start before the program that will use it can ask for it.


def start_early() -> subprocess.Popen[bytes]:
    """Start the controller in the background, without threads or sockets in this process.

    A process of its own keeps the controller from ending: for EARLY_S, or until this process ends or drops the result.
    Failures are silent: the program that will use the controller meets them again.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


if __name__ == "__main__":
    with contextlib.closing(EmbeddedController()) as embedded, contextlib.suppress(ValueError, OSError):
        asyncio.run(embedded.address())
        select.select([sys.stdin], [], [], EARLY_S)
