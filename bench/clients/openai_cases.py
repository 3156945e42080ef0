"""What people do with the official client, each as one case: it raises, or it passes."""

from __future__ import annotations

from collections.abc import Callable

import openai
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
    errors,
    wrong_key,
    cancel,
)
