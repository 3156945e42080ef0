"""Parts of scripts/gpu_check share its time, and fail when, and only when, something is wrong."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import time
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from speclen.bench.gpu import checks, parts, run, vllm_serving
from speclen.bench.gpu.parts import Part, run_parts
from speclen.bench.gpu.vllm_serving import Block, rates_of
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
    assert "no bundle of it" in run.unpack(tmp_path, dry=False)
    half = len(whole.getvalue()) // 2
    (tmp_path / "piece-1-of-2").write_bytes(whole.getvalue()[:half])
    assert "1 of the 2 pieces" in run.unpack(tmp_path, dry=False)
    (tmp_path / "piece-2-of-2").write_bytes(whole.getvalue()[half:])
    assert run.unpack(tmp_path, dry=True) == "there is no vLLM here"
    assert run.unpack(tmp_path, dry=False) == ""
    assert (tmp_path / "packages" / "site" / "package.py").read_text() == "x = 1"


def test_rates_are_medians_of_the_blocks_that_are_measured() -> None:
    blocks = [Block("adaptive", 4, tokens, 2.0, 10, True) for tokens in (100, 600, 200)]
    rates = rates_of([*blocks, Block("adaptive", 4, 9000, 2.0, 10, False), Block("none", 1, 30, 2.0, 9, True)])
    assert rates["adaptive"] == {"4": 100.0}
    assert rates["none"] == {"1": 15.0}


class FakeEngine:
    """As much of a vllm.LLMEngine as a closed loop uses: every request gets a token a step, two steps after it came."""

    def __init__(self) -> None:
        self.scheduler = SimpleNamespace(steering=SimpleNamespace(num_reported=0), dynamic_sd_lookup=[0, 5, 5, 3])
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=self.scheduler, batch_queue=[]))
        self.left: dict[str, int] = {}
        self.ages: dict[str, int] = {}
        self.most_at_once = self.num_tokens = 0
        self.lengths: list[int] = []

    def add_request(self, name: str, prompt: dict[str, list[int]], sampling: SimpleNamespace) -> None:
        assert len(prompt["prompt_token_ids"]) == vllm_serving.PROMPT_TOKENS
        self.left[name], self.ages[name] = sampling.max_tokens, 0

    def step(self) -> list[SimpleNamespace]:
        self.most_at_once = max(self.most_at_once, len(self.left))
        self.lengths.append(self.scheduler.dynamic_sd_lookup[1])
        outputs = []
        for name in list(self.left):
            self.ages[name] += 1
            if self.ages[name] > 2:
                self.left[name] -= 1
                self.num_tokens += 1
                finished = not self.left[name]
                outputs.append(SimpleNamespace(request_id=name, finished=finished, outputs=[ONE_TOKEN]))
                if finished:
                    del self.left[name]
        return outputs

    def abort_request(self, names: list[str], internal: bool) -> None:
        for name in names:
            del self.left[name]

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)


ONE_TOKEN = SimpleNamespace(token_ids=[7])


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> vllm_serving.Bench:
    vllm, params = types.ModuleType("vllm"), types.ModuleType("vllm.sampling_params")
    vllm.SamplingParams = SimpleNamespace  # type: ignore[attr-defined]
    params.RequestOutputKind = SimpleNamespace(DELTA="delta")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", params)
    return vllm_serving.Bench(FakeEngine(), "bundled:target")


def test_a_block_of_vllm_keeps_so_many_requests_at_once_and_counts_after_their_prompts(
    bench: vllm_serving.Bench,
) -> None:
    found = bench.block("fixed:8", 3, 0.2)
    assert (found.policy, found.requests, found.measured) == ("fixed:8", 3, True)
    assert bench.engine.most_at_once == 3
    assert not bench.engine.left, "what was under way is aborted"
    assert 0 < found.tokens < bench.engine.num_tokens, "the first outputs of the first requests are not counted"
    assert found.num_steps > 0
    assert 0.1 < found.seconds <= 0.3
    assert set(bench.engine.lengths) == {8}
    assert bench.scheduler.steering is None, "vLLM alone"
    assert bench.outputs("none") == [[7] * vllm_serving.CHECKED_TOKENS] * vllm_serving.NUM_CHECKED
    assert bench.engine.lengths[-1] == 0
    bench.block("adaptive", 1, 0.05)
    assert bench.scheduler.dynamic_sd_lookup == [0, 5, 5, 3], "as it was configured"
    assert bench.scheduler.steering is bench.steering


def test_a_plugin_that_gives_up_ends_the_comparison(bench: vllm_serving.Bench) -> None:
    bench.use("adaptive")
    bench.scheduler.steering = None
    with pytest.raises(RuntimeError, match="given up"):
        bench.drain()
