"""scripts/gpu_check goes through its parts on a CPU."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_dry_run_answers_every_question(tmp_path):
    done = subprocess.run(
        [ROOT / "scripts" / "gpu_check", "--dry-run", "--out", tmp_path], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    answers = dict(line.split(": ", 1) for line in done.stdout.splitlines()[:7])
    about_vllm = ["draft-model", "eagle3", "v1", "hybrid"]
    assert list(answers) == ["cold", "sampling", *about_vllm, "engine"]
    has_vllm = (ROOT / "build/vllm/venv").exists()
    for name, answer in answers.items():
        skipped = name in about_vllm and not has_vllm
        assert answer.startswith("skipped: " if skipped else "pass: "), f"{name}: {answer}"
    for name in ("cold", "sampling", "engine"):
        assert all(json.loads((tmp_path / f"{name}.json").read_text())["checks"].values())


def test_the_gpu_check_imports_only_torch_transformers_and_numpy():
    missing = ["grpc", "google.protobuf", "matplotlib", "rich", "speclen.v1", "structlog", "typer"]
    code = f"import sys; sys.modules.update(dict.fromkeys({missing})); import speclen.bench.gpu.own_engine"
    subprocess.run([sys.executable, "-c", code], check=True)
