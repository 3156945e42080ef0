"""Prompts from chat messages, by the model's chat template."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import re
import uuid
from collections.abc import Callable, Set
from typing import Any, TypeAlias

from speclen.worker.frontend.async_engine import AsyncEngine
from speclen.worker.http.errors import ApiError
from speclen.worker.http.schema import ChatPrompt, Message, ToolCall

Conversation: TypeAlias = list[dict[str, Any]]
Fill: TypeAlias = Callable[[Conversation], str]

MARK = uuid.uuid4().hex  # a text that no template contains
DEVELOPER = re.compile(r"""(["'])developer\1""")  # occurs in templates that support this role
MAX_REASON = 200  # characters of a template's own words in an error


async def chat_prompt(
    engine: AsyncEngine, caller: str, messages: list[Message], body: ChatPrompt, template: str | None
) -> str:
    """Text of the prompt. template: replaces the tokenizer's.

    Raises ApiError as `render` does, and QueueFullError if too many calls wait.
    """
    # In a thread, since a template is a program that runs over the whole conversation.
    return await engine.admission.templates.do(
        caller, render, engine.admission.encoder.tokenizer, messages, body, template
    )


def render(tokenizer: Any, messages: list[Message], body: ChatPrompt, template: str | None) -> str:
    """Text of the prompt, which contains the text of every message.

    Raises ApiError if there is no template, or if it refuses the messages or leaves one out.
    """
    extra = body.chat_template_kwargs or {}
    reserved = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters}
    if taken := reserved & extra.keys():
        raise ApiError(400, f"chat_template_kwargs may not set {', '.join(sorted(taken))}", "chat_template_kwargs")
    tools = [] if body.tool_choice == "none" else [tool.model_dump(exclude_unset=True) for tool in body.tools or ()]
    text = template or own_template(tokenizer, bool(tools))
    options: dict[str, Any] = {"chat_template": text, "add_generation_prompt": body.add_generation_prompt is not False}
    if tools:
        options["tools"] = tools
    if (effort := body.reasoning_effort) is not None:  # as vLLM does
        options |= {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    conversation = [to_dict(message, bool(DEVELOPER.search(text))) for message in messages]
    fill = functools.partial(filled, tokenizer, options | extra)
    return fill(formed(fill, conversation))


def own_template(tokenizer: Any, has_tools: bool) -> str:
    """The tokenizer's template. Raises ApiError if it has none, or several and no default."""
    known, way_out = tokenizer.chat_template, "start the worker with --chat-template"
    if not known:
        words = f"the model's tokenizer has no chat template: use /v1/completions, or {way_out}"
        raise ApiError(400, words, "messages", "no_chat_template")
    if isinstance(known, dict) and "default" not in known and not (has_tools and "tool_use" in known):
        words = (
            f"the model has the chat templates {', '.join(known)} and no default: {way_out} and one of them in a file"
        )
        raise ApiError(400, words, "messages", "no_chat_template")
    return str(tokenizer.get_chat_template(None, [{}] if has_tools else None))


def to_dict(message: Message, knows_developer: bool) -> dict[str, Any]:
    """A message in the form that most templates expect: its content is one string, and arguments of calls are objects.

    knows_developer: False if the template does not support the role `developer`, which then becomes `system`.
    """
    content = message.content
    text = content if isinstance(content, str) else "\n".join(part.said for part in content or ())
    role = "system" if message.role == "developer" and not knows_developer else message.role
    given = {name: value for name, value in (message.model_extra or {}).items() if value is not None}
    calls = {"tool_calls": [call_as_dict(call) for call in message.tool_calls]} if message.tool_calls else {}
    return given | {"role": role, "content": text or message.refusal or ""} | calls


def call_as_dict(call: ToolCall) -> dict[str, Any]:
    """A call with its arguments as an object. Arguments that are not a JSON object stay text."""
    arguments = call.function.arguments or {}
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            parsed = json.loads(arguments)
            json.dumps(parsed, ensure_ascii=False).encode()  # raises for lone surrogates, which UTF-8 cannot encode
            arguments = parsed if isinstance(parsed, dict) else arguments
    function = call.function.model_dump(exclude_unset=True) | {"arguments": arguments}
    return call.model_dump(exclude={"function"}) | {"function": function}


def filled(tokenizer: Any, options: dict[str, Any], conversation: Conversation) -> str:
    """The template's output. Raises ApiError for any error in the template, which is a program that comes with the model."""
    try:
        return str(tokenizer.apply_chat_template(conversation, tokenize=False, **options))
    except Exception as error:
        lines = str(error).split("\n")
        reason = lines[0][:MAX_REASON] or type(error).__name__
        raise ApiError(400, f"messages do not fit the model's chat template: {reason}", "messages") from error


def formed(fill: Fill, conversation: Conversation) -> Conversation:
    """The conversation in the form that the template reads: contents are strings, or lists of parts if it drops strings.

    Raises ApiError if the text of a message is missing from the prompt in both forms.
    """
    lost_as_text = lost(fill, conversation)
    if lost_as_text == set():
        return conversation
    in_parts = as_parts(conversation, set(range(len(conversation))) if lost_as_text is None else lost_as_text)
    lost_in_parts = lost(fill, in_parts)
    if lost_as_text is None and lost_in_parts is None:
        return conversation  # it refuses both forms, and the reason is raised when it is filled in
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
    """Indices of messages whose text is missing from the prompt, found by a mark in each. None: the template refuses.

    Messages with tool calls are not checked, since many templates drop their text on purpose.
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
    """The conversation with the contents of some messages as lists of one part."""
    return [
        message | {"content": [{"type": "text", "text": message["content"]}]} if index in which else message
        for index, message in enumerate(conversation)
    ]
