"""Inject the faults, one after the other, and print the findings: the program behind `scripts/chaos`."""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import time
import traceback
from pathlib import Path

from chaos import disk, fuzz, kills, network  # noqa: F401  (they register their faults)
from chaos.fault import FAULTS, CannotRunError, Fault, Place

HELP = "Cause every fault in real processes, and report for each whether its promise held, and what was found."
FOLDER = Path(__file__).parents[2] / "build" / "chaos"  # logs and databases of faults whose promise was broken


def make(fault: Fault, seconds: float, seed: int) -> bool:
    """True unless the fault's promise was broken. Whatever goes wrong is its finding, and then its files stay."""
    print(f"{fault.name}: {fault.does} {fault.promise}", flush=True)
    folder = FOLDER / fault.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    place = Place(folder, seconds, random.Random(f"{seed} {fault.name}"))
    try:
        end, found = "held", fault.run(place)
    except CannotRunError as error:
        end, found = "not run", str(error)
    except AssertionError as error:
        end, found = "BROKEN", str(error)
    except Exception as error:
        traceback.print_exc()
        end, found = "BROKEN", repr(error)
    print(f"  {end} after {time.monotonic() - place.started:.0f} s: {found}", flush=True)
    if end == "BROKEN":
        print(f"  logs: {folder}; again: scripts/chaos --only {fault.name} --seed {seed}", flush=True)
        return False
    shutil.rmtree(folder)
    return True


def chosen(only: str) -> list[Fault]:
    """The faults to make, in their order. Exits for an unknown name."""
    names = only.split(",") if only else [*FAULTS]
    if unknown := [name for name in names if name not in FAULTS]:
        sys.exit(f"chaos: --only names {unknown[0]!r}; known are: {', '.join(FAULTS)}")
    return [FAULTS[name] for name in names]


def main() -> None:
    """Exits with 1 where a promise was broken."""
    parser = argparse.ArgumentParser("scripts/chaos", description=HELP)
    parser.add_argument("--minutes", type=float, default=20.0, help="for all faults together (default: 20)")
    parser.add_argument("--only", default="", metavar="NAME,…", help=f"these alone, of {', '.join(FAULTS)}")
    parser.add_argument("--seed", type=int, default=1, help="of every random choice (default: 1)")
    options = parser.parse_args()
    faults = chosen(options.only)
    kept = [make(fault, 60 * options.minutes / len(faults), options.seed) for fault in faults]
    sys.exit(not all(kept))
