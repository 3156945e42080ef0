"""Other people's programs: their packages, their command lines, and when they have passed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from speclen.bench.clients.openai_cases import MODEL

URL = "http://127.0.0.1:7099"
KEY = "a-key-of-this-check"
TOKENIZER = Path(__file__).resolve().parents[2] / "worker" / "bundled" / "target"
ENVIRONMENTS = Path(".clients").resolve()  # of the programs
TORCH = "torch==2.13.0"  # pinned, since an unpinned one brings gigabytes for GPUs


class NotInstalledError(Exception):
    """A program that this machine cannot have."""


@dataclass(frozen=True, slots=True)
class Program:
    """runs: arguments by what they check. judge: from its folder and its output, a remark; raises where it failed."""

    packages: tuple[str, ...]
    runs: dict[str, list[str]]
    judge: Callable[[Path, str], str]

    def run(self, arguments: list[str]) -> str:
        """Run it in a fresh folder. Raises NotInstalledError; ValueError, or whatever `judge` raises, where it failed."""
        name = self.packages[0].partition("==")[0]
        install(ENVIRONMENTS / name, "\n".join(self.packages))
        # Offline it would take a folder for the name of something on the hub.
        variables = {key: value for key, value in os.environ.items() if key not in ("HF_HUB_OFFLINE", "PYTHONPATH")}
        command = [str(ENVIRONMENTS / name / "bin" / name), *arguments]
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                command, cwd=folder, env=variables, capture_output=True, text=True, timeout=600, check=False
            )
            if done.returncode:
                print(done.stdout[-6000:], done.stderr[-3000:], file=sys.stderr)
                raise ValueError(f"exit code {done.returncode}")
            return self.judge(Path(folder), done.stdout)


def install(environment: Path, wanted: str) -> None:
    """Make the environment unless it is there. Raises NotInstalledError."""
    stamp = environment / ".installed"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(environment)],
        [str(environment / "bin" / "python"), "-m", "pip", "install", "-q", *wanted.split()],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NotInstalledError((done.stderr.strip().splitlines() or ["no reason given"])[-1][:200])
    stamp.write_text(wanted)


def judge_schemathesis(folder: Path, output: str) -> str:
    return next((line.strip() for line in output.splitlines() if "generated" in line), "no summary")


def judge_aiperf(folder: Path, output: str) -> str:
    found = json.loads((folder / "profile_export_aiperf.json").read_text())
    done, errors = found["request_count"]["avg"], found["request_error_rate"]["avg"]
    remark = f"{done:.0f} requests, {errors:.0f}% errors"
    if done != 32 or errors or "Spec Decode" not in output:
        raise ValueError(remark)
    return f"{remark}, acceptance length {found['spec_decode_acceptance_length']['avg']:.2f}"


def judge_guidellm(folder: Path, output: str) -> str:
    (benchmark,) = json.loads((folder / "benchmarks.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    if totals["successful"] != 32 or totals["errored"]:
        raise ValueError(json.dumps(totals))
    return json.dumps(totals)


# Not checked: a request may be right by the schema and yet ask for token ids or lengths that this model does not have.
SCHEMATHESIS = f"""run {URL}/openapi.json --exclude-checks positive_data_acceptance --phases examples,coverage,fuzzing
    -n 20 --generation-deterministic --request-timeout 60 --exclude-path /metrics"""
AIPERF = f"""profile --url {URL} --model {MODEL} --streaming --api-key {KEY} --tokenizer {TOKENIZER} --concurrency 8
    --isl 64 --osl 32 --request-count 32 --extra-inputs include_metrics:true --extra-inputs ignore_eos:true
    --ui none --artifact-dir . --endpoint-type"""
GUIDELLM = f"""run --tokenizer kind=huggingface_auto,model={TOKENIZER} --disable-progress
    --data kind=synthetic_text,prompt_tokens=64,output_tokens=32 --profile kind=concurrent,streams=8
    --constraint kind=max_requests,count=32 --backend
    kind=openai_http,target={URL},model={MODEL},api_key={KEY},request_format="""

PROGRAMS = {
    "schemathesis": Program(
        ("schemathesis==4.32.5",),
        {"every route": [*SCHEMATHESIS.split(), "-H", f"Authorization: Bearer {KEY}"]},
        judge_schemathesis,
    ),
    "aiperf": Program(
        ("aiperf==0.13.0", TORCH),
        {f"{kind}, streamed": [*AIPERF.split(), kind] for kind in ("completions", "chat")},
        judge_aiperf,
    ),
    "guidellm": Program(
        ("guidellm==0.8.1", TORCH),
        {f"{kind}, streamed": f"{GUIDELLM}{kind}".split() for kind in ("/v1/completions", "/v1/chat/completions")},
        judge_guidellm,
    ),
}
