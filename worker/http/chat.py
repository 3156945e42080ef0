"""Prompts from messages, by the model's chat template."""

from __future__ import annotations

import functools
import inspect
import re
import uuid
from collections.abc import Callable, Set
from typing import Any, TypeAlias

from speclen.worker.http.errors import ApiError
from speclen.worker.http.schema import Message
from speclen.worker.service.async_engine import AsyncEngine

Conversation: TypeAlias = list[dict[str, Any]]
Fill: TypeAlias = Callable[[Conversation], str]

MARK = uuid.uuid4().hex  # no template has it
MAX_REASON = 200  # characters of a template's own words in an error


async def chat_prompt(
    engine: AsyncEngine,
    caller: str,
    messages: list[Message],
    template: str | None,
    add_prompt: bool,
    extra: dict[str, Any],
) -> str:
    """Text of the prompt. template: replaces the tokenizer's.

    Raises ApiError without a template, or if it refuses; QueueFullError when too many wait.
    """
    tokenizer = engine.admission.encoder.tokenizer
    if template is None and not tokenizer.chat_template:
        raise ApiError(
            400,
            "the model's tokenizer has no chat template: use /v1/completions, or start the worker with --chat-template",
            "messages",
            "no_chat_template",
        )
    options = {"chat_template": template, "add_generation_prompt": add_prompt}
    conversation = [to_dict(message) for message in messages]
    # In a thread, since a template is a program that runs over the whole conversation.
    return await engine.admission.templates.do(caller, render, tokenizer, options, extra, conversation)


def to_dict(message: Message) -> dict[str, Any]:
    """A message with its content as one string, which most templates expect."""
    content = message.content
    text = content if isinstance(content, str) else "\n".join(part.said for part in content or ())
    return {**(message.model_extra or {}), "role": message.role, "content": text or message.refusal or ""}


def render(tokenizer: Any, options: dict[str, Any], extra: dict[str, Any], conversation: Conversation) -> str:
    """Text of the prompt, with the text of every message. options: of apply_chat_template; extra: the caller's.

    Raises ApiError where the template refuses or leaves one out.
    """
    reserved = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters}
    if taken := reserved & extra.keys():
        raise ApiError(400, f"chat_template_kwargs may not set {', '.join(sorted(taken))}", "chat_template_kwargs")
    fill = functools.partial(filled, tokenizer, options | extra)
    return fill(formed(fill, conversation))


def filled(tokenizer: Any, options: dict[str, Any], conversation: Conversation) -> str:
    """The template's output. Raises ApiError for any error in it: it is a program that came with the model."""
    try:
        return str(tokenizer.apply_chat_template(conversation, tokenize=False, **options))
    except Exception as error:
        lines = str(error).split("\n")
        reason = lines[0][:MAX_REASON] or type(error).__name__
        raise ApiError(400, f"messages do not fit the model's chat template: {reason}", "messages") from error


def formed(fill: Fill, conversation: Conversation) -> Conversation:
    """The conversation in the template's form: contents are strings, or lists of parts where it drops strings.

    Raises ApiError for a message whose text is in the prompt in neither form.
    """
    lost_as_text = lost(fill, conversation)
    if lost_as_text == set():
        return conversation
    in_parts = as_parts(conversation, set(range(len(conversation))) if lost_as_text is None else lost_as_text)
    lost_in_parts = lost(fill, in_parts)
    if lost_as_text is None and lost_in_parts is None:
        return conversation  # it refuses both; filling it in raises the reason
    left_out = lost_as_text if lost_in_parts is None else lost_in_parts
    if left_out:
        first = min(left_out)
        raise ApiError(
            400,
            f"messages.{first}: the model's chat template leaves out the text of this message of the role "
            f"{conversation[first]['role']!r}: give it another role, or start the worker with another --chat-template",
            "messages",
        )
    return in_parts


def lost(fill: Fill, conversation: Conversation) -> set[int] | None:
    """Indices of messages whose text is not in the prompt, found by a mark for each. None: the template refuses.

    With tool calls many templates drop the text on purpose.
    """
    marked, expected = list(conversation), set()
    for index, message in enumerate(conversation):
        if message["content"] and not message.get("tool_calls"):
            mark = f"{MARK}{index:06}"
            content = mark if isinstance(message["content"], str) else [{"type": "text", "text": mark}]
            marked[index] = message | {"content": content}
            expected.add(index)
    try:
        prompt = fill(marked)
    except ApiError:
        return None
    return expected - {int(number) for number in re.findall(rf"{MARK}(\d{{6}})", prompt, re.IGNORECASE)}


def as_parts(conversation: Conversation, which: Set[int]) -> Conversation:
    """The conversation with the text of some messages as a list of one part."""
    return [
        message | {"content": [{"type": "text", "text": message["content"]}]} if index in which else message
        for index, message in enumerate(conversation)
    ]
