"""Forced tool calls: which are refused, and the answers that callers receive, whole and streamed."""

from collections.abc import Sequence
from typing import Any

import pytest

from speclen.worker.frontend.grammars import call_head
from speclen.worker.http.answers import Answer
from speclen.worker.http.errors import ApiError
from speclen.worker.http.schema import ChatRequest
from speclen.worker.http.translate import Job, structured_output
from speclen.worker.requests.request import FinishReason, GenerationRequest, SequenceOutput
from tests.support import tiny_models

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": 's"ay'}},
]


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": "Hi"}]} | fields)


@pytest.mark.parametrize(
    "fields",
    [{}, {"tools": []}, {"tool_choice": "auto"}, {"tool_choice": "none"}, {"tools": TOOLS, "tool_choice": "none"}],
)
def test_tools_that_nothing_calls_are_served(fields):
    assert structured_output(chat(**fields)) is None


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": TOOLS}, "tool_choice", "tool_choice 'auto', the default with tools, is not supported"),
        (
            {"tools": TOOLS, "tool_choice": "auto"},
            "tool_choice",
            "set tool_choice to 'required', to one of the functions",
        ),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice needs tools"),
        ({"tools": TOOLS, "tool_choice": named("gone")}, "tool_choice", "names 'gone', which tools does not have"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools",
            "the parameters of 'f' have the type 'array': it must be object",
        ),
        (
            {"tools": TOOLS, "response_format": {"type": "json_object"}},
            "response_format",
            "response_format.type and tools are given: leave one of them",
        ),
    ],
)
def test_tools_that_cannot_be_served_are_refused(fields, param, words):
    if param != "tool_choice":
        fields = fields | {"tool_choice": "required"}
    with pytest.raises(ApiError, match=words) as told:
        structured_output(chat(**fields))
    assert (told.value.status, told.value.param) == (400, param)


ARGUMENTS = ['{"a":\n "} \\" ]\\\\"}', "{}", '{"a": "é", "b": {"c": [{}]}}']
LIST = f"[{call_head('add')}{ARGUMENTS[0]}}}, {call_head(chr(115) + chr(34) + 'ay')}{ARGUMENTS[1]}}}, "
LIST += f"{call_head('add')}{ARGUMENTS[2]}}}]"
# The choice, the output and how it ended; what callers get: names and arguments of calls, and the reason.
OUTPUTS: list[tuple[Any, str, FinishReason, list[tuple[str, str]], str]] = [
    ("required", LIST, FinishReason.STOP, list(zip(["add", 's"ay', "add"], ARGUMENTS, strict=True)), "tool_calls"),
    ("required", LIST[: 1 + len(call_head("add")) + 5], FinishReason.LENGTH, [("add", '{"a":')], "length"),
    ("required", LIST[:12], FinishReason.LENGTH, [], "length"),
    (named("add"), ARGUMENTS[2], FinishReason.STOP, [("add", ARGUMENTS[2])], "stop"),
    (named("add"), ARGUMENTS[2] + "<|im_end|>", FinishReason.STOP, [("add", ARGUMENTS[2])], "stop"),
    (named("add"), '{"a": "', FinishReason.LENGTH, [("add", '{"a": "')], "length"),
]


def outputs(text: str, size: int, reason: FinishReason) -> list[SequenceOutput]:
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    last = len(pieces) - 1
    return [
        SequenceOutput("r", 0, (7,), one, finish_reason=reason if at == last else None) for at, one in enumerate(pieces)
    ]


def answer(choice: Any) -> Answer:
    job = Job("chatcmpl-1", chat(tools=TOOLS, tool_choice=choice), [GenerationRequest("r", (1,))])
    return Answer(job, "tiny", tiny_models.tokenizer())


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize(("choice", "text", "reason", "calls", "told"), OUTPUTS)
def test_callers_receive_the_calls_of_an_output(choice, text, reason, calls, told, size):
    """Clients of a stream put the entries of a call together by their index."""
    one = answer(choice)
    one.add(outputs(text, size, reason))
    (found,) = one.whole()["choices"]
    whole = [(call["function"]["name"], call["function"]["arguments"]) for call in found["message"]["tool_calls"]]
    assert (found["message"]["content"], found["finish_reason"], whole) == (None, told, calls)
    one = answer(choice)
    chunks = [*one.begin(), *(chunk for output in outputs(text, size, reason) for chunk in one.chunks([output]))]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert put_together([call for delta in deltas for call in delta.get("tool_calls", ())]) == calls
    assert not any(delta.get("content") for delta in deltas)
    assert chunks[-1]["choices"][0]["finish_reason"] == told
    assert all(delta for delta in deltas[:-1]), "no chunk is empty"


def put_together(entries: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    calls: list[tuple[str, str]] = []
    for entry in entries:
        if entry["index"] == len(calls):
            assert entry["id"]
            calls.append((entry["function"]["name"], ""))
        assert entry["index"] == len(calls) - 1
        name, arguments = calls[-1]
        calls[-1] = name, arguments + entry["function"]["arguments"]
    return calls
