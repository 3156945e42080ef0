"""The openai client, a crowd, schemathesis, aiperf and guidellm against a worker with the bundled pair.

Each program gets an environment of its own under --envs, made once; one that cannot be installed is said to be so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import openai

from speclen.bench.clients.crowd import NUM_DISCONNECTS, NUM_STREAMS, Crowd, disconnects, streams
from speclen.bench.clients.openai_cases import CASES
from speclen.bench.findings import Report
from speclen.cli.support.errors import UserError
from speclen.cli.support.processes import Child

MODEL = "bundled-pair"
KEY = "a-key-of-this-check"
TEMPLATE = "{% for m in messages %}# {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}def {% endif %}"
TOKENIZER = Path(__file__).resolve().parents[2] / "worker" / "bundled" / "target"
NUM_REQUESTS = 32

# With torch pinned, since an unpinned one brings gigabytes for GPUs.
PACKAGES = {
    "schemathesis": ["schemathesis==4.32.5"],
    "aiperf": ["aiperf==0.13.0", "torch==2.13.0"],
    "guidellm": ["guidellm==0.8.1", "torch==2.13.0"],
}
# Not checked: a request may be right by the schema and yet ask for token ids or lengths that this model does not have.
SCHEMATHESIS = ["--exclude-checks", "positive_data_acceptance", "--phases", "examples,coverage,fuzzing"]


# Of the worker. Schemathesis asks for 64 sequences without a limit again and again: short ones, then.
OPTIONS = {"crowd": ["--max-batch-size", "16"], "schemathesis": ["--max-kv-tokens", "256", "--max-length", "2"]}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one program. passed None: it could not be run."""

    program: str
    what: str
    passed: bool | None
    remark: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Place:
    """Addresses of the worker, and folders of the programs. envs: folder of their environments."""

    url: str
    folder: Path
    envs: Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", type=Path, default=Path(".clients"), help="Folder of the programs' environments.")
    parser.add_argument(
        "--only", default="openai,crowd,schemathesis,aiperf,guidellm", help="Programs, separated by commas."
    )
    parser.add_argument("--listen", default="127.0.0.1:7098", help="Address of the worker; HTTP one port further.")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        findings = check(arguments, Path(folder))
    marks = {True: "passed", False: "FAILED", None: "not run"}
    rows = [(each.program, each.what, marks[each.passed], str(each.seconds), each.remark) for each in findings]
    Report().table(("Program", "What", "", "s", "Remark"), rows)
    sys.exit(any(finding.passed is False for finding in findings))


def check(arguments: argparse.Namespace, folder: Path) -> list[Finding]:
    """Every program with a worker of its own, one after the other."""
    findings = []
    for name in arguments.only.split(","):
        print(f"{name} …", file=sys.stderr)
        try:
            findings += check_one(name, arguments, folder)
        except UserError as error:  # of its worker; the other programs have workers of their own
            findings.append(Finding(name, "everything", False, str(error), 0.0))
    return findings


def check_one(name: str, arguments: argparse.Namespace, folder: Path) -> list[Finding]:
    host, _, port = arguments.listen.rpartition(":")
    http = f"{host}:{int(port) + 1}"
    worker = start_worker(arguments.listen, http, folder, OPTIONS.get(name, []))
    try:
        worker.wait_until_serving(120, lambda _: None)
        return PROGRAMS[name](Place(f"http://{http}", folder, arguments.envs.resolve()))
    finally:
        worker.stop(timeout_s=20)


def start_worker(listen: str, http: str, folder: Path, further: list[str]) -> Child:
    key, template = folder / "key", folder / "chat.jinja"
    key.write_text(KEY)
    template.write_text(TEMPLATE)
    options = ["--controller", "", "--served-model-name", MODEL, "--chat-template", str(template), *further]
    options += ["--listen", listen, "--http-listen", http, "--api-key-file", str(key)]
    worker = Child("worker", ["worker", *options], listen, folder / "worker.log")
    worker.start()
    return worker


def run_openai(place: Place) -> list[Finding]:
    findings = []
    with openai.OpenAI(base_url=f"{place.url}/v1", api_key=KEY, max_retries=0) as client:
        for case in CASES:
            started, problem = time.monotonic(), ""
            try:
                case(client, MODEL)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            what = case.__name__.replace("_", " ")
            findings.append(Finding(f"openai {version('openai')}", what, not problem, problem, elapsed(started)))
    return findings


def run_crowd(place: Place) -> list[Finding]:
    crowd = Crowd(place.url.removeprefix("http://"), KEY)
    # In this order: the disconnects must not have left anything that keeps others out.
    whats: dict[str, Callable[[Crowd], Coroutine[Any, Any, tuple[bool, str]]]] = {
        f"{NUM_STREAMS:,} streams at once on 16 rows": streams,
        f"{NUM_DISCONNECTS:,} clients that go away": disconnects,
        f"{NUM_STREAMS:,} streams again": streams,
    }
    findings = []
    for what, act in whats.items():
        started = time.monotonic()
        passed, remark = asyncio.run(act(crowd))
        findings.append(Finding("plain sockets", what, passed, remark, elapsed(started)))
    return findings


