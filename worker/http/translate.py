"""Requests of the engine from the body of an HTTP request, and tool calls that the caller forces.

For a forced call a grammar makes the output a list of calls, or the arguments of one call. Calls that a model writes of its
own accord (`tool_choice: auto`) have another form in every model family, and are not parsed.
"""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass, fields, replace
from typing import Any

from speclen.worker.frontend.async_engine import AsyncEngine
from speclen.worker.frontend.grammars import ANY_OBJECT, StructuredOutput
from speclen.worker.http.chat import chat_prompt
from speclen.worker.http.errors import ApiError
from speclen.worker.http.schema import (
    INSTEAD,
    UNSUPPORTED,
    Body,
    ChatRequest,
    CompletionRequest,
    Function,
    NamedTool,
    Sampling,
)
from speclen.worker.requests.request import (
    MAX_ANSWER_LOGPROBS,
    GenerationRequest,
    SamplingParams,
    TextTooLongError,
    check_answer_size,
)

CALL_HEAD = re.compile(r'[\[\]}, ]*\{"name": ("(?:[^"\\]|\\.)*"), "arguments": ')  # as `call_head` in grammars.py
MARKS = re.compile(r'\\.?|["{}]', re.DOTALL)  # in JSON: an escaped character, a quote, a brace
COMPLETION_MAX_TOKENS = 16  # OpenAI's default; chat has none
NAMES = [field.name for field in fields(SamplingParams)]


def is_forced(body: ChatRequest) -> bool:
    """True if the output must consist of tool calls."""
    return body.tool_choice not in (None, "none", "auto")


def from_tools(body: ChatRequest) -> list[StructuredOutput]:
    """The constraint for forced tool calls, if any, as a list. Raises ApiError if they are not supported."""
    functions, choice = [tool.function for tool in body.tools or ()], body.tool_choice
    if not is_forced(body):
        if functions and choice != "none":
            raise ApiError(
                400,
                "tool_choice 'auto', the default with tools, is not supported by this server, since every family of models "
                "writes calls in its own form: set tool_choice to 'required', to one of the functions, or to 'none'",
                "tool_choice",
                "unsupported_parameter",
            )
        return []
    if not functions:
        raise ApiError(400, "tool_choice needs tools", "tool_choice")
    if not isinstance(choice, NamedTool):
        pairs = [(one.name, arguments_schema(one)) for one in functions]
        return [
            StructuredOutput("call" if body.parallel_tool_calls is False else "calls", json.dumps(pairs), None, "tools")
        ]
    named = [one for one in functions if one.name == choice.function.name]
    if not named:
        raise ApiError(
            400, f"tool_choice names {choice.function.name[:64]!r}, which tools does not have", "tool_choice"
        )
    return [StructuredOutput("arguments", json.dumps(arguments_schema(named[0])), field="tools")]


def arguments_schema(function: Function) -> dict[str, Any]:
    """Schema of a function's arguments. Raises ApiError unless its type is object."""
    schema = function.parameters or {"properties": {}, "additionalProperties": False}
    if (kind := schema.get("type", "object")) != "object":
        raise ApiError(
            400, f"tools: the parameters of {function.name!r} have the type {kind!r}: it must be object", "tools"
        )
    return schema | {"type": "object"}


class CallReader:
    """Reads tool calls from an output as it grows.

    name: of the function, if the output is the arguments of one call; None if the output is a list of calls.
    """

    def __init__(self, name: str | None) -> None:
        self._name = name  # of the current call; None once an entry has contained it
        self._in_arguments = name is not None
        self._in_string = self._escaped = False
        self._depth = 0  # of braces in the arguments
        self._unread = ""
        self._num_calls = 0

    def read(self, text: str) -> list[dict[str, Any]]:
        """Add text. Returns entries for its calls in OpenAI's form, where the first entry of a call has its id and name."""
        self._unread += text
        entries = []
        while self._unread and (self._in_arguments or self._begins()):
            entries.append(self._entry(self._take_arguments()))
        return entries

    def _begins(self) -> bool:
        """Begin the next call, if the unread text contains everything before its arguments."""
        head = CALL_HEAD.match(self._unread)
        if head is None:
            return False
        self._unread, self._in_arguments = self._unread[head.end() :], True
        self._name = str(json.loads(head[1]))
        return True

    def _take_arguments(self) -> str:
        """Take the unread text, up to the end of the arguments if that is in it."""
        end, begin, self._escaped = len(self._unread), int(self._escaped), False
        for found in MARKS.finditer(self._unread, begin):
            mark = found[0]
            if mark == '"':
                self._in_string = not self._in_string
            elif mark == "\\":
                self._escaped = True  # the escaped character is still to come
            elif mark in "{}" and not self._in_string:
                self._depth += 1 if mark == "{" else -1
                if self._depth == 0:
                    self._in_arguments, end = False, found.end()
                    break
        taken, self._unread = self._unread[:end], self._unread[end:]
        return taken

    def _entry(self, arguments: str) -> dict[str, Any]:
        name, self._name = self._name, None
        if name is None:
            return {"index": self._num_calls - 1, "function": {"arguments": arguments}}
        self._num_calls += 1
        call = {"index": self._num_calls - 1, "id": f"call_{uuid.uuid4().hex}", "type": "function"}
        return call | {"function": {"name": name, "arguments": arguments}}


