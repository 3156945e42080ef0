"""Messages to the prompt that the model was trained on, by its chat template."""

from __future__ import annotations

import inspect
from typing import Any

import jinja2

from speclen.worker.http.errors import ApiError
from speclen.worker.http.schema import Message
from speclen.worker.service.async_engine import AsyncEngine


async def chat_prompt(
    engine: AsyncEngine,
    caller: str,
    messages: list[Message],
    template: str | None,
    add_prompt: bool,
    extra: dict[str, Any],
) -> str:
    """Text of the prompt. template: in place of the tokenizer's own.

    Raises ApiError where there is none, or it refuses; QueueFullError when too many wait for theirs.
    """
    tokenizer = engine.entrance.encoder.tokenizer
    if template is None and not tokenizer.chat_template:
        raise ApiError(
            400,
            "the model's tokenizer has no chat template: use /v1/completions, or start the worker with --chat-template",
            "messages",
            "no_chat_template",
        )
    conversation = [to_dict(message) for message in messages]
    try:
        # Aside, since a template is a program that runs over everything that was sent.
        return await engine.entrance.templates.do(caller, render, tokenizer, conversation, template, add_prompt, extra)
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise ApiError(400, f"messages do not fit the model's chat template: {error}", "messages") from error


def render(
    tokenizer: Any, conversation: list[dict[str, Any]], template: str | None, add_prompt: bool, extra: dict[str, Any]
) -> str:
    reserved = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters}
    if taken := reserved & extra.keys():
        raise ValueError(f"chat_template_kwargs may not set {', '.join(sorted(taken))}")
    return str(
        tokenizer.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=add_prompt, chat_template=template, **extra
        )
    )


def to_dict(message: Message) -> dict[str, Any]:
    """What templates expect: content as one text."""
    content = message.content
    text = content if isinstance(content, str) else "\n".join(part.text for part in content or ())
    return {**(message.model_extra or {}), "role": message.role, "content": text}
