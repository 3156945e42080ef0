"""Structured output: constraints of callers as llguidance grammars, compiled and cached. Errors are one sentence.

llguidance is a single 3 MB file without dependencies, builds a grammar in about a millisecond, and can roll back rejected
tokens. (xgrammar needs Triton; outlines-core has no recursion.) It is optional: the extra `grammar`.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from speclen.worker.frontend import grammar_trial
from speclen.worker.frontend.fair_queue import ThreadQueue
from speclen.worker.sampling.grammar import Grammar

MAX_TEXT = 64 * 1024  # characters of a schema, a regular expression, a grammar, or a list of choices
MAX_CHOICES = 4096
MAX_QUOTED = 80  # characters of a value in an error

ANY_OBJECT = '{"type": "object"}'  # as a JSON schema

# Formats that llguidance supports.
FORMATS = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"]
)
MAX_EXACT = 2**53  # llguidance rounds numbers beyond it
NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "const", "enum")
NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
VALUES = ("const", "enum", "default", "examples")  # keywords whose value holds no schema
# llguidance supports oneOf only if the branches provably exclude each other, which tags with a default do not.
OPTIONS: dict[str, Any] = {"coerce_one_of": True}
# The form in which models were trained to write arguments. Small models get lost in arbitrary whitespace.
OF_ARGUMENTS = OPTIONS | {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
MAX_WAITING = 16  # new grammars
TRIAL_S = 5.0  # time limit to compile a grammar
MAX_CACHED = 128  # grammars
MAX_CACHED_BYTES = 256 * 2**20
# Limits over all sequences: initial memory, and lexer states of some 2 kB each, which are made on demand.
MAX_BYTES, MAX_ALL_STATES = 2 * 2**30, 400_000
LEAST_BYTES, LEAST_STATES = 16 * 2**20, 4000  # that every sequence may have, however many there are


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """Constraint of an output, as the caller wrote it.

    kind: "json_schema", "regex", "choice" (text: a JSON list of strings), "grammar" (Lark), "calls" (text: a JSON list of
    pairs of a function's name and the schema of its arguments), "call" (the same, for a single call), or "arguments" (text:
    their schema). whitespace between the parts of JSON: None for any, "" for none, else a regex. field: name for errors.
    """

    kind: str
    text: str
    whitespace: str | None = None
    field: str = field(default="structured_output", compare=False)


def source(wanted: StructuredOutput) -> str:
    """The constraint as a grammar of llguidance.

    Raises ValueError if its text is too long or malformed, or if llguidance is not installed.
    """
    if len(wanted.text) > MAX_TEXT:
        raise ValueError(f"{wanted.field} has {len(wanted.text)} characters, at most {MAX_TEXT} are allowed")
    try:
        from llguidance import LLMatcher
    except ImportError as error:
        raise ValueError(
            f"{wanted.field} cannot be used: this worker has no llguidance; pip install 'speclen[grammar]'"
        ) from error
    if wanted.kind == "regex":
        return str(LLMatcher.grammar_from_regex(wanted.text))
    if wanted.kind == "grammar":
        return str(LLMatcher.grammar_from_lark(wanted.text))
    if wanted.kind == "choice":
        return str(LLMatcher.grammar_from_lark(choice_grammar(wanted)))
    try:
        if wanted.kind in ("json_schema", "arguments"):
            return json_grammar(wanted)
        assert wanted.kind in ("call", "calls")
        return str(LLMatcher.grammar_from_lark(call_grammar(wanted)))
    except RecursionError:
        raise ValueError(f"{wanted.field} {quoted(wanted.text)} is nested too deeply") from None


def choice_grammar(wanted: StructuredOutput) -> str:
    choices = json.loads(wanted.text)
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise ValueError(f"{wanted.field} has {len(choices)} choices, allowed are 1 to {MAX_CHOICES}")
    # In ASCII: Lark's strings hold no control characters, and JSON does not escape DEL otherwise.
    return "start: " + " | ".join(json.dumps(choice) for choice in choices)


def call_grammar(wanted: StructuredOutput) -> str:
    """Lark grammar of a JSON list of calls. Each call has the function's name first; only the arguments vary in form."""
    functions = read_json(wanted)
    more = "" if wanted.kind == "call" else ' (", " call)*'
    lines = [f'start: "[" call{more} "]"', "call: " + " | ".join(f"call{at}" for at in range(len(functions)))]
    for at, (name, schema) in enumerate(functions):
        begin = json.dumps(call_head(name))
        arguments = json.dumps(adapted(wanted, schema) | {"x-guidance": OF_ARGUMENTS})
        lines += [f'call{at}: {begin} arguments{at} "}}"', f"arguments{at}: %json {arguments}"]
    return "\n".join(lines)


def call_head(name: str) -> str:
    """The text of a call before its arguments."""
    return f'{{"name": {json.dumps(name)}, "arguments": '


def json_grammar(wanted: StructuredOutput) -> str:
    from llguidance import LLMatcher

    schema = adapted(wanted, read_json(wanted))
    if not isinstance(schema, dict) and schema is not True:
        raise ValueError(f"{wanted.field} {quoted(wanted.text)} is a JSON schema that nothing fits")
    options = dict(OF_ARGUMENTS if wanted.kind == "arguments" else OPTIONS)
    if wanted.whitespace == "":
        options["whitespace_flexible"] = False
    elif wanted.whitespace is not None:
        options["whitespace_pattern"] = wanted.whitespace
    text = "{}" if schema is True else json.dumps(schema)
    try:
        return str(LLMatcher.grammar_from_json_schema(text, overrides=options))
    except ValueError as error:
        raise ValueError(f"{wanted.field} {quoted(wanted.text)} cannot be used: {reason(str(error))}") from None


