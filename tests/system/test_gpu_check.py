"""Parts of scripts/gpu_check share its time, and fail when, and only when, something is wrong."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

from speclen.bench.gpu import checks
from speclen.worker.backends.torch.recording import RerunRecorder
from speclen.worker.models.loading import load_pair

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu_check"


def test_wrong_tokens_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = checks.generate

    def lying(*arguments: object) -> list[list[int]]:
        return [[*output[:-1], (output[-1] + 1) % 100] for output in honest(*arguments)]  # type: ignore[arg-type]

    monkeypatch.setattr(checks, "generate", lying)
    pair = load_pair("bundled:target", "bundled:draft", "cpu", "float32")
    found = checks.run_checks(pair, 6, RerunRecorder())
    failed = [one.name for one in found if not one.passed]
    assert failed == [
        "plain steps put out what the target alone would",
        "recorded steps put out what the target alone would",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run([SCRIPT], capture_output=True, text=True)
    assert done.returncode == 2
    assert "--dry-run" in done.stderr


def test_parts_that_take_too_long_fail_without_a_result_and_do_not_end_the_others(tmp_path: Path) -> None:
    """With no minutes every part has the second that is the least, in which none ends."""
    command = [SCRIPT, "--dry-run", "--minutes", "0", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"GPU_CHECK_GRACE_S": "1"})
    assert done.returncode == 1, done.stderr
    ends = [line.split(" after ")[0] for line in done.stdout.splitlines()]
    assert ends[:3] == ["checks: failed", "steps: failed", "own: failed"]
    assert "vllm-v2: skipped" in done.stdout
