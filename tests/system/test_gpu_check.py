"""Questions of scripts/gpu_check share its time, and fail when, and only when, something is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu_check"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run([SCRIPT], capture_output=True, text=True)
    assert done.returncode == 2
    assert "--dry-run" in done.stderr


def test_questions_that_take_too_long_fail_and_do_not_end_the_others(tmp_path: Path) -> None:
    """With no minutes every question has the second that is the least, in which none ends."""
    command = [SCRIPT, "--dry-run", "--minutes", "0", "--out", tmp_path, "cold", "engine"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"GPU_CHECK_GRACE_S": "1"})
    assert done.returncode == 1, done.stderr
    assert [line.split(",")[0] for line in done.stdout.splitlines()[:2]] == [
        "cold: fail: no time",
        "engine: fail: no time",
    ]


def test_what_is_no_question_is_refused() -> None:
    done = subprocess.run([SCRIPT, "warm"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "warm is neither an option nor a question" in done.stderr


# Where python and timeout only note what questions are given. Modules are looked for all the same.
PYTHON = f"""#!/bin/sh
case "$2" in
  *cuda*) exit ;;
  *find_spec*) exec {sys.executable} "$@" ;;
esac
echo "$*" >>calls
case "$*" in *broken*) exit 1 ;; esac
echo "pass: all"
"""
TIMEOUT = """#!/bin/sh
echo "$3" >>limits
shift 3
exec "$@"
"""


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A folder with a copy of the script, as on a machine with a GPU and all but vLLM, where no question takes any time."""
    for name, content in ((".venv/bin/python", PYTHON), ("bin/timeout", TIMEOUT), ("scripts/gpu_check", "")):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(content or SCRIPT.read_text())
        (tmp_path / name).chmod(0o755)
    return tmp_path


def check(machine: Path, *arguments: str) -> tuple[list[str], list[int], list[str]]:
    """Lines about questions, the seconds that each may take, and their commands."""
    for name in ("calls", "limits"):
        (machine / name).unlink(missing_ok=True)
    environment = os.environ | {"PATH": f"{machine / 'bin'}:{os.environ['PATH']}"}
    said = subprocess.check_output(
        [machine / "scripts" / "gpu_check", *arguments], text=True, env=environment
    ).splitlines()
    limits = [int(line) for line in (machine / "limits").read_text().split()]
    return said, limits, (machine / "calls").read_text().splitlines()


def test_questions_share_14_minutes_and_those_that_cannot_be_asked_leave_theirs_to_the_others(machine: Path) -> None:
    """Of 840 s each has its share of what is left, less some to end in."""
    said, limits, calls = check(machine)
    assert limits == pytest.approx([331, 555, 835], abs=12), "weights 2, 2 and 1 of 5"
    assert [line.partition(":")[0] for line in said if "vLLM is not installed" in line] == [
        *("draft-model", "eagle3", "v1", "hybrid")
    ]
    modules = [call.split()[1].rpartition(".")[2] for call in calls]
    assert modules == ["own_engine", "own_engine", "checks"]


def test_vllm_is_asked_about_from_a_folder_of_packages(machine: Path) -> None:
    (machine / "packages" / "vllm").mkdir(parents=True)
    (machine / "packages" / "vllm" / "__init__.py").touch()
    _, limits, calls = check(machine, "--bundle", "packages")
    assert limits[:4] == pytest.approx([107, 124, 300, 355], abs=12), "weights 2, 2, 4 and 3 of 15"
    for name, call in zip(("draft-model", "eagle3", "v1", "hybrid"), calls[2:6], strict=True):
        assert f"vllm_questions {name} --seconds " in call
