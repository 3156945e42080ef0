"""Programs that are compared, each of which runs as a server of OpenAI's chat API, in several modes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

from speclen.bench.serving.warm import free_address
from speclen.cli.support.processes import without_settings

HERE = Path(__file__).parent
START_TIMEOUT_S = 600.0  # vLLM compiles
ANSWER_TIMEOUT_S = 600.0
MAX_ROWS = 16
# The full distribution, as in the other programs; the server's defaults would truncate it.
NO_CUTS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
VLLM_SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


@dataclass(frozen=True)
class Mode:
    """A way to run a program. kind: none, adaptive, draft or lookup. environment: folder of its Python, "" without one."""

    program: str
    environment: str
    kind: str
    length: int = 0
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
        script = str(HERE / f"{self.environment}_server.py")
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
    ):
        for kind, length in (("none", 0), ("draft", 3), ("draft", 5), ("lookup", 5), ("lookup", 10)):
            if has_draft or kind != "draft":
                found.append(Mode(program, environment, kind, length, extra))
    return found


class Server:
    """A program that serves for the length of the block. Raises RuntimeError if it does not start."""

    def __init__(self, mode: Mode, work: Path, target: str, draft: str) -> None:
        self._mode, self._log = mode, work / f"{mode.program.replace(' ', '-')}.log"
        self._port = int(free_address().rpartition(":")[2])
        home = work / mode.environment
        python = str(home / "bin" / "python") if mode.environment else sys.executable
        environment = without_settings(os.environ)
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
                self.ask([{"role": "user", "content": "Hello"}], 8)
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
        """End all processes of its session."""
        for number, patience in ((signal.SIGTERM, 60.0), (signal.SIGKILL, 20.0)):
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                return
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience)

    def ask(self, messages: list[Any], max_tokens: int) -> int:
        """Number of tokens of the greedy answer."""
        answer = self.client.chat.completions.create(
            model=self.model,
            messages=messages,
            max_tokens=max_tokens,
            temperature=0.0,
            extra_body=self._mode.extra or None,
        )
        assert answer.usage is not None
        return answer.usage.completion_tokens