@dataclass(frozen=True, slots=True)
class Job:
    """One HTTP request. requests: one for each prompt; the choices of a prompt follow one another."""

    id: str
    body: Sampling
    requests: list[GenerationRequest]

    @property
    def n(self) -> int:
        return self.body.n or 1

    @property
    def chat(self) -> bool:
        return isinstance(self.body, ChatRequest)


async def completion_job(body: CompletionRequest, engine: AsyncEngine, caller: str) -> Job:
    """The job of a completion.

    Raises ApiError or ValueError naming the field, QueueFullError if too many texts wait to be encoded.
    """
    check_supported(body)
    prompts = await prompt_ids(body, engine, caller)
    wanted = COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    return await make_job(body, prompts, wanted, body.logprobs, engine, caller)


async def chat_job(body: ChatRequest, engine: AsyncEngine, caller: str, template: str | None) -> Job:
    """The job of a chat. template: replaces the tokenizer's. Raises as `completion_job`."""
    check_supported(body)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", "top_logprobs")
    text = await chat_prompt(engine, caller, body.messages, body, template)
    prompts = [await encode(text, False, engine, caller, "messages")]
    wanted = body.max_completion_tokens or body.max_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return await make_job(body, prompts, wanted, logprobs, engine, caller)


def structured_output(body: Sampling) -> StructuredOutput | None:
    """The constraint of the output; None if there is none. Raises ApiError if there are several, or an empty one."""
    asked = from_response_format(body) + from_structured_outputs(body)
    if isinstance(body, ChatRequest):
        asked += from_tools(body)
    if len(asked) > 1:
        names = " and ".join(one.field for one in asked)
        raise ApiError(400, f"{names} are given: leave one of them", asked[0].field.partition(".")[0])
    if body.structured_outputs is not None and not asked:
        words = "structured_outputs is empty: give one of json, json_object, regex, choice and grammar"
        raise ApiError(400, words, "structured_outputs")
    return asked[0] if asked else None


def from_response_format(body: Sampling) -> list[StructuredOutput]:
    given = body.response_format
    if given is None or given.type == "text":
        return []
    if given.type == "json_object":
        return [StructuredOutput("json_schema", ANY_OBJECT, field="response_format.type")]
    if given.json_schema is None:
        raise ApiError(400, "response_format.json_schema is missing", "response_format")
    return [StructuredOutput("json_schema", json.dumps(given.json_schema.wanted), field="response_format.json_schema")]


def from_structured_outputs(body: Sampling) -> list[StructuredOutput]:
    given = body.structured_outputs
    if given is None:
        return []
    schema = given.wanted if given.wanted is None or isinstance(given.wanted, str) else json.dumps(given.wanted)
    texts = {
        "json": ("json_schema", schema),
        "json_object": ("json_schema", ANY_OBJECT if given.json_object else None),
        "regex": ("regex", given.regex),
        "choice": ("choice", None if given.choice is None else json.dumps(given.choice)),
        "grammar": ("grammar", given.grammar),
    }
    whitespace = "" if given.disable_any_whitespace else given.whitespace_pattern or None
    return [
        StructuredOutput(kind, text, whitespace, f"structured_outputs.{name}")
        for name, (kind, text) in texts.items()
        if text is not None
    ]


