"""Parts of scripts/gpu_check share its time, and fail when, and only when, something is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
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
        "plain steps generate what the target alone would",
        "captured steps generate what the target alone would",
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


# Where python and timeout only note what parts are given. Modules are looked for all the same.
PYTHON = f"""#!/bin/sh
case "$2" in
  *cuda*) exit ;;
  *find_spec*) exec {sys.executable} "$@" ;;
esac
echo "$*" >>calls
"""
TIMEOUT = """#!/bin/sh
echo "$3" >>limits
shift 3
exec "$@"
"""


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A folder with a copy of the script, as on a machine with a GPU and all but vLLM, where no part takes any time."""
    for name, content in ((".venv/bin/python", PYTHON), ("bin/timeout", TIMEOUT), ("scripts/gpu_check", "")):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(content or SCRIPT.read_text())
        (tmp_path / name).chmod(0o755)
    return tmp_path


def check(machine: Path, *arguments: str) -> tuple[list[str], list[int], list[str]]:
    """Lines about parts, the seconds that each may take, and their commands."""
    for name in ("calls", "limits"):
        (machine / name).unlink(missing_ok=True)
    environment = os.environ | {"PATH": f"{machine / 'bin'}:{os.environ['PATH']}"}
    said = subprocess.check_output(
        [machine / "scripts" / "gpu_check", *arguments], text=True, env=environment
    ).splitlines()
    limits = [int(line) for line in (machine / "limits").read_text().split()]
    return said, limits, (machine / "calls").read_text().splitlines()


def test_parts_share_14_minutes_and_those_that_cannot_run_leave_theirs_to_the_others(machine: Path) -> None:
    """Of 840 s each has its share of what is left, less 20 s to end in, of which a comparison needs 120 to begin."""
    said, limits, calls = check(machine)
    assert limits == pytest.approx([166, 220, 820], abs=10), "shares 2, 2 and 5 of 9"
    minutes = float(calls[2].partition("--minutes ")[2].split()[0])
    assert 60 * minutes == pytest.approx(limits[2] - 120, abs=0.1)
    assert [line.partition(":")[0] for line in said if "vLLM is not installed" in line] == ["vllm-v1", "vllm-v2"]


def test_vllm_takes_part_from_a_folder_of_packages(machine: Path) -> None:
    (machine / "packages" / "vllm").mkdir(parents=True)
    (machine / "packages" / "vllm" / "__init__.py").touch()
    _, limits, calls = check(machine, "--bundle", "packages")
    assert limits == pytest.approx([92, 109, 361, 400, 820], abs=10), "shares 2, 2, 5, 3 and 3 of 15"
    for name, limit, call in zip(("v1", "v2"), limits[3:], calls[3:5], strict=True):
        assert f"--runner {name} --seconds {limit} " in call
