"""Parts of scripts/gpu_check share its time, and fail when, and only when, something is wrong."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import torch

from speclen.bench.gpu import checks, parts, run
from speclen.bench.gpu.parts import Part, run_parts
from speclen.worker.backends.torch.recording import RerunRecorder
from speclen.worker.models.loading import load_pair

WRITE = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('{}')"


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
def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check"])
    assert run.main() == 2
    assert "--dry-run" in capsys.readouterr().err


def program(tmp_path: Path, name: str, code: str, share: float = 1.0, missing: str = "") -> Part:
    result = tmp_path / f"{name}.json"
    return Part(result, share, lambda seconds: [sys.executable, "-c", code, str(result), str(seconds)], (), missing)


class Patient(subprocess.Popen[bytes]):
    """A process whose time begins when its program is ready, however busy the machine is."""

    def wait(self, timeout: float | None = None) -> int:
        while self.poll() is None and not Path(self.args[3]).with_suffix(".ready").exists():  # type: ignore[index]
            time.sleep(0.01)
        return super().wait(timeout)


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "GRACE_S", 2.0)


READY = "import pathlib, signal, sys, time; ready = pathlib.Path(sys.argv[1]).with_suffix('.ready')"
SLEEP = "ready.touch(); time.sleep(600)"


@pytest.mark.usefixtures("short_grace")
def test_parts_that_fail_or_take_too_long_do_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", Patient)
    told: list[str] = []
    interrupted = f"{READY}\ntry: {SLEEP}\nexcept KeyboardInterrupt: ready.unlink(); {WRITE}; print('in time')"
    deaf = f"{READY}; signal.signal(signal.SIGINT, signal.SIG_IGN); {WRITE}; {SLEEP}"
    all_parts = [
        program(tmp_path, "broken", "import sys; print('out of memory'); sys.exit(3)"),
        program(tmp_path, "absent", "", missing="it is not installed"),
        program(tmp_path, "interrupted", interrupted),
        program(tmp_path, "deaf", deaf),
        program(tmp_path, "without-result", f"{READY}; {SLEEP}"),
        program(tmp_path, "good", f"{WRITE}; print('all is well')"),
    ]
    outcomes = run_parts(all_parts, 0.0, told.append)  # each has the second that is the least
    assert {one.part: one.end for one in outcomes} == {
        "broken": "failed",
        "absent": "skipped",
        "interrupted": "cut off",
        "deaf": "cut off",
        "without-result": "failed",
        "good": "done",
    }
    assert [one.words for one in outcomes][:3] == ["out of memory", "it is not installed", "in time"]
    assert outcomes[-1].words == "all is well"
    assert len(told) == len(all_parts)


@pytest.mark.usefixtures("short_grace")
def test_time_that_a_part_does_not_use_is_for_the_next(tmp_path: Path) -> None:
    note = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(sys.argv[2])"
    run_parts([program(tmp_path, "first", note), program(tmp_path, "second", note)], 100.0, str)
    first, second = (float((tmp_path / f"{name}.json").read_text()) for name in ("first", "second"))
    assert first == pytest.approx(48.0, abs=1.0)
    assert second > 60.0


def test_a_bundle_is_put_together_from_its_pieces(tmp_path: Path) -> None:
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w:xz") as archive:
        entry = tarfile.TarInfo("site/package.py")
        entry.size = 5
        archive.addfile(entry, io.BytesIO(b"x = 1"))
    assert "no bundle of it" in run.unpack(tmp_path)
    half = len(whole.getvalue()) // 2
    (tmp_path / "piece-1-of-2").write_bytes(whole.getvalue()[:half])
    assert "1 of the 2 pieces" in run.unpack(tmp_path)
    (tmp_path / "piece-2-of-2").write_bytes(whole.getvalue()[half:])
    assert run.unpack(tmp_path) == ""
    assert (tmp_path / "packages" / "site" / "package.py").read_text() == "x = 1"
