"""With a grammar the output follows the target, restricted at every token to what the grammar allows.

Greedy: token by token, the most likely of those that the grammar allows, whatever is drafted. Sampled: by exact enumeration
of a grammar over five tokens, with a matcher made here. What schemas of callers allow, and which are refused, follows.
"""

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from speclen.records import Arm
from speclen.worker.frontend.grammars import StructuredOutput, source
from speclen.worker.requests.request import FinishReason, GenerationRequest, SamplingParams
from speclen.worker.sampling import grammar as structured_grammar
from speclen.worker.sampling.grammar import Grammar, StepGrammars
from speclen.worker.sampling.rules import BatchSampling, RowSampling
from speclen.worker.sampling.verification import acceptance, recovery
from tests.support import engines, tiny_models
from tests.support.engines import Arms, RandomLengths
from tests.support.grammars import prepare

VOCAB = 5
END = 4
TARGET = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0)) * 1.5
DRAFT = TARGET + torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1))


@dataclass
class TableMatcher:
    """Follows a table: what may come after each token; the start is -1. Like llguidance's, it stays in error."""

    table: dict[int, list[int]]
    read: list[int] = field(default_factory=lambda: [-1])
    poison: tuple[int, ...] = ()  # after these it is in error for good
    unreadable: bool = False  # the last of them is not even read
    dead: bool = False

    def compute_bitmask(self) -> bytes:
        self._die()
        bits = np.zeros(VOCAB, dtype=np.uint8)
        bits[self.table[self.read[-1]]] = 1
        return np.packbits(bits, bitorder="little").tobytes()

    def consume_token(self, sampled_token: int) -> bool:
        assert not self.dead
        assert sampled_token in self.table[self.read[-1]], "only tokens that its own mask allows are read"
        self.read.append(sampled_token)
        if self.unreadable:
            self._die()
        return not self.dead

    def _die(self) -> None:
        self.dead |= bool(self.poison) and tuple(self.read[-len(self.poison) :]) == self.poison

    def rollback(self, num_tokens: int) -> bool:
        assert not self.dead
        del self.read[len(self.read) - num_tokens :]
        return True

    def deep_copy(self):
        assert not self.dead
        return TableMatcher(self.table, list(self.read), self.poison, self.unreadable)

    def is_accepting(self) -> bool:
        return END in self.table[self.read[-1]]

    def is_error(self) -> bool:
        return self.dead

    def get_error(self) -> str:
        return "too complex\nand its whole state" if self.dead else ""


# Ends after 1 only; 0 and 3 exclude each other; 2 goes with everything.
TABLE = {-1: [0, 2, 3], 0: [0, 1, 2], 1: [0, 2, END], 2: [0, 1, 2, 3], 3: [1, 3]}


def test_sampling_follows_the_restricted_target_whatever_is_drafted():
    """Exact enumeration: over every draft of two tokens, what is accepted and what is recovered add up to the target's."""
    batch = BatchSampling([RowSampling(temperature=1.0)], torch.device("cpu"))
    grammars = StepGrammars([Grammar(TableMatcher(TABLE), VOCAB, [END]).start()])
    total = torch.zeros(VOCAB, dtype=torch.double)

    def restricted(logits: torch.Tensor, draft_ids: torch.Tensor, first: int) -> torch.Tensor:
        return batch.distribution(grammars.restrict(logits, draft_ids, first)[1])

    for first, second in itertools.product(range(VOCAB), repeat=2):
        draft_ids = torch.tensor([[first, second]])
        drafted = [restricted(DRAFT[0][None, None], draft_ids[:, :0], 0)]
        drafted.append(restricted(DRAFT[first][None, None], draft_ids[:, :1], 1))
        probs = restricted(TARGET[torch.tensor([[0, first, second]])], draft_ids, 0).double()
        draft_probs = torch.cat(drafted, dim=1).double()
        share = float(draft_probs[0, 0, first] * draft_probs[0, 1, second])
        if not share:
            continue
        accepted = acceptance(probs, draft_probs, draft_ids)[0, 0].double()
        rest = recovery(probs, draft_probs, torch.tensor([0]))[0]
        total[first] += share * accepted
        total += share * (1 - accepted) * rest / rest.sum()
    law = torch.zeros(VOCAB, dtype=torch.double)
    law[TABLE[-1]] = torch.softmax(TARGET[0, TABLE[-1]].double(), -1)
    assert total.tolist() == pytest.approx(law.tolist(), abs=1e-6)


