"""The short run of scripts/chaos holds."""

from __future__ import annotations

import random

import chaos.run
import pytest
from chaos.fault import FAULTS, BreachError, CannotRunError, Fault, Place
from chaos.run import Finding, arguments, make, run

BRIEF_S = 2.0  # of each fault beyond its least number of rounds
LOG_LINES = 60  # of each program, printed with a promise that was broken


def dummy(run) -> Fault:
    return Fault("dummy", "Nothing is done.", "Nothing happens.", run, 1.0, False)


@pytest.mark.parametrize(
    ("error", "passed"),
    [(None, True), (BreachError("lost"), False), (CannotRunError("no"), None), (KeyError("x"), False)],
)
def test_a_breach_is_told_from_what_cannot_be_made(tmp_path, error, passed) -> None:
    def run(place: Place) -> str:
        if error is not None:
            raise error
        return "well"

    finding = make(dummy(run), 1.0, 1, tmp_path / "place")
    assert finding.passed is passed
    assert isinstance(finding, Finding)


def test_logs_of_a_broken_promise_stay(tmp_path, monkeypatch, capsys) -> None:
    """Story: a worker had ended in one of 23 faults, and its log had gone with the folder."""

    def run_it(place: Place) -> str:
        (place.folder / "worker.log").write_text("why")
        raise BreachError("it ended")

    monkeypatch.setattr(chaos.run, "BROKEN", tmp_path)
    run([dummy(run_it)], arguments(["--minutes", "0.01"]))
    (left,) = tmp_path.iterdir()
    assert (left / "worker.log").read_text() == "why"
    assert f"logs: {left}" in capsys.readouterr().err


def test_dice_are_the_same_for_the_same_seed(tmp_path) -> None:
    numbers = [make(dummy(lambda place: str(place.dice.random())), 1.0, 7, tmp_path / name).found for name in "ab"]
    assert numbers[0] == numbers[1]


@pytest.mark.parametrize("name", [name for name, each in FAULTS.items() if each.brief])
def test_the_short_run(name, tmp_path) -> None:
    place = Place(tmp_path, BRIEF_S, random.Random(name))
    try:
        print(FAULTS[name].run(place))
    except CannotRunError as reason:
        pytest.skip(str(reason))
    except BreachError:
        for log in sorted(tmp_path.rglob("*.log")):
            print(f"--- {log.name}", *log.read_text(errors="replace").splitlines()[-LOG_LINES:], sep="\n")
        raise
