"""The short run of scripts/chaos holds, and docs/explanation/robustness.md has every fault that the script makes."""

from __future__ import annotations

import json
import random

import chaos.run
import pytest
from chaos.fault import FAULTS, BreachError, CannotRunError, Fault, Place
from chaos.page import BEGIN, END, PAGE, markdown
from chaos.run import RESULTS, Finding, arguments, make, run, stored_findings

BRIEF_S = 2.0  # of each fault beyond its least number of rounds
LOG_LINES = 60  # of each program, printed with a promise that was broken


def dummy(run) -> Fault:
    return Fault("dummy", "Nothing is done.", "Nothing happens.", run, 1.0, False)


def test_every_fault_is_in_the_page_with_its_promise_and_none_is_broken() -> None:
    findings = stored_findings()
    assert {each.fault for each in findings} == set(FAULTS)
    for each in findings:
        assert each.passed is not False, f"{each.fault}: {each.found}"
        assert (each.does, each.promise) == (FAULTS[each.fault].does, FAULTS[each.fault].promise)
    table = PAGE.read_text().split(BEGIN)[1].split(END)[0].strip()
    assert table == markdown(findings), f"{RESULTS.name} is not what the page shows: scripts/chaos --write-page"


def test_the_million_is_in_the_results() -> None:
    [fuzz] = [each for each in json.loads(RESULTS.read_text()) if each["fault"] == "fuzz"]
    assert int(fuzz["found"].split(" messages")[0].replace(",", "")) >= 1_000_000


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


# Kills have a test of their own, with more of them: test_kill.py.
@pytest.mark.parametrize("name", [name for name, each in FAULTS.items() if each.brief and name != "kill-controller"])
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
