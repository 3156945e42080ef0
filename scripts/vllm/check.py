"""Stages of scripts/vllm_check. Runs in the project's environment; vLLM runs in its own."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import typer
from compare import measure
from learning import learn
from load import texts
from servers import MAX_BATCH, Server, controller, free_port, vllm
from tables import exported

from speclen.bench.findings import Report
from speclen.worker.models.devices import processor_name

LONGEST = 5
PLAIN = {"num_speculative_tokens": LONGEST, "num_speculative_tokens_per_batch_size": [[1, MAX_BATCH, LONGEST]]}
NUM_COMPARED = 24  # prompts whose outputs are compared


def main(
    vllm_python: str = typer.Option("build/vllm/venv/bin/python", "--vllm", help="Python of vLLM's environment."),
    folder: Path = typer.Option(Path("build/vllm"), help="Where weights, databases and logs go."),
    dtype: str = typer.Option("float32", help="Of both models; in bfloat16 near ties may fall otherwise."),
    wave_s: float = typer.Option(8.0, help="Seconds of each wave of the changing load."),
    block_s: float = typer.Option(5.0, help="Seconds of each measured block."),
    rounds: int = typer.Option(3, help="How often every mode is measured, interleaved."),
    out: Path | None = typer.Option(None, help="Markdown file to write; default: print only."),
) -> None:
    """Run vLLM as a worker, and compare it with vLLM alone. Exits 1 where a check of correctness fails."""
    report = Report()
    prompts = make_weights(folder)
    (folder / "adaptive.db").unlink(missing_ok=True)
    report.say(*heading(vllm_python, dtype))
    port = free_port()
    with vllm(vllm_python, folder, "speclen", PLAIN, dtype, port) as steered:
        with controller(folder, port) as database:
            learn(report, steered, database, prompts, wave_s)
            table = exported(report, database, vllm_python)
        # From here on without a controller, for as long as vLLM alone takes to start: the last table stays in use.
        with vllm(vllm_python, folder, "own", table, dtype) as own:
            compare_outputs(report, steered, own, prompts[:NUM_COMPARED])
            measure(report, folder, port, steered, own, prompts, block_s, rounds)
    costs(report, steered)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text("\n".join(report.lines) + "\n")
    sys.exit(1 if report.failures else 0)


def make_weights(folder: Path) -> list[str]:
    """The bundled pair as a directory each, made once; the prompts."""
    import json

    weights = folder / "weights"
    if not (weights / "requests.json").exists():
        subprocess.run([sys.executable, "scripts/peers/export.py", str(weights)], check=True, stdout=sys.stderr)
    prompts: list[str] = json.loads((weights / "requests.json").read_text())["prompts"]
    return prompts


def heading(vllm_python: str, dtype: str) -> list[str]:
    code = "import vllm, torch; print(vllm.__version__, torch.__version__)"
    done = subprocess.run([vllm_python, "-c", code], check=True, capture_output=True, text=True)
    engine, torch = done.stdout.split()[-2:]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True).stdout
    return [
        "# vLLM as a worker",
        "",
        "Made by `scripts/vllm_check`.",
        "",
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {processor_name()} x{os.cpu_count()}, {platform.system()}, commit "
        f"{commit.strip()}; vLLM {engine} for CPUs, torch {torch}, one thread, eager, {dtype}; bundled:target-60m "
        "(widened) with bundled:draft as its draft model, 64 prompt and 64 new tokens, greedy; the official `openai` "
        "client.",
    ]


def compare_outputs(report: Report, steered: Server, own: Server, prompts: list[str]) -> None:
    """Greedy outputs, one request at a time and eight at once."""
    report.say("", "## Outputs with and without speclen", "")
    for concurrency in (1, 8):
        ours, theirs = texts(steered.address, prompts, concurrency), texts(own.address, prompts, concurrency)
        same = sum(a == b for a, b in zip(ours, theirs, strict=True))
        report.check(same == len(prompts), f"{same} of {len(prompts)} greedy outputs are equal, {concurrency} at once")


def costs(report: Report, steered: Server) -> None:
    """Report the cost that vLLM's log states at its end, and check that nothing failed on the way."""
    report.say("", "## Cost, measured inside vLLM", "")
    told = steered.log_lines("steps reported")
    report.check(bool(told) and "left_out=0" in told[-1], "every step was reported")
    report.say("", *(f"    {line.partition('speclen: ')[2]}" for line in told[-1:]), "")
    report.check(not steered.log_lines("speclen is off"), "speclen did not fail in vLLM")


if __name__ == "__main__":
    typer.run(main)
