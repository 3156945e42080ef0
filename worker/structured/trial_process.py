"""The process in which `trial` runs, as its parent sees it."""

from __future__ import annotations

import contextlib
import json
import selectors
import subprocess
import sys
from pathlib import Path
from typing import Any

from speclen.worker.structured import trial

START_S = 60.0  # that the process may take to read the tokenizer, on a busy machine


class Trial:
    """The process in which grammars are tried; started when first needed, and again after it has ended. For one thread."""

    def __init__(self, timeout_s: float, max_states: int) -> None:
        self.max_states = max_states  # of a lexer
        self.facts: dict[str, Any] = {}  # of the tokenizer
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, text: str) -> tuple[str, int]:
        """Error of a grammar, or ""; and the bytes of memory that it took."""
        limit_s = START_S
        try:
            if self._process is None:
                self._start()
            limit_s = self._timeout_s
            line = self._ask(text, limit_s)
            if line:
                answer = json.loads(line)
                return answer["error"], answer["bytes"]
            self.stop()
            return "it is too deep or too large", 0
        except TimeoutError:
            self.stop()  # A late answer would be taken for that to the next grammar.
            return f"preparing it takes more than {limit_s:g} s", 0
        except BaseException:
            self.stop()  # Its state is unknown: the next grammar gets a new one.
            raise

    def _start(self) -> None:
        command = [sys.executable, "-P", str(Path(trial.__file__)), str(self.max_states)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        self._write(self.facts)
        self._ask('{"grammars":[{"lark_grammar":"start: /a/"}]}', START_S)  # by then it has read the tokenizer

    def _write(self, content: object) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # It has ended, so its answer is empty.
            self._process.stdin.write(json.dumps(content).encode() + b"\n")
            self._process.stdin.flush()

    def _ask(self, text: str, timeout_s: float) -> bytes:
        """Its answer; empty if it has ended. Raises TimeoutError."""
        self._write(text)
        assert self._process is not None
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:  # unlike select.select, it takes descriptors from 1024 on
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                raise TimeoutError
        return self._process.stdout.readline()

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()
