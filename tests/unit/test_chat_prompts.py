"""Chat prompts are many, whole, in turns, and on one side of the split between measuring and training."""

import copy

import pytest

from speclen.bench.serving.chat import KINDS, PLACEHOLDER, ChatPrompts, is_held_out
from tests.support import tiny_models

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def tokenizer():
    found = copy.deepcopy(tiny_models.tokenizer())
    found.chat_template = TEMPLATE
    return found


@pytest.fixture(scope="module")
def prompts(tokenizer):
    return ChatPrompts(tokenizer)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_has_many_prompts_and_those_of_training_are_others(prompts, kind):
    measured = {"\n".join(prompts.turns(kind, seed)) for seed in range(200)}
    trained = {"\n".join(prompts.turns(kind, seed, held_out=False)) for seed in range(200)}
    assert min(len(measured), len(trained)) >= 100
    assert not measured & trained
    assert all(map(is_held_out, measured))
    assert not any(PLACEHOLDER.search(text) for text in measured | trained)
    assert prompts.turns(kind, 3) == prompts.turns(kind, 3)


def test_conversations_have_several_questions_and_end_with_one(prompts):
    lengths = {len(prompts.turns("chat-turns", seed)) for seed in range(100)}
    assert lengths == {3, 5, 7}
    assert {len(prompts.turns("chat-edit", seed)) for seed in range(100)} == {1}


def test_a_prompt_ends_where_the_answer_begins(prompts, tokenizer):
    question, answer, follow_up = prompts.turns("chat-turns", 0)
    expected = f"<user>{question}\n<assistant>{answer}\n<user>{follow_up}\n<assistant>"
    assert tokenizer.decode(prompts.draw("chat-turns", 0)) == expected


def test_a_model_without_a_chat_template_is_refused():
    with pytest.raises(ValueError, match="no chat template"):
        ChatPrompts(tiny_models.tokenizer())
