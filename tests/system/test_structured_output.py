"""Structured output over HTTP and gRPC: what callers send, what they receive, and malicious schemas."""

import json
import sys
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest

from speclen.v1 import generation_pb2 as pb
from tests.support import http_worker
from tests.support.http_worker import MODEL, HttpWorker, over_grpc

pytest.importorskip("llguidance")

REGEX = "[a-z]{3,9}(, [a-z]{2})*"


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=8)
    age: int = pydantic.Field(ge=0, le=120)
    kind: Literal["a", "b"]


@pytest.fixture(scope="module")
def worker():
    with http_worker.http_worker() as worker:
        yield worker


def post(worker: HttpWorker, **fields: Any) -> httpx.Response:
    return http_worker.post(worker, {"prompt": "a", "max_tokens": 80, **fields})


def test_the_official_client_parses_structured_output(worker):
    answer = worker.client().chat.completions.parse(
        model=MODEL, messages=[{"role": "user", "content": "Who?"}], response_format=Person, max_tokens=200, seed=1
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Person)


class Answer(pydantic.BaseModel, extra="forbid"):
    language: Literal["python", "c"]
    good: bool


TOOLS = [openai.pydantic_function_tool(Answer), openai.pydantic_function_tool(Person)]
NAMED = {"type": "function", "function": {"name": "Answer"}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")])
def test_the_official_client_receives_tool_calls(worker, choice, reason, stream):
    """As instructor, pydantic-ai and langchain ask for a structure; its stream puts the pieces together."""
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Which?"}],
        "tools": TOOLS,
        "seed": 1,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 200,
    }
    chats = worker.client().chat.completions
    if stream:
        with chats.stream(**asked) as events:
            answer: Any = events.get_final_completion()
    else:
        answer = chats.parse(**asked)
    (one,) = answer.choices
    (call,) = one.message.tool_calls
    assert (one.finish_reason, one.message.content) == (reason, None)
    parsed = call.function.parsed_arguments
    assert isinstance(parsed, Answer if choice == NAMED else (Answer, Person))
    assert call.function.name == type(parsed).__name__
    history = [*asked["messages"], one.message.model_dump(exclude={"parsed"}), {"role": "tool", "content": "Yes."}]
    history[-1]["tool_call_id"] = call.id
    after = chats.create(**(asked | {"messages": history, "tool_choice": "none", "max_tokens": 2}))
    assert after.choices[0].message.tool_calls is None


def test_http_and_grpc_generate_the_same_structured_output(worker):
    """And every kind of them does what it says, in a batch of four sequences."""
    schema = json.dumps(Person.model_json_schema())
    pairs: list[tuple[dict[str, Any], pb.StructuredOutput]] = [
        ({"structured_outputs": {"regex": REGEX}}, pb.StructuredOutput(regex=REGEX)),
        (
            {"structured_outputs": {"choice": ["yes", 'n"o\\']}},
            pb.StructuredOutput(choice=pb.StructuredOutput.Choices(values=["yes", 'n"o\\'])),
        ),
        (
            {"structured_outputs": {"json": json.loads(schema), "disable_any_whitespace": True}},
            pb.StructuredOutput(json_schema=schema, disable_any_whitespace=True),
        ),
        ({"structured_outputs": {"grammar": 'start: "x"+ "!"'}}, pb.StructuredOutput(grammar='start: "x"+ "!"')),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": {"enum": [1, [2]]}}}},
            pb.StructuredOutput(json_schema='{"enum": [1, [2]]}'),
        ),
        ({"response_format": {"type": "json_object"}}, pb.StructuredOutput(json_object=True)),
    ]
    for fields, wanted in pairs:
        answer = post(worker, seed=3, n=4, **fields)
        assert answer.status_code == 200, answer.text
        texts = [choice["text"] for choice in answer.json()["choices"]]
        completes = over_grpc(worker, structured_output=wanted, max_tokens=80, seed=3, n=4, temperature=1.0)
        assert texts == [one.text for one in sorted(completes, key=lambda one: one.index)]
        ended = [c["text"] for c in answer.json()["choices"] if c["finish_reason"] == "stop"]
        if "regex" in str(fields):
            assert len(ended) > 1
        if "choice" in str(fields):
            assert set(ended) <= {"yes", 'n"o\\'}
            assert len(ended) == 4
        if wanted.json_schema or wanted.json_object:
            assert all(json.loads(text) is not None for text in ended)


SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"$ref": "http://x.test/y"}}}
JSON_OBJECT = {"type": "json_object"}


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"regex": "("}, "regex '(' cannot be used: unclosed group"),
        ({"regex": "a" * 70_000}, "70000 characters, at most 65536"),
        ({"choice": []}, "0 choices"),
        ({"json": "{"}, "not valid JSON"),
        ({"grammar": "start: foo"}, 'unknown name: "foo"'),
        ({"json": {"type": "foo"}}, "Invalid type: foo"),
        ({"json": False}, "a JSON schema that nothing fits"),
        ({}, "is empty"),
        ({"regex": "a", "choice": ["a"]}, "leave one"),
        ({"json": {}, "disable_additional_properties": True}, "False"),
        ({"json": '{"const": "\\ud800"}'}, "is not valid JSON"),
        ({"regex": "a", "response_format": JSON_OBJECT}, "response_format.type and structured_outputs.regex are given"),
        ({"response_format": {"type": "json_schema"}}, "json_schema is missing"),
        ({"response_format": SCHEMA}, "http://x.test/y"),
        ({"guided_json": {"type": "object"}}, 'write structured_outputs: {"json": …} instead'),
    ],
)
def test_what_is_wrong_is_named(worker, wanted, words):
    fields = {name: wanted[name] for name in ("response_format", "guided_json") if name in wanted}
    inner = {name: value for name, value in wanted.items() if name not in fields}
    answer = post(worker, **fields, **({"structured_outputs": inner} if inner or not fields else {}))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == next(iter(fields), "structured_outputs")
    assert words in error["message"]
    assert "\n" not in error["message"]
    assert len(error["message"]) < 500


@pytest.mark.parametrize("choice", ["\x7f", "".join(map(chr, range(32))), '"\\', "\x80\u2028\ufffe", "\U0001f642"])
def test_a_choice_may_hold_any_character(worker, choice):
    """Story: DEL, which JSON strings may contain and Lark's may not, was a "lexer error"."""
    answer = post(worker, structured_outputs={"choice": [choice]}, max_tokens=100)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == choice


class Cat(pydantic.BaseModel, extra="forbid"):
    kind: Literal["cat"] = "cat"
    lives: Literal[7, 9]


class Dog(pydantic.BaseModel, extra="forbid"):
    kind: Literal["dog"] = "dog"
    age: int = pydantic.Field(ge=0, le=30)


class Pet(pydantic.BaseModel, extra="forbid"):
    pet: Cat | Dog = pydantic.Field(discriminator="kind")


def test_one_of_is_read_as_any_of(worker):
    """Story: for pydantic's unions the library asked for an option that no caller could set."""
    for schema in (Pet.model_json_schema(), Pet.model_json_schema(mode="serialization")):
        assert "oneOf" in json.dumps(schema)
        answer = post(worker, structured_outputs={"json": schema, "disable_any_whitespace": True}, seed=1, n=4)
        assert answer.status_code == 200, answer.text
        for choice in answer.json()["choices"]:
            assert choice["finish_reason"] == "stop"
            pet = json.loads(choice["text"])["pet"]
            Pet(pet={"kind": "cat" if "lives" in pet else "dog"} | pet)  # pydantic wants the tag, its schema may not
    overlapping = {"oneOf": [{"enum": ["a", "b"]}, {"enum": ["b", "c"]}]}
    assert post(worker, structured_outputs={"json": overlapping}).status_code == 200


def test_a_worker_without_llguidance_names_the_extra(worker, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    answer = post(worker, structured_outputs={"regex": "never asked for before"})
    assert answer.status_code == 400
    assert "pip install 'speclen[grammar]'" in answer.json()["error"]["message"]


@pytest.mark.parametrize("wanted", [{"grammar": 'start: "a" start'}, {"json": {"const": "<|endoftext|>"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_fails_while_generating_is_a_client_error(worker, wanted, stream):
    """Story: it was a 500 that asked to try again, which the official clients do."""
    answer = post(worker, structured_outputs=wanted, stream=stream)
    assert stream or answer.status_code == 400
    assert "the grammar cannot be followed any further" in answer.text
    assert "invalid_request_error" in answer.text
    assert "try it again" not in answer.text
