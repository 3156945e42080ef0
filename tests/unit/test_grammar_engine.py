"""With a grammar an engine's output is the target's, restricted at every token to what the grammar allows."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from speclen.records import Arm
from speclen.worker.requests.request import FinishReason, GenerationRequest, SamplingParams
from speclen.worker.structured import source, trial
from speclen.worker.structured.grammar import Grammar
from speclen.worker.structured.source import StructuredOutput
from tests.support import engines, tiny_models
from tests.support.engines import Arms, Collected, RandomLengths


@pytest.fixture(scope="module")
def prepared() -> Any:
    """Prepares a grammar for the tiny models, without a process of its own."""
    pytest.importorskip("llguidance")
    tokenizer = tiny_models.tokenizer()
    matching = trial.make_tokenizer(tokenizer.backend_tokenizer.to_str(), None, [tiny_models.EOS_ID])

    def prepare(kind: str, text: Any, whitespace: str | None = "") -> Grammar:
        text = text if isinstance(text, str) else json.dumps(text)
        written = source.source(StructuredOutput(kind, text, whitespace))
        matcher = trial.make_matcher(matching, written)
        assert not matcher.is_error(), matcher.get_error()
        return Grammar(matcher, tiny_models.VOCAB_SIZE, [tiny_models.EOS_ID])

    return prepare


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
        assert mask is not None
        yield token, logits[at].masked_fill(~torch.from_numpy(mask), float("-inf"))
        if token != tiny_models.EOS_ID:
            state.append([token])
    assert not state.failure


def structured(
    name: str, grammar: Grammar | None, prompt: list[int], length: int | None = None, **sampling: Any
) -> GenerationRequest:
    return GenerationRequest(name, tuple(prompt), SamplingParams(**sampling), length, grammar)


def test_greedy_output_is_what_the_target_alone_may_write(prepared: Any) -> None:
    """Rows with and without grammars in one batch, another length at every step, some with lengths of their own."""
    generator = random.Random(3)
    requests = []
    for number in range(80):
        kind, text = generator.choice(WANTED)
        grammar = prepared(kind, text) if number % 4 else None
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


class LenientMatcher:
    """Allows every token, slowly if it is to, and fails after some."""

    def __init__(self, failing_after: int = 10**9, mask_s: float = 0.0) -> None:
        self.failing_after, self.mask_s, self.num_read = failing_after, mask_s, 0

    def compute_bitmask(self) -> bytes:
        time.sleep(self.mask_s)
        return np.packbits(np.ones(tiny_models.VOCAB_SIZE, dtype=np.uint8)).tobytes()

    def consume_token(self, sampled_token: int) -> bool:
        self.num_read += 1
        return True

    def rollback(self, num_tokens: int) -> bool:
        self.num_read -= num_tokens
        return True

    def deep_copy(self) -> LenientMatcher:
        copy = LenientMatcher(self.failing_after, self.mask_s)
        copy.num_read = self.num_read
        return copy

    def is_accepting(self) -> bool:
        return True

    def is_error(self) -> bool:
        return self.num_read > self.failing_after

    def get_error(self) -> str:
        return "too complex\nand its whole state" if self.is_error() else ""


def lenient(**settings: Any) -> Grammar:
    return Grammar(LenientMatcher(**settings), tiny_models.VOCAB_SIZE, [tiny_models.EOS_ID])


@pytest.mark.parametrize("penalty", [0.0, 0.5])
@pytest.mark.parametrize("length", [0, 4])
def test_a_grammar_that_fails_ends_its_own_request(length: int, penalty: float) -> None:
    """Story: with a penalty, which counts the new tokens, of which there were none, it was an error of the server."""
    grammar = lenient(failing_after=2)
    alone = engines.generate(engines.make_engine(chooser=0), structured("a", None, [3, 4], max_tokens=20))
    engine, collected = engines.make_engine(chooser=length), Collected()
    engine.submit(
        structured("bad", grammar, [3, 4], max_tokens=20, ignore_eos=True, presence_penalty=penalty), collected
    )
    engine.submit(structured("a", None, [3, 4], max_tokens=20), collected)
    engines.finish(engine)
    error = collected.last("bad").error
    assert error is not None
    assert error.endswith("the grammar cannot be followed any further: too complex")
    assert collected.last("bad").is_callers
    assert collected.ids("a") == alone.ids("a")


def test_a_grammar_whose_masks_are_slow_gets_no_drafts() -> None:
    """All rows wait for the masks of one, and every proposed token needs one of its own."""
    chooser = Arms(Arm(3))
    asked = structured("a", lenient(mask_s=0.05), [3, 4], max_tokens=8, ignore_eos=True)
    engines.generate(engines.make_engine(chooser=chooser), asked)
    assert [record.arm.speculation_length for record in chooser.records] == [0] * 7


def test_the_text_of_an_end_token_ends_nothing(prepared: Any) -> None:
    """Story: where a grammar asks for it, the token itself was allowed, and the output had ended as if that were all."""
    end = tiny_models.tokenizer().decode([tiny_models.EOS_ID])
    for kind, wanted in (("choice", [f"{end}x"]), ("json_schema", {"const": end})):
        asked = structured("a", prepared(kind, wanted), [5, 6], max_tokens=60)
        last = engines.generate(engines.make_engine(chooser=2), asked).last("a")
        assert last.finish_reason is FinishReason.ABORT
        assert last.error is not None
        assert last.error.endswith("it wants the text of an end token, which would end the output")
