"""Runs everybody in turn, round after round, and writes down what they print. Standard library only.

The first round takes every contestant with every number of threads. Later rounds leave out what cannot matter: numbers of
threads that were best at no load, and modes that were far behind another mode of their peer at every load.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from table import Rows, read_lines

HERE = Path(__file__).parent
FAR_BEHIND = 0.75  # of the throughput of the peer's best mode
TIMEOUT_S = 900


@dataclass(frozen=True)
class Contestant:
    """A command that prints a line for every mode and load that it measures. environment: folder of its Python."""

    peer: str
    environment: str
    script: str
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return " ".join((self.peer, *self.options))


def contestants(learn_s: float, profile: str) -> list[Contestant]:
    seeded = ("--profile", profile) if profile else ()
    adaptive = ("--policy", "adaptive", "--learn-s", str(learn_s), *seeded)
    found = [Contestant("speclen", "", "speclen_modes.py", options) for options in (adaptive, ("--policy", "none"))]
    for peer, modes in (
        ("transformers", ("static", "assisted", "lookup", "continuous")),
        ("openvino-genai", ("none", "fixed:3", "fixed:5", "confidence", "lookup:5", "lookup:10")),
        ("vllm", ("none", "fixed:3", "fixed:5", "ngram:5", "ngram:10")),
    ):
        script = peer.replace("-", "_") + "_modes.py"
        found += [Contestant(peer, peer, script, ("--mode", mode)) for mode in modes]
    for options in (("--length", "0"), ("--length", "3"), ("--lookup", "5"), ("--lookup", "10")):
        found.append(Contestant("llama", "llama", "llama_server.py", options))
    return found


def measure(one: Contestant, threads: int, work: Path, python: str, seconds: float) -> Rows | None:
    """The printed line; None when the program failed, which is told with the place of its log."""
    interpreter = str(work / one.environment / "bin" / "python") if one.environment else python
    command = [interpreter, str(HERE / one.script), str(work / "weights"), *one.options]
    command += ["--threads", str(threads), "--seconds", str(seconds)]
    environment = environment_of(one, threads, work)
    log = work / f"{one.peer}.log"
    with log.open("a") as errors:
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=errors, env=environment, text=True, timeout=TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            print(f"{one.name} took more than {TIMEOUT_S} s: see {log}", file=sys.stderr)
            return None
    if done.returncode:
        print(f"{one.name} failed: see {log}", file=sys.stderr)
        return None
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def environment_of(one: Contestant, threads: int, work: Path) -> dict[str, str]:
    """Environment of the process: Intel's OpenMP is loaded first where a peer has it, as vLLM asks for on CPUs."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    environment.pop("OMP_WAIT_POLICY", None)
    if one.environment:
        environment.pop("PYTHONPATH", None)
        openmp = work / one.environment / "lib" / "libiomp5.so"
        if openmp.exists():
            environment["LD_PRELOAD"] = str(openmp.resolve())
    return environment


def worth_repeating(rows: Rows, peer_rows: Rows, threads: int) -> bool:
    """True if a contestant with so many threads may be its peer's best, or is the best of its own numbers of threads.

    rows: what the contestant printed in the first round, with all numbers of threads; peer_rows: likewise of its peer.
    """
    for row in rows:
        mine = [other for other in rows if (other["mode"], other["concurrency"]) == (row["mode"], row["concurrency"])]
        best_of_peer = max(o["tokens_per_s"] for o in peer_rows if o["concurrency"] == row["concurrency"])
        is_best = max(mine, key=lambda other: other["tokens_per_s"])["threads"] == threads
        if is_best and (row["peer"] == "speclen" or row["tokens_per_s"] >= FAR_BEHIND * best_of_peer):
            return True
    return False


def repeated(found: dict[tuple[Contestant, int], Rows]) -> Iterable[tuple[Contestant, int]]:
    """Those of the first round that later ones run again."""
    for one, threads in found:
        rows = [row for (other, _), printed in found.items() if other == one for row in printed]
        peer_rows = [row for (other, _), printed in found.items() if other.peer == one.peer for row in printed]
        if worth_repeating(rows, peer_rows, threads):
            yield one, threads


def measured(before: Rows, number: int, one: Contestant, threads: int) -> Rows:
    """The line that a contestant printed in that round of an earlier run."""
    place = (number, one.name, threads)
    return [row for row in before if (row["round"], row["contestant"], row["threads"]) == place]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path, help="holds weights and the environments of the peers")
    parser.add_argument("lines", type=Path, help="file for what they print")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="at each load")
    parser.add_argument(
        "--learn-s", type=float, required=True, help="at each load, before speclen's adaptive is measured"
    )
    parser.add_argument("--profile", default="")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="begin nothing more after so many seconds")
    parser.add_argument("--only", default="", help="peers, separated by commas; speclen always takes part")
    parser.add_argument("--go-on", action="store_true", help="keep what the file for lines has, and measure the rest")
    options = parser.parse_args()
    wanted = {"speclen", *options.only.split(",")} if options.only else None
    turns = [
        (one, threads)
        for threads in sorted({1, os.cpu_count() or 1})
        for one in contestants(options.learn_s, options.profile)
        if wanted is None or one.peer in wanted
    ]
    before = read_lines(options.lines) if options.go_on and options.lines.exists() else []
    failed, began = False, time.monotonic()
    with options.lines.open("a" if before else "w") as lines:
        for number in range(1, options.rounds + 1):
            found: dict[tuple[Contestant, int], Rows] = {}
            for one, threads in turns:
                if rows_before := measured(before, number, one, threads):
                    found[one, threads] = rows_before
                    continue
                if time.monotonic() - began > options.limit_s:
                    sys.exit(f"the time is up in round {number} of {options.rounds}: --go-on measures the rest")
                print(f"round {number} of {options.rounds}, {threads} threads: {one.name}", file=sys.stderr, flush=True)
                rows = measure(one, threads, options.work, sys.executable, options.seconds)
                failed = failed or rows is None
                found[one, threads] = [{"round": number, "contestant": one.name, **row} for row in rows or []]
                lines.writelines(json.dumps(row) + "\n" for row in found[one, threads])
                lines.flush()
            if number == 1:
                turns = list(repeated(found))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
