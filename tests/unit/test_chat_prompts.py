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
