"""A chat template gets every message in a form that it reads, and its errors are reported to the caller."""

import copy
import json
from typing import Any

import pytest

from speclen.worker.http.chat import render
from speclen.worker.http.errors import ApiError
from speclen.worker.http.schema import ChatRequest
from tests.support import tiny_models

STRINGS = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}"
PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)
# As of some models that see images: the system's content is a text, the others' are parts.
MIXED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'system' %}{{ m.content | trim }}{% else %}"
    "{{ m.content[0]['text'] }}{% endif %}{% endfor %}"
)
CONCATENATING = "{% for m in messages %}{{ '<' + m.role + '>' + m.content[0].text }}{% endfor %}"
KNOWN_ROLES = (
    "{% for m in messages %}{% if m.role in ['system', 'user'] %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
SYSTEM_AND_USER = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]


def prompt(template: str, *messages: dict[str, Any], **fields: Any) -> str:
    """The prompt of a chat with these fields."""
    body = ChatRequest.model_validate({"messages": [*messages], "add_generation_prompt": False} | fields)
    return render(tiny_models.tokenizer(), body.messages, body, template)


@pytest.mark.parametrize("template", [STRINGS, PARTS, MIXED, CONCATENATING, KNOWN_ROLES])
def test_texts_reach_the_prompt_in_every_form_that_templates_read(template):
    assert prompt(template, *SYSTEM_AND_USER) == "<system>Be short.<user>Hi"
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]
    assert prompt(template, {"role": "user", "content": parts}) == "<user>Hi\nthere"


@pytest.mark.parametrize("template", [KNOWN_ROLES, "{{ messages[0].content }}", "no messages at all"])
def test_a_text_that_does_not_reach_the_prompt_is_an_error(template):
    """Even if the text occurs elsewhere in the prompt, as 'e' does."""
    with pytest.raises(ApiError, match=r"messages\.\d: .* leaves out the text of .* role 'critic'") as told:
        prompt(template, *[SYSTEM_AND_USER[0]] * (template != "no messages at all"), {"role": "critic", "content": "e"})
    assert (told.value.status, told.value.param) == (400, "messages")


def test_empty_messages_and_tool_calls_need_no_text_in_the_prompt():
    called = {"role": "assistant", "content": "I look.", "tool_calls": [call("{}")]}
    assert prompt(KNOWN_ROLES, called, {"role": "tool"}, {"role": "user", "content": "Hi"}) == "<user>Hi"


@pytest.mark.parametrize("said", [{"content": [{"type": "refusal", "refusal": "No."}]}, {"refusal": "No."}])
def test_a_refusal_is_the_assistants_text(said):
    assert prompt(STRINGS, {"role": "assistant", **said}) == "<assistant>No."


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 1 // 0 }}", "division"),
        ("{{ 1e308 ** 9 }}", "out of range|too large"),
        ("{{ [][1] | tojson }}", "not JSON serializable|Undefined"),
        ("{{ 'x'.rindex('y') }}", "substring"),
        ("{{ '{1}'.format(0) }}", "index out of range"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{% for m in messages %}{% endfor", "expected"),
        ("{{ raise_exception('roles must\\nalternate') }}", "roles must$"),
        ("{{ raise_exception('long ' * 1000) }}", "long"),
    ],
)
def test_an_error_inside_a_template_is_one_sentence(template, reason):
    with pytest.raises(ApiError, match=reason) as told:
        prompt(template, *SYSTEM_AND_USER)
    assert (told.value.status, told.value.param) == (400, "messages")
    assert "\n" not in told.value.message
    assert len(told.value.message) < 300


@pytest.mark.parametrize(
    ("template", "role"),
    [
        (KNOWN_ROLES, "system"),
        (STRINGS, "system"),  # it takes any role, but the model was not trained on this one
        (KNOWN_ROLES.replace("'system'", "'developer'"), "developer"),
    ],
)
def test_a_developer_message_becomes_a_system_message_if_the_role_is_unknown(template, role):
    assert prompt(template, {"role": "developer", "content": "Be short."}) == f"<{role}>Be short."


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": arguments}}


CALLS = (
    "{% for m in messages %}{% for c in m.tool_calls %}{{ c.id }} {{ c.function.name }}("
    "{% for name, value in c.function.arguments | items %}{{ name }}={{ value | tojson }}{% endfor %})"
    "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"a": ["é", 1]}', 'call_1 add(a=["é", 1]){"a": ["é", 1]}'),
        ({"a": 1}, 'call_1 add(a=1){"a": 1}'),
        ("", "call_1 add(){}"),
        (None, "call_1 add(){}"),
    ],
)
def test_arguments_of_earlier_calls_reach_the_template_as_an_object(arguments, text):
    assert prompt(CALLS, {"role": "assistant", "tool_calls": [call(arguments)]}) == text


def test_null_fields_are_absent_for_the_template():
    """SDKs send messages back with every field that they know."""
    template = "{{ 'tool_calls' in messages[0] or 'audio' in messages[0] }}{{ messages[0].content }}"
    sent = {"role": "assistant", "content": "Hi", "audio": None, "refusal": None}
    assert prompt(template, sent | {"tool_calls": None}) == "FalseHi"
    assert prompt(template, sent | {"tool_calls": []}) == "FalseHi"


TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
VARIABLES = (
    "{{ reasoning_effort }} {{ enable_thinking }} {{ tools | tojson if tools else '' }}{{ messages[0].content }}"
)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "  Hi"),
        ({"reasoning_effort": "low"}, "low True Hi"),
        ({"reasoning_effort": "none"}, "none False Hi"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}, "low False Hi"),
        ({"tools": [TOOL], "tool_choice": "required"}, f"  {json.dumps([TOOL])}Hi"),
        ({"tools": [TOOL], "tool_choice": "none"}, "  Hi"),
    ],
)
def test_the_template_gets_the_effort_and_the_tools(fields, text):
    assert prompt(VARIABLES, {"role": "user", "content": "Hi"}, **fields) == text


@pytest.mark.parametrize(
    ("own", "tools", "text"),
    [
        ("own {{ messages[0].content }}", [], "own Hi"),
        ({"default": "d {{ messages[0].content }}", "rag": "r"}, [], "d Hi"),
        ({"default": "d", "tool_use": "t {{ messages[0].content }}"}, [TOOL], "t Hi"),
        (
            {"rag": "r", "tool_use": "t"},
            [],
            "has the chat templates rag, tool_use and no default: start the worker with",
        ),
        (None, [], "has no chat template: use /v1/completions, or start the worker with --chat-template"),
    ],
)
def test_the_tokenizers_own_template(own, tools, text):
    tokenizer = copy.deepcopy(tiny_models.tokenizer())
    tokenizer.chat_template = own
    messages = [{"role": "user", "content": "Hi"}]
    body = ChatRequest.model_validate({"messages": messages, "tools": tools, "add_generation_prompt": False})
    if text.endswith("Hi"):
        assert render(tokenizer, body.messages, body, None) == text
        return
    with pytest.raises(ApiError, match=text) as told:
        render(tokenizer, body.messages, body, None)
    assert told.value.code == "no_chat_template"
