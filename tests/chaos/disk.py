"""A disk under a real controller that fails on command."""

from __future__ import annotations

import errno
import mmap
import shutil
import struct
import subprocess
from pathlib import Path

from chaos.fault import CannotRunError, Place, fault
from chaos.fleet import SERVING, Fleet, check_database
from chaos.reporter import Reporter
from tests.support.waiting import until

STORE = "speclen.store"


LAYOUT = struct.Struct("=iii")  # struct control of shim.c
FIELDS = ("write_errno", "sync_errno", "num_faults")


class Shim:
    """A disk that misbehaves on command, for one process: shim.c, compiled here and loaded before libc.

    environment: for the process. Raises CannotRunError without a C compiler.
    """

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            raise CannotRunError("needs a C compiler (cc) to make a disk that misbehaves")
        library, control = folder / "shim.so", folder / "shim.control"
        command = [compiler, "-shared", "-fPIC", "-O1", "-o", library, Path(__file__).with_name("shim.c"), "-ldl"]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode:
            raise CannotRunError(f"{compiler} cannot compile shim.c: {made.stderr.strip().splitlines()[-1:]}")
        control.write_bytes(bytes(LAYOUT.size))
        with control.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), LAYOUT.size)
        self.environment = {"LD_PRELOAD": str(library), "CHAOS_SHIM": str(control)}

    def set(self, **values: int) -> None:
        """From now on; what is not named is as it should be."""
        wrong = {"num_faults": self.num_faults, **values}
        LAYOUT.pack_into(self._memory, 0, *(wrong.get(name, 0) for name in FIELDS))

    @property
    def num_faults(self) -> int:
        return LAYOUT.unpack_from(self._memory, 0)[-1]


def store_is(fleet: Fleet, ok: bool) -> None:
    """Wait until the store's health says so."""
    until(lambda: (fleet.controller.health(STORE) == SERVING) is ok, 40.0, f"that {STORE} is SERVING: {ok}")


def check_waiting(fleet: Fleet, reporter: Reporter) -> None:
    """Learning continues, nothing is acknowledged, and the controller itself is healthy."""
    acknowledged, sent = reporter.durable_seq, reporter.last_seq
    until(lambda: reporter.last_seq > sent + 100, what="a report while the disk fails")
    assert reporter.durable_seq == acknowledged, "a report was acknowledged while the disk took nothing"
    assert fleet.controller.health() == SERVING, "the controller is not SERVING while its disk fails"


@fault("Learning continues, nothing is acknowledged that is not on the disk, and it recovers by itself.")
def disk_errors(place: Place) -> str:
    """Writes fail with ENOSPC or EIO, or the flush after them does (fsync), at random moments."""
    shim = Shim(place.folder)
    kinds = [{"write_errno": errno.ENOSPC}, {"write_errno": errno.EIO}, {"sync_errno": errno.EIO}]
    with Fleet(place, 0, environment=shim.environment) as fleet:
        with Reporter(fleet.controller.address, place.dice, max_waiting=10**6) as reporter:
            for times in place.rounds(3):
                reporter.wait_for_more()
                shim.set(**kinds[times % 3])
                store_is(fleet, False)
                check_waiting(fleet, reporter)
                shim.set()
                store_is(fleet, True)
            reporter.finish()
        reporter.check_stored(fleet.database)
        check_database(fleet.database)
    return f"{times + 1} times, {shim.num_faults} calls failed; {reporter.durable_seq:,} reports, all stored once"