def check_supported(body: Body) -> None:
    """Raise ApiError if a field is not supported, or if options of a stream are given without a stream."""
    if isinstance(body, Sampling) and body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream to be true", "stream_options")
    for name, value in (body.model_extra or {}).items():
        if name == "best_of" and value == getattr(body, "n", None):
            continue  # the best n of n are all
        if name in UNSUPPORTED and value not in UNSUPPORTED[name]:
            way_out = INSTEAD.get(name, "leave it out")
            raise ApiError(400, f"{name} is not supported by this server: {way_out}", name, "unsupported_parameter")


async def prompt_ids(body: CompletionRequest, engine: AsyncEngine, caller: str) -> list[list[int]]:
    """Token ids of every prompt."""
    prompt: Any = body.prompt
    if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int):
        prompt = [prompt]
    special = body.add_special_tokens is not False
    return [
        await encode(one, special, engine, caller, "prompt") if isinstance(one, str) else list(one) for one in prompt
    ]


async def encode(text: str, add_special_tokens: bool, engine: AsyncEngine, caller: str, param: str) -> list[int]:
    """Token ids of a text. param: the field that holds it. Raises ApiError if it is too long, or QueueFullError."""
    try:
        return await engine.admission.encoder.encode(text, caller, add_special_tokens=add_special_tokens)
    except TextTooLongError as error:
        raise too_long(engine, param, f"is too long ({error})") from error


def too_long(engine: AsyncEngine, param: str, words: str) -> ApiError:
    """The error for a prompt that is too long, in OpenAI's words, which clients look for."""
    message = f"This model's maximum context length is {engine.max_sequence_tokens} tokens, but the {param} {words}"
    return ApiError(400, message, param, "context_length_exceeded")


async def make_job(
    body: Sampling,
    prompts: list[list[int]],
    max_tokens: int | None,
    logprobs: int | None,
    engine: AsyncEngine,
    caller: str,
) -> Job:
    """Make a job, with its grammar, if any. max_tokens: None for as many as fit in the context and in the answer."""
    kind, param = ("chatcmpl", "messages") if isinstance(body, ChatRequest) else ("cmpl", "prompt")
    job_id = f"{kind}-{uuid.uuid4().hex}"
    requests = []
    for index, ids in enumerate(prompts):
        room = engine.max_sequence_tokens - len(ids)
        if room < 1 or (max_tokens or 1) > room:
            asked = "" if max_tokens is None else f" and max_tokens is {max_tokens}"
            raise too_long(engine, param, f"has {len(ids)}{asked}: shorten one of them")
        most = max_tokens or most_tokens(body, room, logprobs)
        sampling = to_sampling(body, most, logprobs, engine.engine.pair.sampling_defaults)
        requests.append(GenerationRequest(f"{job_id}-{index}", tuple(ids), sampling, fixed_length(body)))
    if not body.stream:
        check_answer_size(requests, engine.max_sequence_tokens)
    if (wanted := structured_output(body)) is not None:
        grammar = await engine.admission.grammars.prepare(wanted, caller)
        requests = [replace(one, grammar=grammar) for one in requests]
    return Job(job_id, body, requests)


def most_tokens(body: Sampling, room: int, logprobs: int | None) -> int:
    """Default for max_tokens: the room in the context, but no more than `check_answer_size` allows."""
    entries = (body.n or 1) * (logprobs or 0)
    return room if body.stream or not entries else min(room, MAX_ANSWER_LOGPROBS // entries)


def fixed_length(body: Sampling) -> int | None:
    """The request's own speculation length; None if the table decides."""
    lengths: dict[Any, int | None] = {None: None, "auto": None, "off": 0}
    return lengths[body.speculation] if body.speculation in lengths else int(body.speculation or 0)


def to_sampling(body: Sampling, max_tokens: int, logprobs: int | None, defaults: dict[str, float]) -> SamplingParams:
    """Sampling parameters; null and absent fields have defaults. defaults: the model's, in place of OpenAI's."""
    given = {name: value for name in NAMES if (value := getattr(body, name, None)) is not None}
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    own = {
        "max_tokens": max_tokens,
        "logprobs": logprobs,
        "stop": tuple(stop),
        "stop_token_ids": tuple(body.stop_token_ids or ()),
        "logit_bias": {int(token): value for token, value in (body.logit_bias or {}).items()},
        "include_special_tokens": body.skip_special_tokens is False,
    }
    if "top_k" in given:  # -1 turns it off, too
        own["top_k"] = max(0, given["top_k"])
    return SamplingParams(**({"temperature": 1.0} | defaults | given | own))