def run_schemathesis(place: Place) -> list[Finding]:
    def judge(folder: Path, output: str) -> tuple[bool, str]:
        summary = next((line.strip() for line in output.splitlines() if "generated" in line), "no summary")
        return True, summary  # its exit status says the rest

    command = ["run", f"{place.url}/openapi.json", "-H", f"Authorization: Bearer {KEY}", *SCHEMATHESIS]
    command += ["-n", "20", "--generation-deterministic", "--request-timeout", "60", "--exclude-path", "/metrics"]
    return [run_program("schemathesis", "every route", command, place, judge)]


def run_aiperf(place: Place) -> list[Finding]:
    def judge(folder: Path, output: str) -> tuple[bool, str]:
        found = json.loads((folder / "profile_export_aiperf.json").read_text())
        done, rate = found["request_count"]["avg"], found["request_error_rate"]["avg"]
        length = found["spec_decode_acceptance_length"]["avg"]
        remark = f"{done:.0f} requests, {rate:.0f}% errors, acceptance length {length:.2f}"
        return done == NUM_REQUESTS and not rate and "Spec Decode" in output, remark

    findings = []
    for kind in ("completions", "chat"):
        command = ["profile", "--url", place.url, "--model", MODEL, "--endpoint-type", kind, "--streaming"]
        command += ["--api-key", KEY, "--tokenizer", str(TOKENIZER), "--concurrency", "8", "--isl", "64", "--osl", "32"]
        command += ["--request-count", str(NUM_REQUESTS), "--extra-inputs", "include_metrics:true"]
        command += ["--extra-inputs", "ignore_eos:true", "--ui", "none", "--artifact-dir", "."]
        findings.append(run_program("aiperf", f"{kind}, streamed", command, place, judge))
    return findings


def run_guidellm(place: Place) -> list[Finding]:
    def judge(folder: Path, output: str) -> tuple[bool, str]:
        (benchmark,) = json.loads((folder / "benchmarks.json").read_text())["benchmarks"]
        totals = benchmark["metrics"]["request_totals"]
        return totals["successful"] == NUM_REQUESTS and not totals["errored"], json.dumps(totals)

    findings = []
    for kind in ("/v1/completions", "/v1/chat/completions"):
        backend = f"kind=openai_http,target={place.url},model={MODEL},api_key={KEY},request_format={kind}"
        command = ["run", "--backend", backend, "--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}"]
        command += ["--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=32"]
        command += ["--profile", "kind=concurrent,streams=8", "--disable-progress"]
        command += ["--constraint", f"kind=max_requests,count={NUM_REQUESTS}"]
        findings.append(run_program("guidellm", f"{kind}, streamed", command, place, judge))
    return findings


def run_program(
    name: str,
    what: str,
    arguments: list[str],
    place: Place,
    judge: Callable[[Path, str], tuple[bool, str]],
) -> Finding:
    """Run an installed program in a fresh folder. judge: from that folder and its output, whether it passed, and why."""
    problem = install(name, place.envs / name)
    package = PACKAGES[name][0].replace("==", " ")
    if problem:
        return Finding(package, what, None, f"cannot be installed: {problem}", 0.0)
    folder = Path(tempfile.mkdtemp(dir=place.folder))
    started = time.monotonic()
    # Offline it would take a folder for the name of something on the hub.
    environment = {key: value for key, value in os.environ.items() if key not in ("HF_HUB_OFFLINE", "PYTHONPATH")}
    command = [str(place.envs / name / "bin" / name), *arguments]
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
        )
        passed, remark = judge(folder, done.stdout)
        passed = passed and done.returncode == 0
    except (subprocess.TimeoutExpired, OSError, KeyError, ValueError) as error:
        passed, remark = False, f"{type(error).__name__}: {error}"
    if not passed:
        print(done.stdout[-6000:], done.stderr[-3000:], file=sys.stderr)
    return Finding(package, what, passed, remark, elapsed(started))


def install(name: str, environment: Path) -> str:
    """Make the environment unless it is there; what went wrong, or nothing."""
    stamp = environment / ".installed"
    wanted = "\n".join(PACKAGES[name])
    if stamp.exists() and stamp.read_text() == wanted:
        return ""
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(environment)],
        [str(environment / "bin" / "python"), "-m", "pip", "install", "-q", *PACKAGES[name]],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return (done.stderr.strip().splitlines() or ["no reason given"])[-1][:200]
    stamp.write_text(wanted)
    return ""


def elapsed(started: float) -> float:
    return round(time.monotonic() - started, 1)


PROGRAMS: dict[str, Callable[[Place], list[Finding]]] = {
    "openai": run_openai,
    "crowd": run_crowd,
    "schemathesis": run_schemathesis,
    "aiperf": run_aiperf,
    "guidellm": run_guidellm,
}

if __name__ == "__main__":
    main()
