"""Database files that are deleted, replaced, overwritten, cut short or damaged."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from chaos.fault import Place, fault, require, until
from chaos.fleet import Fleet, Program
from chaos.reporter import Reporter
from tests.support.store_rows import rows

NOTICED_S = 5.0


def delete(database: Path, suffix: str, backup: Path) -> None:
    database.with_name(database.name + suffix).unlink()


def replace(database: Path, suffix: str, backup: Path) -> None:
    other = database.with_name("other")
    shutil.copy(backup, other)
    other.rename(database.with_name(database.name + suffix))


def copy_over(database: Path, suffix: str, backup: Path) -> None:
    """As `cp backup database` does: the file stays, its content is another's."""
    with backup.open("rb") as source, database.with_name(database.name + suffix).open("r+b") as target:
        target.truncate(0)
        shutil.copyfileobj(source, target)


def cut(database: Path, suffix: str, backup: Path) -> None:
    name = database.with_name(database.name + suffix)
    os.truncate(name, name.stat().st_size // 2)


def check_given_up(controller: Program, reporter: Reporter, what: str) -> None:
    """It noticed in time, said so in one sentence, acknowledged nothing more, and ended with 1. Raises BreachError."""
    until(lambda: not controller.alive, f"the end of a controller {what}", NOTICED_S)
    acknowledged = reporter.num_acknowledged
    require(controller.wait() == 1, f"the controller ended with {controller.wait()} {what}")
    require("acknowledged" in controller.said(), f"no word {what}: {controller.last_words()}")
    controller.check_log()
    require(reporter.num_acknowledged == acknowledged, "a report was acknowledged afterwards")


HARMS: tuple[tuple[Callable[[Path, str, Path], None], str], ...] = (
    (delete, ""),
    (delete, "-wal"),
    (replace, ""),
    (copy_over, ""),
    (cut, ""),
    (cut, "-wal"),
)


@fault(
    "It is noticed within a second, nothing more is acknowledged, and the controller ends with a sentence and code 1.",
    brief=True,
)
def files_taken_away(place: Place) -> str:
    """The database or its WAL is deleted, replaced, overwritten by an older copy (cp), or cut short while it is written."""
    done: list[str] = []
    for number in place.rounds(len(HARMS)):
        harm, suffix = HARMS[number % len(HARMS)]
        folder = place.folder / str(number)
        folder.mkdir()
        what = f"after {harm.__name__} of {'the database' if not suffix else suffix[1:]}"
        fleet = Fleet(place, 0, database=folder / "s.db")
        try:
            fleet.__enter__()
            with Reporter(fleet.controller.address, place.dice) as reporter:
                reporter.wait_for_more()
                backup = folder / "backup.db"
                rows(fleet.database, f"VACUUM INTO '{backup}'")
                reporter.wait_for_more(place.dice.randint(50, 5000))
                harm(fleet.database, suffix, backup)
                check_given_up(fleet.controller, reporter, what)
                reporter.worker.unacknowledged.clear()
        finally:
            fleet.kill()
        done.append(what)
    return f"noticed {len(done)} of {len(done)} times: {', '.join(dict.fromkeys(done))}"


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
            reporter.worker.unacknowledged.clear()
        for number in place.rounds(6):
            suffix = ("", "-wal")[number % 2]
            for name in place.folder.glob("speclen.db*"):
                name.unlink()
            for name in copies[suffix].iterdir():
                shutil.copy(name, place.folder)
            if number % 6 < 4:
                scribble(place, fleet.database.with_name(fleet.database.name + suffix))
            else:
                cut(fleet.database, suffix, fleet.database)
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
