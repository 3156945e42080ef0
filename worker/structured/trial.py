"""A child process that tries grammars before the worker uses them.

Some small schemas take minutes or gigabytes to compile, and some deep ones overflow the stack of llguidance, which ends the
process. Input is one JSON object a line: the tokenizer, then grammars. Each grammar has an answer, {"error", "bytes"}. Its
argument is the most states of a lexer. Imports nothing of ours and nothing slow.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

MAX_GRAMMAR_SIZE = 50_000  # symbols, which a mask may have to visit: some 30 ms
MAX_LEXER_STATES = 50_000  # of some 2 kB each; fewer where many sequences share the memory
# Of the parser for one mask, some 8 ms at worst, quadratic in their number; all sequences of a step wait. Schemas with 150
# optional properties need less than half.
MAX_ITEMS = 2000
STACK_BYTES = 4 * 2**20  # less than the worker's threads have
MEMORY_BYTES = 2 * 2**30  # of address space


def make_tokenizer(text: str, vocab_size: int | None, end_ids: list[int]) -> Any:
    """llguidance's tokenizer, from a tokenizer.json. Raises ValueError for unknown kinds."""
    from llguidance import LLTokenizer

    return LLTokenizer(text, n_vocab=vocab_size, eos_token=end_ids)


def make_matcher(tokenizer: Any, grammar: str, max_states: int = MAX_LEXER_STATES) -> Any:
    """A matcher at the grammar's beginning; it may be in error. max_states: of its lexer."""
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


LINUX = sys.platform == "linux"


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
