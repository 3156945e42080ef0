"""A child process that compiles grammars before the worker does, and the parent's side of it.

Some small schemas take minutes or gigabytes to compile, and some deep ones overflow llguidance's stack, which crashes the
process. The child runs this file as a script, so it imports nothing of ours and nothing slow. Its input has one JSON value
per line: the tokenizer, then grammars. It answers each grammar with {"error", "bytes"}. Its argument is the largest number
of lexer states.
"""

from __future__ import annotations

import contextlib
import json
import resource
import selectors
import subprocess
import sys
from pathlib import Path
from typing import Any

MAX_GRAMMAR_SIZE = 50_000  # symbols; a mask may have to visit all of them, which takes some 30 ms
MAX_LEXER_STATES = 50_000  # of some 2 kB each; fewer if many sequences share the memory
# Parser items for one mask: some 8 ms at worst, quadratic in their number, for which all sequences of a step wait. Schemas
# with 150 optional properties need less than half.
MAX_ITEMS = 2000
STACK_BYTES = 4 * 2**20  # less than the worker's threads have
MEMORY_BYTES = 2 * 2**30  # of address space
START_S = 60.0  # time limit for the process to read the tokenizer, on a busy machine
LINUX = sys.platform == "linux"


def make_tokenizer(text: str, vocab_size: int | None, end_ids: list[int]) -> Any:
    """llguidance's tokenizer, from a tokenizer.json. Raises ValueError if that is not supported."""
    from llguidance import LLTokenizer

    return LLTokenizer(text, n_vocab=vocab_size, eos_token=end_ids)


def make_matcher(tokenizer: Any, grammar: str, max_states: int = MAX_LEXER_STATES) -> Any:
    """A matcher at the beginning of a grammar. It may be in error. max_states: of its lexer."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        max_grammar_size=MAX_GRAMMAR_SIZE,
        max_lexer_states=max_states,
        step_max_items=MAX_ITEMS,
        verbose_errors=False,
    )
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() if LINUX else 0


class Trial:
    """The child process, started when it is needed. For use by one thread."""

    def __init__(self, timeout_s: float, max_states: int) -> None:
        self.max_states = max_states  # of a lexer
        self.facts: dict[str, Any] = {}  # of the tokenizer
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, text: str) -> tuple[str, int]:
        """Compile a grammar in the child. Returns its error, or "", and the memory that it took, in bytes."""
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
            self.stop()  # a late answer would be taken for that to the next grammar
            return f"preparing it takes more than {limit_s:g} s", 0
        except BaseException:
            self.stop()  # its state is unknown, so the next grammar gets a new process
            raise

    def _start(self) -> None:
        command = [sys.executable, "-P", __file__, str(self.max_states)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        self._write(self.facts)
        self._ask('{"grammars":[{"lark_grammar":"start: /a/"}]}', START_S)  # wait until it has read the tokenizer

    def _write(self, content: object) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # if it has ended, its answer is empty
            self._process.stdin.write(json.dumps(content).encode() + b"\n")
            self._process.stdin.flush()

    def _ask(self, text: str, timeout_s: float) -> bytes:
        """The child's answer; empty if it has ended. Raises TimeoutError."""
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


def main() -> None:
    if LINUX:
        resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, STACK_BYTES))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer = make_tokenizer(**json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        before = resident_bytes()
        matcher = make_matcher(tokenizer, json.loads(line), int(sys.argv[1]))
        answer = {"error": matcher.get_error(), "bytes": max(0, resident_bytes() - before)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