def read_json(wanted: StructuredOutput) -> Any:
    """The text as JSON. Raises ValueError."""
    try:
        content = json.loads(wanted.text)
        json.dumps(content, ensure_ascii=False).encode()  # raises for lone surrogates, which UTF-8 cannot encode
    except ValueError as error:
        raise ValueError(f"{wanted.field} {quoted(wanted.text)} is not valid JSON: {error}") from None
    return content


def adapted(wanted: StructuredOutput, schema: Any) -> Any:
    """The schema without formats that llguidance does not support: they are only annotations.

    Raises ValueError if it has numbers that llguidance would round.
    """
    if isinstance(schema, list):
        return [adapted(wanted, one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    for keyword in NUMBERS:
        for number in numbers_in(schema.get(keyword)):
            if abs(number) > MAX_EXACT:
                raise ValueError(
                    f"{wanted.field} has {number} as {keyword}, but numbers beyond 2^53 would be rounded: leave it out"
                )
    kept = {}
    for keyword, value in schema.items():
        if keyword == "format" and isinstance(value, str) and value not in FORMATS:
            continue
        if keyword in NAMED_SCHEMAS and isinstance(value, dict):
            kept[keyword] = {name: adapted(wanted, one) for name, one in value.items()}
        else:
            kept[keyword] = value if keyword in VALUES else adapted(wanted, value)
    return kept


def numbers_in(value: Any) -> Iterator[float]:
    """All numbers in a JSON value, at any depth."""
    if isinstance(value, (int, float)):
        yield value
    elif isinstance(value, (list, dict)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from numbers_in(one)


def quoted(text: str) -> str:
    return repr(text if len(text) <= MAX_QUOTED else f"{text[: MAX_QUOTED - 1]}…")


def reason(error: str) -> str:
    """A library's error in one line. Parsers put the reason last, after a picture of the place."""
    lines = [line.strip() for line in error.splitlines() if line.strip() and line.strip(" ^|")]
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (reasons or [line for line in lines if not line.startswith("<")] or ["it is not understood"])[0][:300]


class Grammars:
    """Compiles and caches grammars. A new grammar is first tried in a child process. For one event loop.

    vocab_size: of the models' logits. end_ids: the target's end tokens. num_rows: slots of the engine, each of which may
    hold a copy of a grammar's state.
    """

    def __init__(
        self, tokenizer: Any, vocab_size: int, end_ids: Sequence[int], num_rows: int = 1, trial_s: float = TRIAL_S
    ) -> None:
        self._max_bytes = max(MAX_BYTES // num_rows, LEAST_BYTES)
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = list(end_ids)
        self._trial = grammar_trial.Trial(
            trial_s, min(grammar_trial.MAX_LEXER_STATES, max(MAX_ALL_STATES // num_rows, LEAST_STATES))
        )
        self._matching: Any = None  # llguidance's tokenizer
        self._prepared: OrderedDict[StructuredOutput, Grammar] = OrderedDict()  # the least used first
        self.compiling = ThreadQueue("grammars", MAX_WAITING)

    async def prepare(self, wanted: StructuredOutput, caller: str) -> Grammar:
        """The compiled grammar. Raises ValueError with one sentence, or QueueFullError if too many new ones wait."""
        if wanted not in self._prepared:
            self._prepared[wanted] = await self.compiling.do(caller, self._make, wanted)
            while len(self._prepared) > 1 and (
                len(self._prepared) > MAX_CACHED
                or sum(one.num_bytes for one in self._prepared.values()) > MAX_CACHED_BYTES
            ):
                self._prepared.popitem(last=False)
        self._prepared.move_to_end(wanted)
        return self._prepared[wanted]

    def _make(self, wanted: StructuredOutput) -> Grammar:
        if (known := self._prepared.get(wanted)) is not None:  # compiled while this call waited
            return known
        text = source(wanted)
        if self._matching is None:
            self._matching = self._make_tokenizer(wanted)
        error, num_bytes = self._trial.run(text)
        if error:
            raise ValueError(f"{wanted.field} {quoted(wanted.text)} cannot be used: {reason(error)}")
        if num_bytes > self._max_bytes:
            too_much = f"takes {num_bytes / 2**20:.0f} MiB, and may take {self._max_bytes / 2**20:.0f}"
            raise ValueError(f"{wanted.field} {quoted(wanted.text)} cannot be used: it {too_much}")
        matcher = grammar_trial.make_matcher(self._matching, text, self._trial.max_states)
        return Grammar(matcher, self._vocab_size, self._end_ids, num_bytes)

    def _make_tokenizer(self, wanted: StructuredOutput) -> Any:
        """llguidance's tokenizer; takes up to a second. Raises ValueError if the model's tokenizer is not supported."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None or not self._end_ids:
            missing = "end token" if backend is not None else "fast tokenizer"
            raise ValueError(f"{wanted.field} cannot be used: the model has no {missing}")
        padded = self._vocab_size if self._vocab_size > len(self._tokenizer) else None
        facts = {"text": backend.to_str(), "vocab_size": padded, "end_ids": self._end_ids}
        try:
            made = grammar_trial.make_tokenizer(**facts)
        except ValueError as error:
            raise ValueError(f"{wanted.field} cannot be used with this model's tokenizer: {error}") from error
        self._trial.facts = facts
        return made

    def close(self) -> None:
        """Wait for the running compilation, and end the child process."""
        self.compiling.close(wait=True)
        self._trial.stop()
