"""Every fault of scripts/chaos, made once: its promise holds."""

import random

import chaos.run  # noqa: F401  (registers the faults)
import pytest
from chaos.fault import FAULTS, CannotRunError, Place

SECONDS = 2.0  # of each fault beyond its least number of rounds
LOG_LINES = 60  # of each program, printed with a promise that was broken


@pytest.mark.parametrize("name", FAULTS)
def test_the_promise_of_a_fault_holds(name, tmp_path):
    place = Place(tmp_path, SECONDS, random.Random(name))
    try:
        print(FAULTS[name].run(place))
    except CannotRunError as reason:
        pytest.skip(str(reason))
    except AssertionError:
        for log in sorted(tmp_path.rglob("*.log")):
            print(f"--- {log.name}", *log.read_text(errors="replace").splitlines()[-LOG_LINES:], sep="\n")
        raise
