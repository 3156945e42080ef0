"""A chat template gets every message in a form that it reads, and its faults are the caller's to hear of."""

from __future__ import annotations

from typing import Any

import pytest

from speclen.worker.http.chat import render, to_dict
from speclen.worker.http.errors import ApiError
from speclen.worker.http.schema import Message
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


def prompt(template: str, *messages: dict[str, Any], **extra: Any) -> str:
    conversation = [to_dict(Message.model_validate(message)) for message in messages]
    options = {"chat_template": template, "add_generation_prompt": False}
    return render(tiny_models.tokenizer(), options, extra, conversation)


@pytest.mark.parametrize("template", [STRINGS, PARTS, MIXED, CONCATENATING, KNOWN_ROLES])
def test_texts_reach_the_prompt_whatever_form_the_template_reads(template):
    assert prompt(template, *SYSTEM_AND_USER) == "<system>Be short.<user>Hi"
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]
    assert prompt(template, {"role": "user", "content": parts}) == "<user>Hi\nthere"


@pytest.mark.parametrize("template", [KNOWN_ROLES, "{{ messages[0].content }}", "no messages at all"])
def test_a_text_that_does_not_reach_the_prompt_is_an_error(template):
    """Also where it happens to stand in the prompt: 'e' does."""
    with pytest.raises(ApiError, match=r"messages\.\d: .* leaves out the text of .* role 'developer'") as told:
        prompt(
            template, *[SYSTEM_AND_USER[0]] * (template != "no messages at all"), {"role": "developer", "content": "e"}
        )
    assert (told.value.status, told.value.param) == (400, "messages")


def test_nothing_is_missed_of_empty_messages_and_beside_calls_of_tools():
    called = {"role": "assistant", "content": "I look.", "tool_calls": [{"id": "1"}]}
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
def test_what_goes_wrong_inside_a_template_is_one_sentence(template, reason):
    with pytest.raises(ApiError, match=reason) as told:
        prompt(template, *SYSTEM_AND_USER)
    assert (told.value.status, told.value.param) == (400, "messages")
    assert "\n" not in told.value.message
    assert len(told.value.message) < 300


def test_variables_of_the_call_itself_may_not_be_set():
    with pytest.raises(ApiError, match="chat_template_kwargs may not set tokenize"):
        prompt(STRINGS, *SYSTEM_AND_USER, tokenize=True)
