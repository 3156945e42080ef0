"""With a grammar an engine's output is the target's, restricted at every token to what the grammar allows."""

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from speclen.records import Arm
from speclen.worker.requests.request import FinishReason, GenerationRequest, SamplingParams
from speclen.worker.sampling import grammar as structured_grammar
from speclen.worker.sampling.grammar import Grammar
from tests.support import engines, tiny_models
from tests.support.engines import Arms, RandomLengths
from tests.support.grammars import prepare

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "bc", "def"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


WANTED = [
    ("json_schema", SCHEMA),
    ("regex", "[a-c]{2,8}(x|yz)*"),
    ("choice", ["the target", "the draft", "neither of the two"]),
    ("grammar", 'start: "(" start? ")" | /[0-9]{1,3}/'),
]


def follows(grammar: Grammar, ids: list[int], logits: torch.Tensor, min_tokens: int = 0) -> Iterator[tuple[int, Any]]:
    """Each token, and the logits that it was chosen by: one token after the other, without any draft."""
    state = grammar.start([tiny_models.EOS_ID], min_tokens)
    for at, token in enumerate(ids):
        (mask,) = state.masks([], 0, 1)
        yield token, logits[at].masked_fill(~torch.from_numpy(mask), float("-inf"))
        if token != tiny_models.EOS_ID:
            state.append([token])
    assert not state.failure


def structured(
    name: str, grammar: Grammar | None, prompt: list[int], length: int | None = None, **sampling: Any
) -> GenerationRequest:
    return GenerationRequest(name, tuple(prompt), SamplingParams(**sampling), length, grammar)


def test_greedy_output_is_what_the_target_alone_may_write():
    """Rows with and without grammars in one batch, another length at every step, some with lengths of their own."""
    generator = random.Random(3)
    requests = []
    for number in range(80):
        kind, text = generator.choice(WANTED)
        grammar = prepare(kind, text) if number % 4 else None
        prompt = engines.random_prompt(generator, 24)
        length = generator.choice([None] * 4 + [0, 5])
        limits = {"max_tokens": generator.choice([4, 60]), "min_tokens": generator.choice([0, 0, 3])}
        requests.append(structured(str(number), grammar, prompt, length, **limits))
    chooser = RandomLengths(2, longest=4)
    collected = engines.generate(engines.make_engine(chooser=chooser), *requests)
    target, _ = engines.models("llama")
    num_ended = num_accepted = 0
    for one in requests:
        ids = collected.ids(one.request_id)
        if one.grammar is None:
            continue
        logits = engines.plain_logits(target, [*one.prompt_ids, *ids])[len(one.prompt_ids) - 1 : -1]
        for token, restricted in follows(one.grammar, ids, logits, one.sampling.min_tokens):
            assert restricted[token] >= restricted.max() - 1e-4
        ended = ids[-1] == tiny_models.EOS_ID
        assert collected.reason(one.request_id) is (FinishReason.STOP if ended else FinishReason.LENGTH)
        num_ended += ended
        num_accepted += collected.last(one.request_id).num_accepted_tokens
    assert num_ended > 20
    assert num_accepted > 100, "drafts that are always rejected would prove nothing"


@pytest.mark.parametrize("penalty", [0.0, 0.5])
@pytest.mark.parametrize("length", [0, 4])
@pytest.mark.parametrize(("kind", "wanted"), [("choice", ["ab{end}x"]), ("json_schema", {"const": "{end}"})])
def test_a_grammar_that_fails_ends_its_own_request(kind, wanted, length, penalty):
    """Story: if a grammar required the text of an end token, that token was allowed and the output ended as complete.
    With a penalty it was a server error, since there were no new tokens to count."""
    end = tiny_models.tokenizer().decode([tiny_models.EOS_ID])
    grammar = prepare(kind, json.dumps(wanted).replace("{end}", end))
    bad = structured("bad", grammar, [5, 6], max_tokens=60, presence_penalty=penalty)
    good = structured("good", None, [3, 4], max_tokens=20)
    collected = engines.generate(engines.make_engine(chooser=length), bad, good)
    last = collected.last("bad")
    assert (last.finish_reason, last.is_callers) == (FinishReason.ABORT, True)
    told = (
        "the grammar cannot be followed any further: it requires the text of an end token, which would end the output"
    )
    assert last.error.endswith(told)
    assert collected.ids("good") == engines.generate(engines.make_engine(chooser=0), good).ids("good")


def test_a_grammar_whose_masks_are_slow_gets_no_drafts(monkeypatch):
    """All sequences wait for the masks of one, and every proposed token needs another mask."""
    monkeypatch.setattr(structured_grammar, "SLOW_MASK_S", 0.0)
    chooser = Arms(Arm(3))
    asked = structured("a", prepare("regex", "[a-z ]*"), [3, 4], max_tokens=8, ignore_eos=True)
    engines.generate(engines.make_engine(chooser=chooser), asked)
    assert [record.arm.speculation_length for record in chooser.records] == [0] * 7
