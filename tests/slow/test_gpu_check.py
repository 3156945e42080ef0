"""scripts/gpu_check goes through its parts on a CPU, and finds wrong tokens."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from speclen.bench.gpu import checks
from speclen.worker.backends.torch.recording import RerunRecorder
from speclen.worker.models.loading import load_pair

ROOT = Path(__file__).resolve().parents[2]


def test_a_dry_run_goes_through_everything_but_vllm(tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / "scripts" / "gpu_check", "--dry-run", "--out", tmp_path], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ends = [line.split(" after ")[0] for line in done.stdout.splitlines()[:5]]
    skipped = "skipped: scripts/vllm_check runs it on a CPU"
    assert ends == ["checks: done", "steps: done", "own: done", f"vllm-v1: {skipped}", f"vllm-v2: {skipped}"]
    checked = json.loads((tmp_path / "checks.json").read_text())
    assert [one["passed"] for one in checked["checks"]] == [True] * 6
    steps = json.loads((tmp_path / "steps.json").read_text())
    assert [cell["speculation_length"] for cell in steps["cells"]] == [0, 2]
    rates = json.loads((tmp_path / "own.json").read_text())["tokens_per_s"]
    assert set(rates) == {"adaptive", "fixed:2", "n-gram"}
    assert all(rate > 0 for row in rates.values() for rate in row.values())
    assert (tmp_path / "own.db").exists()


def test_wrong_tokens_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = checks.generate

    def lying(*arguments: object) -> list[list[int]]:
        return [[*output[:-1], (output[-1] + 1) % 100] for output in honest(*arguments)]  # type: ignore[arg-type]

    monkeypatch.setattr(checks, "generate", lying)
    pair = load_pair("bundled:target", "bundled:draft", "cpu", "float32")
    found = checks.run_checks(pair, 6, RerunRecorder())
    failed = [one.name for one in found if not one.passed]
    assert failed == [
        "plain steps generate what the target alone would",
        "captured steps generate what the target alone would",
    ]
