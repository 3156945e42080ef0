"""Schemas of callers as grammars: what they allow, and what is refused because the library would read it wrongly."""

import json
from typing import Any

import pytest

from speclen.worker.frontend.grammars import StructuredOutput, call_head, source
from tests.support import tiny_models
from tests.support.grammars import prepare


def allows(kind: str, wanted: Any, text: str) -> bool:
    """True if the whole text may be an output."""
    matcher = prepare(kind, wanted).matcher.deep_copy()
    ids = tiny_models.tokenizer().encode(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def test_formats_that_the_library_does_not_know_are_annotations():
    formats = ["password", "path", "binary", "base64", "ipvanyaddress", "ipv4network", "int32", "uuid4"]
    properties = {name: {"type": "string", "format": name} for name in formats}
    kept = {"format": {"enum": [{"format": "password"}]}, "default": {"type": "string", "format": "path"}}
    every = properties | kept
    schema = {"type": "object", "properties": every, "required": list(every), "additionalProperties": False}
    values: dict[str, Any] = dict.fromkeys(formats, "any text") | {"format": {"format": "password"}, "default": "x"}
    assert allows("json_schema", schema, json.dumps(values, separators=(",", ":")))
    assert not allows("json_schema", schema, json.dumps(values | {"format": {}}, separators=(",", ":")))


@pytest.mark.parametrize(("text", "allowed"), [('"2024-02-29"', True), ('"tomorrow"', False)])
def test_formats_that_the_library_knows_still_count(text, allowed):
    assert allows("json_schema", {"type": "string", "format": "date"}, text) is allowed


@pytest.mark.parametrize("at", ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "const"])
@pytest.mark.parametrize("number", [2**53 + 1, -(2**63), 2**64, 1e300])
def test_numbers_that_the_library_would_round_are_refused(at, number):
    schema = {"properties": {"a": {"anyOf": [{"type": "integer", at: number}]}}}
    wanted = StructuredOutput("json_schema", json.dumps(schema), field="response_format.json_schema")
    with pytest.raises(ValueError, match=r"response_format\.json_schema has .* as .* beyond 2\^53"):
        source(wanted)


def test_the_largest_exact_number_is_a_bound():
    assert allows("json_schema", {"type": "integer", "maximum": 2**53}, str(2**53))
    assert not allows("json_schema", {"type": "integer", "maximum": 2**53}, str(2**53 + 1))
    with pytest.raises(ValueError, match="beyond 2"):
        source(StructuredOutput("json_schema", json.dumps({"enum": [1, [{"a": 2**53 + 1}]]})))


@pytest.mark.parametrize("depth", [900, 3000])
def test_a_schema_that_is_too_deep_is_refused_in_a_sentence(depth):
    with pytest.raises(ValueError, match=r"is nested too deeply|recursion limit exceeded"):
        source(StructuredOutput("json_schema", '{"not": ' * depth + "{}" + "}" * depth))
