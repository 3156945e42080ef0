"""scripts/paper_experiments.py: every document says what it was made by, and a claim about gains has a spread."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from speclen.bench.profile.document import parse_document
from speclen.records import ContextKey
from speclen.worker.profiling.samples import ProfileResult
from speclen.worker.profiling.settings import ProfileSettings
from speclen.worker.profiling.stats import MeasuredCell

SCRIPTS = Path(__file__).parent.parent / "scripts"
KEY = ContextKey("t#1", "d#1", "cpu:test", "float32", "threads=1")
COMMAND = ["scripts/paper_experiments.py", "lengths", "--threads", "2"]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The modules by name, found as they find each other."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")  # or the script sets its own, for all tests that follow
    monkeypatch.setattr(sys, "argv", COMMAND)
    yield lambda name: __import__(name)
    for name in ("paper_experiments", "paper_figure"):
        sys.modules.pop(name, None)


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
    assert details["command"] == "python scripts/paper_experiments.py lengths --threads 2"
    assert {"commit", "uncommitted_changes", "machine", "settings", "title", "survival"} <= details.keys()
    assert parse_document(json.loads(json.dumps(document.to_json()))).profile == document.profile
