"""Make the faults, one after the other, and say what was found: the work behind `scripts/chaos`."""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from chaos import clients, disk, files, fuzz, kills, messages, network  # noqa: F401  (their faults enter themselves)
from chaos.fault import FAULTS, BreachError, CannotRunError, Fault, Place

HELP = "Do every fault to real processes and print one table: fault, promise, what was found."
MARKS = {True: "held", False: "**broken**", None: "not run"}
BROKEN = Path(__file__).parents[2] / "build" / "chaos"  # logs of faults whose promise was broken, without --keep


@dataclass(frozen=True, slots=True)
class Finding:
    """passed: None where the fault could not be made. found: what was seen, the breach, or why not."""

    fault: str
    does: str
    promise: str
    passed: bool | None
    found: str
    seconds: float
    command: str


def make(fault: Fault, seconds: float, seed: int, folder: Path) -> Finding:
    """One fault in a folder of its own; whatever goes wrong is its finding."""
    place = Place(folder, seconds, random.Random(f"{seed} {fault.name}"))
    folder.mkdir()
    passed: bool | None = True
    try:
        found = fault.run(place)
    except CannotRunError as error:
        passed, found = None, str(error)
    except BreachError as error:
        passed, found = False, str(error)
    except Exception as error:
        traceback.print_exc()
        passed, found = False, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    command = f"scripts/chaos --only {fault.name} --minutes {max(0.1, seconds / 60):.1f} --seed {seed}"
    took_s = round(time.monotonic() - place.started, 1)
    return Finding(fault.name, fault.does, fault.promise, passed, found, took_s, command)


def chosen(only: str, brief: bool) -> list[Fault]:
    """The faults to make, in their order. Exits for an unknown name."""
    if not only:
        return [fault for fault in FAULTS.values() if fault.brief or not brief]
    names = only.split(",")
    if unknown := [name for name in names if name not in FAULTS]:
        sys.exit(f"chaos: --only names {unknown[0]!r}; known are: {', '.join(FAULTS)}")
    return [FAULTS[name] for name in names]


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("scripts/chaos", description=HELP)
    parser.add_argument("--minutes", type=float, default=20.0, help="for all faults together (default: 20)")
    parser.add_argument("--only", default="", metavar="NAME,…", help="these faults alone; --list names them")
    parser.add_argument("--brief", action="store_true", help="the faults of the short run alone")
    parser.add_argument("--seed", type=int, default=1, help="of every random choice (default: 1)")
    parser.add_argument("--list", action="store_true", help="name the faults and end")
    parser.add_argument("--keep", metavar="FOLDER", help="leave logs and databases in this folder")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> None:
    """Exits with 1 where a promise was broken."""
    options = arguments(given)
    if options.list:
        for fault in FAULTS.values():
            print(f"{fault.name:32} {fault.does}")
        return
    findings = run(chosen(options.only, options.brief), options)
    print(table(findings))
    sys.exit(any(each.passed is False for each in findings))


def table(findings: list[Finding]) -> str:
    """As Markdown: docs/explanation/robustness.md keeps one."""
    lines = ["| Fault | Promise | Found | Again with |", "|---|---|---|---|"]
    for each in findings:
        cells = (
            f"**{each.fault}**. {each.does}",
            each.promise,
            f"{MARKS[each.passed]}: {each.found}",
            f"`{each.command}`",
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def run(faults: list[Fault], options: argparse.Namespace) -> list[Finding]:
    """Each fault for its share of the time."""
    findings = []
    total = sum(fault.weight for fault in faults)
    with tempfile.TemporaryDirectory(prefix="speclen-chaos-") as temporary:
        folder = Path(options.keep or temporary).absolute()
        folder.mkdir(exist_ok=True)
        for fault in faults:
            share_s = 60 * options.minutes * fault.weight / total
            print(f"{fault.name}: {fault.does}", file=sys.stderr, flush=True)
            place = folder / f"{fault.name}-{os.getpid()}"
            finding = make(fault, share_s, options.seed, place)
            print(
                f"  {MARKS[finding.passed]} after {finding.seconds:.0f} s: {finding.found}", file=sys.stderr, flush=True
            )
            if finding.passed is False and not options.keep:
                print(f"  logs: {keep_logs(place)}", file=sys.stderr, flush=True)
            findings.append(finding)
    return findings


def keep_logs(folder: Path) -> Path:
    """Copy a fault's logs to where they stay, and return that folder."""
    there = BROKEN / folder.name
    for log in folder.rglob("*.log"):
        at = there / log.relative_to(folder)
        at.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(log, at)
    return there
