"""Uses of the official client, as a table: each gives something true, or raises."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import openai
import pydantic

MODEL = "bundled-pair"
BODY = {"model": MODEL, "prompt": "def fibonacci(n):\n", "max_tokens": 32, "temperature": 0}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Write a function."}], "max_tokens": 400}
Case = Callable[[openai.OpenAI], Any]


class Verdict(pydantic.BaseModel):
    score: int = pydantic.Field(ge=0, le=9)
    language: Literal["python", "c"]


def complete(client: openai.OpenAI, **fields: Any) -> Any:
    return client.completions.create(**(BODY | fields))


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**(CHAT | {"max_tokens": 16} | fields))


def text(client: openai.OpenAI, **fields: Any) -> Any:
    return complete(client, **fields).choices[0].text


def streamed(client: openai.OpenAI) -> bool:
    """The same text as at once, and its usage at the end."""
    *chunks, last = complete(client, stream=True, stream_options={"include_usage": True})
    return "".join(chunk.choices[0].text for chunk in chunks) == text(client) and last.usage is not None


def refused(client: openai.OpenAI, error: type[openai.APIStatusError], param: str, **fields: Any) -> bool:
    """True if it is refused with this error because of that field."""
    try:
        complete(client, **fields)
    except error as told:
        return told.param == param
    return False


def wrong_key(client: openai.OpenAI) -> bool:
    try:
        client.with_options(api_key="wrong").models.list()
    except openai.AuthenticationError:
        return True
    return False


def cancelled(client: openai.OpenAI) -> Any:
    """A stream that is closed leaves the worker to others."""
    stream = complete(client, max_tokens=1000, stream=True)
    next(iter(stream))
    stream.close()
    return complete(client, max_tokens=1).choices


def parsed(client: openai.OpenAI) -> bool:
    answer = client.chat.completions.parse(**CHAT, temperature=0, response_format=Verdict)
    return isinstance(answer.choices[0].message.parsed, Verdict)


def structured(client: openai.OpenAI, fits: Callable[[str], Any], **structure: Any) -> bool:
    """Sequences end by themselves and fit the structure, with draft tokens and without. fits: raises or gives false."""
    for speculation in (0, 4):
        body = {"structured_outputs": structure, "speculation": speculation}
        for choice in complete(client, n=2, max_tokens=64, extra_body=body).choices:
            if choice.finish_reason != "stop" or not fits(choice.text):
                raise ValueError(f"{choice.finish_reason}: {choice.text!r} does not fit")
    return True


def wrong_structure(client: openai.OpenAI, **structure: Any) -> bool:
    body = {"structured_outputs": structure}
    return refused(client, openai.BadRequestError, "structured_outputs", extra_body=body)


def any_json(client: openai.OpenAI) -> bool:
    choice = complete(client, max_tokens=200, extra_body={"response_format": {"type": "json_object"}}).choices[0]
    return choice.finish_reason == "length" or isinstance(json.loads(choice.text), dict)


CASES: dict[str, Case] = {
    "models": lambda client: [one.id for one in client.models.list().data] == [MODEL],
    "completion": lambda client: complete(client, n=2, max_tokens=16).usage.completion_tokens == 32,
    "seeded completion": lambda client: len({text(client, temperature=1.0, seed=5) for _ in range(2)}) == 1,
    "stream": streamed,
    "chat": lambda client: chat(client, logprobs=True, top_logprobs=2).choices[0].logprobs.content,
    "chat stream": lambda client: [*chat(client, stream=True)][-1].choices[0].finish_reason,
    "wrong model": partial(refused, error=openai.NotFoundError, param="model", model="gpt-9"),
    "wrong temperature": partial(refused, error=openai.BadRequestError, param="temperature", temperature=-1),
    "wrong length": partial(refused, error=openai.BadRequestError, param="prompt", max_tokens=1_000_000),
    "wrong key": wrong_key,
    "cancel": cancelled,
}
# With the extra `grammar`. Little whitespace, of which a small model would write a lot.
STRUCTURED: dict[str, Case] = {
    "parsed by the client": parsed,
    "any JSON object": any_json,
    "choice": partial(structured, fits=("yes", "no").__contains__, choice=["yes", "no"]),
    "regular expression": partial(
        structured, fits=lambda text: text[3] == "-" and len(text) == 8, regex=r"\d{3}-\d{4}"
    ),
    "JSON schema": partial(
        structured, fits=Verdict.model_validate_json, json=Verdict.model_json_schema(), disable_any_whitespace=True
    ),
    "grammar": partial(structured, fits=lambda text: text.strip("()") == "x", grammar='start: "(" start ")" | "x"'),
    "wrong expression": partial(wrong_structure, regex="("),
    "no structure": wrong_structure,
}
