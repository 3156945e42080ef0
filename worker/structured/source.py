"""Structured output as llguidance's grammars. Errors are one sentence."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

MAX_TEXT = 64 * 1024  # characters of a schema, a regular expression, a grammar, or a list of choices
MAX_CHOICES = 4096
MAX_SHOWN = 80  # characters of a value in an error

ANY_OBJECT = '{"type": "object"}'  # as a JSON schema


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """Constraint of an output, as the caller wrote it.

    kind: "json_schema", "regex", "choice" (text: a JSON list of strings) or "grammar" (Lark). whitespace: None for any
    between the parts of JSON, "" for none, else a regex of it. field: name for errors.
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
    assert wanted.kind == "json_schema"
    return json_grammar(wanted)


def choice_grammar(wanted: StructuredOutput) -> str:
    choices = json.loads(wanted.text)
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise ValueError(f"{wanted.field} has {len(choices)} choices, allowed are 1 to {MAX_CHOICES}")
    # In ASCII: Lark's strings hold no control characters, and JSON does not escape DEL otherwise.
    return "start: " + " | ".join(json.dumps(choice) for choice in choices)


def json_grammar(wanted: StructuredOutput) -> str:
    from llguidance import LLMatcher

    try:
        schema = json.loads(wanted.text)
        json.dumps(schema, ensure_ascii=False).encode()  # UTF-8 has no half characters
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{wanted.field} {shown(wanted.text)} is not valid JSON: {error}") from None
    if not isinstance(schema, dict) and schema is not True:
        raise ValueError(f"{wanted.field} {shown(wanted.text)} is a JSON schema that nothing fits")
    # oneOf is only supported where the branches provably exclude one another, which tags with a default do not.
    options: dict[str, Any] = {"coerce_one_of": True}
    if wanted.whitespace == "":
        options["whitespace_flexible"] = False
    elif wanted.whitespace is not None:
        options["whitespace_pattern"] = wanted.whitespace
    text = "{}" if schema is True else wanted.text
    try:
        return str(LLMatcher.grammar_from_json_schema(text, overrides=options))
    except ValueError as error:
        raise ValueError(f"{wanted.field} {shown(wanted.text)} cannot be used: {reason(str(error))}") from None


def shown(text: str) -> str:
    return repr(text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…")


def reason(error: str) -> str:
    """A library's error in one line: parsers put the reason last, after a picture of the place."""
    lines = [line.strip() for line in error.splitlines() if line.strip() and line.strip(" ^|")]
    told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (told or [line for line in lines if not line.startswith("<")] or ["it is not understood"])[0][:300]
