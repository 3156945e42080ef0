"""Structured output as llguidance's grammars. Errors are one sentence."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

MAX_TEXT = 64 * 1024  # characters of a schema, a regular expression, a grammar, or a list of choices
MAX_CHOICES = 4096
MAX_SHOWN = 80  # characters of a value in an error

ANY_OBJECT = '{"type": "object"}'  # as a JSON schema

# Formats that llguidance knows.
FORMATS = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"]
)
MAX_EXACT = 2**53  # llguidance rounds numbers beyond it
NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "const", "enum")
NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
VALUES = ("const", "enum", "default", "examples")  # keywords whose value holds no schema
# oneOf is only supported where the branches provably exclude one another, which tags with a default do not.
OPTIONS: dict[str, Any] = {"coerce_one_of": True}
# As models were trained to write arguments, and without the whitespace in which small ones lose themselves.
OF_ARGUMENTS = OPTIONS | {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """Constraint of an output, as the caller wrote it.

    kind: "json_schema", "regex", "choice" (text: a JSON list of strings), "grammar" (Lark); "calls" (text: a JSON list of
    pairs, the name of a function and the schema of its arguments), "call" (one of these), "arguments" (text: their schema).
    whitespace: None for any between the parts of JSON, "" for none, else a regex of it. field: name for errors.
    """

    kind: str
    text: str
    whitespace: str | None = None
    field: str = field(default="structured_output", compare=False)


def source(wanted: StructuredOutput) -> str:
    """The grammar in llguidance's form.

    Raises ValueError for text that is too long or malformed, or when llguidance is not installed.
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
        raise ValueError(f"{wanted.field} {shown(wanted.text)} is nested too deeply") from None


def choice_grammar(wanted: StructuredOutput) -> str:
    choices = json.loads(wanted.text)
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise ValueError(f"{wanted.field} has {len(choices)} choices, allowed are 1 to {MAX_CHOICES}")
    # In ASCII: Lark's strings hold no control characters, and JSON does not escape DEL otherwise.
    return "start: " + " | ".join(json.dumps(choice) for choice in choices)


def call_grammar(wanted: StructuredOutput) -> str:
    """A JSON list of calls, each with the function's name first, in one fixed form but for the arguments."""
    functions = read_json(wanted)
    more = "" if wanted.kind == "call" else ' (", " call)*'
    lines = [f'start: "[" call{more} "]"', "call: " + " | ".join(f"call{at}" for at in range(len(functions)))]
    for at, (name, schema) in enumerate(functions):
        begin = json.dumps(call_head(name))
        arguments = json.dumps(adapted(wanted, schema) | {"x-guidance": OF_ARGUMENTS})
        lines += [f'call{at}: {begin} arguments{at} "}}"', f"arguments{at}: %json {arguments}"]
    return "\n".join(lines)


def call_head(name: str) -> str:
    """Text before the arguments of a call."""
    return f'{{"name": {json.dumps(name)}, "arguments": '


def json_grammar(wanted: StructuredOutput) -> str:
    from llguidance import LLMatcher

    schema = adapted(wanted, read_json(wanted))
    if not isinstance(schema, dict) and schema is not True:
        raise ValueError(f"{wanted.field} {shown(wanted.text)} is a JSON schema that nothing fits")
    options = dict(OF_ARGUMENTS if wanted.kind == "arguments" else OPTIONS)
    if wanted.whitespace == "":
        options["whitespace_flexible"] = False
    elif wanted.whitespace is not None:
        options["whitespace_pattern"] = wanted.whitespace
    text = "{}" if schema is True else json.dumps(schema)
    try:
        return str(LLMatcher.grammar_from_json_schema(text, overrides=options))
    except ValueError as error:
        raise ValueError(f"{wanted.field} {shown(wanted.text)} cannot be used: {reason(str(error))}") from None


def read_json(wanted: StructuredOutput) -> Any:
    """The text as JSON. Raises ValueError."""
    try:
        content = json.loads(wanted.text)
        json.dumps(content, ensure_ascii=False).encode()  # UTF-8 has no half characters
    except ValueError as error:
        raise ValueError(f"{wanted.field} {shown(wanted.text)} is not valid JSON: {error}") from None
    return content


def adapted(wanted: StructuredOutput, schema: Any) -> Any:
    """The schema without formats that llguidance does not know: they are annotations.

    Raises ValueError for numbers that it would round.
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
    """Numbers in a value of JSON, at any depth."""
    if isinstance(value, (int, float)):
        yield value
    elif isinstance(value, (list, dict)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from numbers_in(one)


def shown(text: str) -> str:
    return repr(text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…")


def reason(error: str) -> str:
    """A library's error in one line: parsers put the reason last, after a picture of the place."""
    lines = [line.strip() for line in error.splitlines() if line.strip() and line.strip(" ^|")]
    told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (told or [line for line in lines if not line.startswith("<")] or ["it is not understood"])[0][:300]
