"""Uses of the official client, one case each: it raises, or it passes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

import openai
import pydantic
from openai.types.chat import ChatCompletionMessageParam

PROMPT = "def fibonacci(n):\n"
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Write a function."}]


def models(client: openai.OpenAI, model: str) -> None:
    assert [one.id for one in client.models.list().data] == [model]


def completion(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt=PROMPT, max_tokens=16, temperature=0, n=2)
    assert answer.choices[0].text == answer.choices[1].text
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 32


def seeded_completion(client: openai.OpenAI, model: str) -> None:
    twice = [
        client.completions.create(model=model, prompt=PROMPT, max_tokens=24, temperature=1.0, seed=5).choices[0].text
        for _ in range(2)
    ]
    assert twice[0] == twice[1]


def chat(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=16, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].message.role == "assistant"
    assert logprobs is not None
    assert logprobs.content


def streams(client: openai.OpenAI, model: str) -> None:
    whole = client.completions.create(model=model, prompt=PROMPT, max_tokens=32, temperature=0).choices[0].text
    *chunks, last = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=32, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole
    assert last.usage is not None
    deltas = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=8, stream=True)
    *_, ended = deltas
    assert ended.choices[0].finish_reason is not None


class Verdict(pydantic.BaseModel):
    score: int = pydantic.Field(ge=0, le=9)
    language: Literal["python", "c"]


def parsed_answer(client: openai.OpenAI, model: str) -> None:
    """The client's own way to structured output. Little whitespace, of which a small model would write a lot."""
    compact = {"x-guidance": {"whitespace_flexible": False}}
    schema = {"name": "verdict", "schema": Verdict.model_json_schema() | compact}
    for temperature in (0.0, 1.0):
        answer = client.chat.completions.create(
            model=model,
            messages=MESSAGES,
            max_tokens=64,
            temperature=temperature,
            extra_body={"response_format": {"type": "json_schema", "json_schema": schema}},
        )
        assert answer.choices[0].finish_reason == "stop"
        Verdict.model_validate_json(answer.choices[0].message.content or "")


def parsed_by_the_client(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.parse(
        model=model, messages=MESSAGES, response_format=Verdict, max_tokens=400, temperature=0
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Verdict)


def structured_output(client: openai.OpenAI, model: str) -> None:
    wanted: list[tuple[dict[str, Any], Callable[[str], Any]]] = [
        ({"choice": ["yes", "no", "perhaps"]}, ("yes", "no", "perhaps").index),
        ({"regex": "[0-9]{3}-[0-9]{4}"}, lambda text: int(text.replace("-", ""))),
        ({"json": Verdict.model_json_schema(), "disable_any_whitespace": True}, Verdict.model_validate_json),
        ({"grammar": 'start: "(" start ")" | "x"'}, lambda text: text.count("(") == text.count(")") or 1 / 0),
    ]
    for structured, check in wanted:
        for speculation in (0, 4):
            extra = {"structured_outputs": structured, "speculation": speculation}
            answer = client.completions.create(
                model=model, prompt=PROMPT, max_tokens=64, temperature=0, n=2, extra_body=extra
            )
            assert {choice.finish_reason for choice in answer.choices} == {"stop"}
            for choice in answer.choices:
                check(choice.text)


def any_json_object(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=200, extra_body={"response_format": {"type": "json_object"}}, seed=1
    )
    (choice,) = answer.choices
    assert choice.text.lstrip().startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.text), dict)


def wrong_structures(client: openai.OpenAI, model: str) -> None:
    wrong: list[dict[str, Any]] = [{"regex": "("}, {"json": {"type": "nothing"}}, {"choice": []}, {}]
    for structured in wrong:
        told = None
        try:
            client.completions.create(model=model, prompt=PROMPT, extra_body={"structured_outputs": structured})
        except openai.BadRequestError as error:
            told = error
        assert told is not None
        assert told.param == "structured_outputs"


def errors(client: openai.OpenAI, model: str) -> None:
    wrong: list[tuple[type[openai.APIStatusError], str, dict[str, object]]] = [
        (openai.NotFoundError, "model", {"model": "gpt-9"}),
        (openai.BadRequestError, "temperature", {"temperature": -1}),
        (openai.BadRequestError, "prompt", {"max_tokens": 1_000_000}),
    ]
    for kind, param, fields in wrong:
        told = None
        try:
            client.completions.create(**({"model": model, "prompt": PROMPT} | fields))  # type: ignore[call-overload]
        except kind as error:
            told = error
        assert told is not None
        assert told.param == param


def wrong_key(client: openai.OpenAI, model: str) -> None:
    try:
        client.with_options(api_key="wrong").models.list()
    except openai.AuthenticationError:
        return
    raise AssertionError("a wrong key was accepted")


def cancel(client: openai.OpenAI, model: str) -> None:
    stream = client.completions.create(model=model, prompt=PROMPT, max_tokens=1000, stream=True)
    next(iter(stream))
    stream.close()
    assert client.completions.create(model=model, prompt=PROMPT, max_tokens=1).choices


CASES: tuple[Callable[[openai.OpenAI, str], None], ...] = (
    models,
    completion,
    seeded_completion,
    chat,
    streams,
    parsed_answer,
    parsed_by_the_client,
    structured_output,
    any_json_object,
    wrong_structures,
    errors,
    wrong_key,
    cancel,
)