@pytest.mark.parametrize("unreadable", [False, True])
def test_a_matcher_that_fails_on_rejected_drafts_is_not_a_failure(unreadable):
    """Story: a draft that the target rejected led a matcher over its limit, and the request ended with an error."""
    state = Grammar(TableMatcher(TABLE, poison=(2, 0, 1), unreadable=unreadable), VOCAB, [END]).start()
    assert state.append([2]) == 1

    def looked_at(draft: list[int]) -> list[list[int] | None]:
        masks = state.masks(draft, 0, len(draft) + 1)
        return [None if mask is None else np.flatnonzero(mask).tolist() for mask in masks]

    for _ in range(2):
        assert looked_at([0, 1, 2]) == [TABLE[2], TABLE[0], None, None]
        assert looked_at([0, 2, 0]) == [TABLE[2], TABLE[0], TABLE[2], TABLE[0]]
    assert not state.failure
    assert state.append([0]) == 1
    assert looked_at([1, 2]) == [TABLE[0], None, None]
    assert looked_at([0, 1]) == [TABLE[0], TABLE[0], TABLE[1]]
    assert not state.failure
    assert state.append([1, 2]) == (0 if unreadable else 1)  # now it has come there
    assert state.failure == "too complex"


# In the engine.

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


# Schemas of callers.


def allows(kind: str, wanted: Any, text: str) -> bool:
    """True if the whole text may be an output."""
    matcher = prepare(kind, wanted).matcher.deep_copy()
    ids = tiny_models.tokenizer().encode(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def test_formats_that_the_library_does_not_know_are_annotations():
    formats = ["password", "path", "binary", "base64", "ipvanyaddress", "ipv4network", "int32", "uuid4"]
    properties = {name: {"type": "string", "format": name} for name in formats}
    kept = {"format": {"enum": [{"format": "password"}]}, "default": {"type": "string", "format": "path"}}
    every = properties | kept
    schema = {"type": "object", "properties": every, "required": list(every), "additionalProperties": False}
    values: dict[str, Any] = dict.fromkeys(formats, "any text") | {"format": {"format": "password"}, "default": "x"}
    assert allows("json_schema", schema, json.dumps(values, separators=(",", ":")))
    assert not allows("json_schema", schema, json.dumps(values | {"format": {}}, separators=(",", ":")))


@pytest.mark.parametrize(("text", "allowed"), [('"2024-02-29"', True), ('"tomorrow"', False)])
def test_formats_that_the_library_knows_still_count(text, allowed):
    assert allows("json_schema", {"type": "string", "format": "date"}, text) is allowed


@pytest.mark.parametrize("at", ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "const"])
@pytest.mark.parametrize("number", [2**53 + 1, -(2**63), 2**64, 1e300])
def test_numbers_that_the_library_would_round_are_refused(at, number):
    schema = {"properties": {"a": {"anyOf": [{"type": "integer", at: number}]}}}
    wanted = StructuredOutput("json_schema", json.dumps(schema), field="response_format.json_schema")
    with pytest.raises(ValueError, match=r"response_format\.json_schema has .* as .* beyond 2\^53"):
        source(wanted)


def test_the_largest_exact_number_is_a_bound():
    assert allows("json_schema", {"type": "integer", "maximum": 2**53}, str(2**53))
    assert not allows("json_schema", {"type": "integer", "maximum": 2**53}, str(2**53 + 1))
    with pytest.raises(ValueError, match="beyond 2"):
        source(StructuredOutput("json_schema", json.dumps({"enum": [1, [{"a": 2**53 + 1}]]})))


@pytest.mark.parametrize("depth", [900, 3000])
def test_a_schema_that_is_too_deep_is_refused_in_a_sentence(depth):
    with pytest.raises(ValueError, match=r"is nested too deeply|recursion limit exceeded"):
        source(StructuredOutput("json_schema", '{"not": ' * depth + "{}" + "}" * depth))
