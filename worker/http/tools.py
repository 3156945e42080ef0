"""Tool calls that a caller forces: a grammar makes the output a list of calls, or the arguments of one.

What a model writes by itself, with the choice `auto`, has another form in every family of models, and is not read.
"""

from __future__ import annotations

import json
import re
import uuid
from typing import Any

from speclen.worker.http.errors import ApiError
from speclen.worker.http.schema import ChatRequest, Function, NamedTool
from speclen.worker.structured.source import StructuredOutput

CALL_HEAD = re.compile(r'[\[\]}, ]*\{"name": ("(?:[^"\\]|\\.)*"), "arguments": ')  # as of `call_head`
MARKS = re.compile(r'\\.?|["{}]', re.DOTALL)  # in JSON: an escaped character, an end of a string, a brace


def is_forced(body: ChatRequest) -> bool:
    """True if the output must be tool calls."""
    return body.tool_choice not in (None, "none", "auto")


def from_tools(body: ChatRequest) -> list[StructuredOutput]:
    """The constraint of forced calls, if any. Raises ApiError for tools that cannot be served."""
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
    """Schema of the arguments, which are an object. Raises ApiError for another type."""
    schema = function.parameters or {"properties": {}, "additionalProperties": False}
    if (kind := schema.get("type", "object")) != "object":
        raise ApiError(
            400, f"tools: the parameters of {function.name!r} have the type {kind!r}: it must be object", "tools"
        )
    return schema | {"type": "object"}


class CallReader:
    """The calls in a growing output. name: of the one function whose arguments the output is; None for a list of calls."""

    def __init__(self, name: str | None) -> None:
        self._name = name  # of the call that has begun, if no entry has told it
        self._in_arguments = name is not None
        self._in_string = self._escaped = False
        self._depth = 0  # of braces in the arguments
        self._unread = ""
        self._num_calls = 0

    def read(self, text: str) -> list[dict[str, Any]]:
        """Entries for the calls in new text, in OpenAI's form: the first entry of a call has its id and name."""
        self._unread += text
        entries = []
        while self._unread and (self._in_arguments or self._begins()):
            entries.append(self._entry(self._take_arguments()))
        return entries

    def _begins(self) -> bool:
        """Begin the next call, if the unread text has all that stands before its arguments."""
        head = CALL_HEAD.match(self._unread)
        if head is None:
            return False
        self._unread, self._in_arguments = self._unread[head.end() :], True
        self._name = str(json.loads(head[1]))
        return True

    def _take_arguments(self) -> str:
        """The unread text, or its beginning if the arguments end in it."""
        end, begin, self._escaped = len(self._unread), int(self._escaped), False
        for found in MARKS.finditer(self._unread, begin):
            mark = found[0]
            if mark == '"':
                self._in_string = not self._in_string
            elif mark == "\\":
                self._escaped = True  # what it escapes is still to come
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
