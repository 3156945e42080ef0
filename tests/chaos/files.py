"""Database files that are cut short or damaged."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from chaos.fault import Place, fault, require, until
from chaos.fleet import Fleet, Program
from chaos.reporter import Reporter


def scribble(place: Place, file: Path) -> None:
    """Some random bytes over some places of a file."""
    with file.open("r+b") as target:
        size = file.stat().st_size
        for _ in range(place.dice.randint(1, 40)):
            target.seek(place.dice.randrange(size))
            target.write(place.dice.randbytes(place.dice.randint(1, 600)))


@fault(
    "Either it starts and every row that is left reads, or it says in one sentence what is wrong and how to go on; "
    "--move-corrupt-aside always starts. Acknowledged commits that are gone are told.",
)
def files_damaged_at_rest(place: Place) -> str:
    """Random bytes are written over, or the end is cut off, the database or the WAL that a killed controller left."""
    seen = {"started": 0, "refused": 0, "told of lost commits": 0}
    with Fleet(place, 0) as fleet:
        copies = {"-wal": place.folder / "killed", "": place.folder / "stopped"}
        with Reporter(fleet.controller.address, place.dice) as reporter:
            for suffix, copy in copies.items():
                reporter.wait_for_more(3000)
                end_and_copy(fleet, copy, suffix)
                if suffix:
                    fleet.controller.start()
                    fleet.controller.wait_until_serving()
        for number in place.rounds(6):
            suffix = ("", "-wal")[number % 2]
            for name in place.folder.glob("speclen.db*"):
                name.unlink()
            for name in copies[suffix].iterdir():
                shutil.copy(name, place.folder)
            if number % 6 < 4:
                scribble(place, fleet.database.with_name(fleet.database.name + suffix))
            else:
                name = fleet.database.with_name(fleet.database.name + suffix)
                os.truncate(name, name.stat().st_size // 2)
            seen[start_damaged(fleet.controller)] += 1
            seen["told of lost commits"] += "lacks commits" in fleet.controller.said()
            if not fleet.controller.alive:
                fleet.controller.arguments.append("--move-corrupt-aside")
                require(start_damaged(fleet.controller) == "started", "--move-corrupt-aside did not start")
                fleet.controller.arguments.remove("--move-corrupt-aside")
            fleet.controller.stop()
        fleet.controller.start()
        fleet.controller.wait_until_serving()
    return ", ".join(f"{what} {count} times" for what, count in seen.items())


def end_and_copy(fleet: Fleet, folder: Path, suffix: str) -> None:
    """Kill the controller, so that its WAL is left, or stop it, so that all is in the database; and copy the files."""
    if suffix:
        fleet.controller.kill()
    else:
        fleet.controller.stop()
    folder.mkdir()
    for name in fleet.database.parent.glob(f"{fleet.database.name}*"):
        shutil.copy(name, folder)


def start_damaged(controller: Program) -> str:
    """ "started" or "refused"; any other end is a breach."""
    controller.start()
    until(lambda: "serving on" in controller.said() or not controller.alive, "a start with a damaged file", 60.0)
    if controller.alive:
        return "started"
    words = controller.said().strip().splitlines()
    require(
        controller.wait() == 2 and len(words) == 1, f"a damaged file ended it with {controller.wait()}: {words[-1:]}"
    )
    return "refused"
