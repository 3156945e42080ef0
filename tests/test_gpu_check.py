"""scripts/gpu_check goes through all its parts on a CPU, and fails when, and only when, something is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from speclen.bench.gpu import check, checks
from speclen.bench.gpu.passes import weight_bytes
from speclen.worker.models.loading import load_pair

ROOT = Path(__file__).resolve().parents[1]


def test_a_dry_run_goes_through_everything(tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / "scripts" / "gpu_check", "--dry-run", "--out", tmp_path], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "gpu_check.json").read_text())
    assert [one["passed"] for one in document["checks"]] == [True] * 9
    assert {track["track"] for track in document["tracks"]} == set(check.FULL.tracks)
    for track in document["tracks"]:
        assert set(track["ratios"]) == {"none", "fixed:1", "n-gram"}
        assert track["failures"] == {}
    assert {(cell["batch_size"], cell["speculation_length"]) for cell in document["cells"]} == {
        (1, 0),
        (1, 2),
        (2, 0),
        (2, 2),
    }
    assert {one["model"] for one in document["passes"]} == {"target", "draft"}
    assert all(one["floor_s"] > 0 and one["seconds"] > 0 for one in document["passes"])
    assert document["learned"]["num_steps"] > 10
    assert any(row["num_steps"] for row in document["learned"]["rows"])
    assert "best length over length 0 at batch size 1" in done.stdout
    assert (tmp_path / "gpu_check.png").stat().st_size > 10_000


def test_wrong_tokens_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = checks.generate

    def lying(*arguments: object) -> list[list[int]]:
        return [[*output[:-1], (output[-1] + 1) % 100] for output in honest(*arguments)]  # type: ignore[arg-type]

    monkeypatch.setattr(checks, "generate", lying)
    pair = load_pair("bundled:target", "bundled:draft", "cpu", "float32")
    found = checks.run_checks(pair, check.DRY, check.RerunRecorder())
    failed = [one.name for one in found if not one.passed]
    assert failed == [
        "plain steps put out what the target alone would",
        "recorded steps put out what the target alone would",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check"])
    assert check.main() == 2
    assert "--dry-run" in capsys.readouterr().err


def test_weights_that_a_pass_reads() -> None:
    """The bundled target ties its embeddings: the output layer reads what the input layer looks up."""
    model = load_pair("bundled:target", None, "cpu", "float32").target
    tied = model.config.tie_word_embeddings
    total = sum(parameter.nbytes for parameter in model.parameters())
    assert weight_bytes(model) == total if tied else total - model.get_input_embeddings().weight.nbytes
