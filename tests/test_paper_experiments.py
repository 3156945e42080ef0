"""scripts/paper_experiments.py: every document says what it was made by, and a claim about gains has a spread."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from speclen.bench.profile.document import ProfileDocument, parse_document
from speclen.controller.estimator.core import ContextKey, Profile, ProfileCell
from speclen.worker.profiling.samples import ProfileResult
from speclen.worker.profiling.settings import ProfileSettings
from speclen.worker.profiling.stats import MeasuredCell

SCRIPTS = Path(__file__).parent.parent / "scripts"
KEY = ContextKey("t#1", "d#1", "cpu:test", "float32", "threads=1")
COMMAND = ["scripts/paper_experiments.py", "sensitivity", "--profile", "p.json"]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The modules by name, found as they find each other."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")  # or the script sets its own, for all tests that follow
    monkeypatch.setattr(sys, "argv", COMMAND)
    yield lambda name: __import__(name)
    for name in ("paper_experiments", "paper_figure", "sensitivity"):
        sys.modules.pop(name, None)


def profile(temperature: float | None, scale: float = 1.0) -> ProfileDocument:
    """Speculation pays at one row, and less at four."""
    cells = tuple(ProfileCell(b, s, scale * (0.010 + 0.001 * s * b), num_steps=20) for b in (1, 4) for s in range(4))
    details = {} if temperature is None else {"settings": {"temperature": temperature}, "commit": "0123456789ab"}
    return ProfileDocument(KEY, Profile(cells, (0.8, 0.6, 0.5), (90, 80, 60)), "2026-01-01T00:00:00", details=details)


def save(path: Path, content: dict[str, Any]) -> Path:
    path.write_text(json.dumps(content))
    return path


@pytest.fixture
def small(scripts: Any, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Two cells instead of 24, and short requests."""
    sensitivity: ModuleType = scripts("sensitivity")
    for name, values in {"LOADS": (0.3, 0.9), "VARIATIONS": (1.0,), "BURSTS": (1,), "MEAN_TOKENS": 12}.items():
        monkeypatch.setattr(sensitivity, name, values)
    return sensitivity


def test_every_profile_of_every_experiment_has_machine_and_commit(
    scripts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only those of `lengths` once had: the fact was given by the caller."""
    paper = scripts("paper_experiments")
    result = ProfileResult((MeasuredCell(1, 0, 0.01, 1e-4, 9, 0, 50.0),), (0.8,), (10,), 0.0, None, 1.0)
    monkeypatch.setattr(paper, "measure", lambda *_: result)
    monkeypatch.setattr(paper, "core_context", lambda pair: KEY)
    settings = ProfileSettings((1,), (0,), 1.0)
    document = paper.document_of(SimpleNamespace(device=torch.device("cpu")), settings, "title", survival="borrowed")
    details = document.details
    assert details["command"] == "python scripts/paper_experiments.py sensitivity --profile p.json"
    assert {"commit", "uncommitted_changes", "machine", "settings", "title", "survival"} <= details.keys()
    assert parse_document(json.loads(json.dumps(document.to_json()))).profile == document.profile


def test_sensitivity_names_its_profiles_and_what_made_both(scripts: Any, small: ModuleType, tmp_path: Path) -> None:
    paths = [save(tmp_path / f"{t}.json", profile(t).to_json()) for t in (0.0, 1.0)]
    arguments = ["sensitivity", "--num-requests", "12", "--out", str(tmp_path)]
    for path in paths:
        arguments += ["--profile", str(path)]
    shown = CliRunner().invoke(scripts("paper_experiments").app, arguments, catch_exceptions=False)
    result = json.loads((tmp_path / "sensitivity.json").read_text())
    assert {"command", "commit", "uncommitted_changes", "machine"} <= result.keys()
    assert list(result["profiles"]) == ["temperature 0", "temperature 1"]
    for path, of in zip(paths, result["profiles"].values(), strict=True):
        assert of["profile"]["file"] == str(path)
        assert of["profile"]["details"]["commit"] == "0123456789ab"
        assert len(of["cells"]) == 2
        assert all(len(seeds) == 3 for cell in of["cells"] for seeds in cell["ms_per_token"].values())
        assert of["gains"]["none"]["median"]["repeats"] == 3
        assert f"length {of['overall_fixed']} everywhere" in shown.stdout
    assert (tmp_path / "sensitivity.svg").stat().st_size > 5000


def test_what_is_not_said_twice_and_what_cannot_be_read(scripts: Any, tmp_path: Path) -> None:
    sensitivity = scripts("sensitivity")
    first = save(tmp_path / "first.json", profile(0.0).to_json())
    several = save(tmp_path / "lengths.json", {f"temperature {t}": profile(t).to_json() for t in (0, 1)})
    nameless = save(tmp_path / "exported.json", profile(None).to_json())
    assert list(sensitivity.profiles_in([several, nameless])) == ["temperature 0", "temperature 1", "exported"]
    with pytest.raises(ValueError, match=r"lengths.json holds 'temperature 0', and so does .*first.json"):
        sensitivity.profiles_in([first, several])
    missing = ["sensitivity", "--profile", str(tmp_path / "missing.json"), "--out", str(tmp_path)]
    answer = CliRunner().invoke(scripts("paper_experiments").app, missing)
    assert answer.exit_code == 1
    assert "missing.json" in str(answer.exception)


def test_gains_are_of_the_same_requests_and_spread_over_seeds(small: ModuleType) -> None:
    latencies = {
        "0": [8.0, 9.0, 10.0],
        "2": [2.0, 3.0, 4.0],
        "table": [2.0, 3.0, 5.0],
        "adaptive": [2.0, 2.0, 5.0],
        "adaptive_cold": [4.0, 3.0, 4.0],
    }
    cells = [{"load": load, "ms_per_token": latencies} for load in small.LOADS]
    overall = small.overall_fixed(cells)
    assert overall == small.best_fixed(latencies) == "2"
    for cell in cells:
        cell["gains"] = small.gains_of(latencies, overall)
    assert cells[0]["gains"]["none"] == [4.0, 4.5, 2.0]
    assert cells[0]["gains"]["cold_best_fixed"] == [0.5, 1.0, 1.0]
    found = small.summary(cells, overall)
    assert found["gains"]["none"] == {
        "median": {"median": 4.0, "low": 2.0, "high": 4.5, "repeats": 3},
        "least": 2.0,
        "most": 4.5,
    }
    assert found["times_overall_fixed"]["0"]["most"] == 4.0
    table = small.table_of({"overall_fixed": 2, **found})
    assert "| no speculation | 4 (2 to 4.5) | 2 | 4.5 |" in table
    assert "| - at a load of 0.9 | 1 (0.8 to 1.5) | 0.8 | 1.5 |" in table


def test_a_machine_that_is_slower_by_a_factor_has_the_same_gains(small: ModuleType) -> None:
    """Loads are shares of its own capacity, so nothing but the clock changes."""
    slow, quick = (small.sensitivity_of(profile(0.0, scale), 12) for scale in (4.0, 1.0))
    for name in ("none", "overall_fixed", "best_fixed"):
        assert slow["gains"][name]["most"] == pytest.approx(quick["gains"][name]["most"], rel=0.02)
    assert slow["table"] == quick["table"]
