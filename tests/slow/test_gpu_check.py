"""scripts/gpu_check goes through its parts on a CPU."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_dry_run_goes_through_everything_but_vllm(tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / "scripts" / "gpu_check", "--dry-run", "--out", tmp_path, "--bundle", tmp_path / "none"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "gpu_check.json").read_text())
    ends = {one["part"]: one["end"] for one in document["parts"]}
    assert ends == {"checks": "done", "steps": "done", "own": "done", "vllm-v1": "skipped", "vllm-v2": "skipped"}
    assert "vllm-v1: skipped after 0 s: scripts/vllm_check runs it on a CPU" in done.stdout
    checked = json.loads((tmp_path / "checks.json").read_text())
    assert [one["passed"] for one in checked["checks"]] == [True] * 6
    steps = json.loads((tmp_path / "steps.json").read_text())
    assert [cell["speculation_length"] for cell in steps["cells"]] == [0, 2]
    assert set(document["tokens_per_s"]) == {"own"}
    assert set(document["tokens_per_s"]["own"]) == {"adaptive", "fixed:2", "n-gram"}
    for rates in document["tokens_per_s"]["own"].values():
        assert set(rates) == {"1", "4", "16", "32"}
        assert all(rate > 0 for rate in rates.values())
    assert (tmp_path / "own.db").exists()
