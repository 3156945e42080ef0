"""The law: with a grammar the output is the target's, restricted at every token to what the grammar allows there.

Greedy: token by token, the most likely of those that the grammar allows, whatever is drafted. Sampled: by exact enumeration
of a grammar over five tokens, and beside decoding without speculation. All of it with a matcher made here, and with
llguidance where it is installed.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from speclen.worker.requests.request import FinishReason, GenerationRequest, SamplingParams, StructuredOutput
from speclen.worker.sampling.grammar import Grammar, StepGrammars
from speclen.worker.sampling.noise import make_key
from speclen.worker.sampling.rules import BatchSampling, RowSampling, SamplingRule
from speclen.worker.sampling.verification import acceptance, recovery
from speclen.worker.structured import source, trial
from tests.support import engines, tiny_models
from tests.support.engines import Collected, RandomLengths

BUNDLED = Path(__file__).parents[2] / "worker" / "bundled" / "target"
VOCAB = 5
END = 4
TARGET = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0)) * 1.5
DRAFT = TARGET + torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1))


@dataclass
class TableMatcher:
    """Follows a table: what may come after each token; the start is -1. Like llguidance's, it stays in error."""

    table: dict[int, list[int]]
    read: list[int] = field(default_factory=lambda: [-1])
    failed_at: int | None = None  # tokens read after which it is in error
    made: list[int] = field(default_factory=list)  # tokens read when each mask was made, of all copies
    poison: tuple[int, ...] = ()  # after these it is in error for good
    unreadable: bool = False  # the last of them is not even read
    dead: bool = False

    def compute_bitmask(self) -> bytes:
        self.made.append(len(self.read) - 1)
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

    def deep_copy(self) -> TableMatcher:
        assert not self.dead
        return TableMatcher(self.table, list(self.read), self.failed_at, self.made, self.poison, self.unreadable)

    def is_accepting(self) -> bool:
        return END in self.table[self.read[-1]]

    def is_error(self) -> bool:
        return self.dead or (self.failed_at is not None and len(self.read) > self.failed_at)

    def get_error(self) -> str:
        return "too complex\nand its whole state" if self.is_error() else ""


# Ends after 1 only; 0 and 3 exclude each other; 2 goes with everything.
TABLE = {-1: [0, 2, 3], 0: [0, 1, 2], 1: [0, 2, END], 2: [0, 1, 2, 3], 3: [1, 3]}


def chain(logits: torch.Tensor, temperature: float, length: int) -> dict[tuple[int, ...], float]:
    """Probability of every output of so many tokens, one after the other; an end token is followed by itself."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for output, probability in found.items():
            if output and output[-1] == END:
                longer[(*output, END)] = probability
                continue
            allowed = TABLE[output[-1] if output else -1]
            probs = torch.softmax(logits[output[-1] if output else 0, allowed].double() / temperature, -1)
            for token, share in zip(allowed, probs.tolist(), strict=True):
                longer[(*output, token)] = probability * share
        found = longer
    return found


def draw(rows: list[RowSampling], k: int, length: int, caps: list[int] | None, seed: int) -> list[tuple[int, ...]]:
    """Outputs of table models, `length` tokens each; the draft may propose k tokens a step."""
    generator, batch = torch.Generator().manual_seed(seed), BatchSampling(rows, torch.device("cpu"))
    outputs: list[list[int]] = [[] for _ in rows]
    ended = [False] * len(rows)
    while any(len(output) < length and not done for output, done in zip(outputs, ended, strict=True)):
        last = torch.tensor([output[-1] if output else 0 for output in outputs])
        rule = SamplingRule(batch, torch.tensor([len(output) for output in outputs]), generator)
        draft_ids = torch.zeros(len(rows), k, dtype=torch.long)
        current = last
        for column in range(k):
            current = rule.propose(DRAFT[current][:, None], draft_ids[:, :column])
            draft_ids[:, column] = current
        context = torch.cat([last[:, None], draft_ids], dim=1)
        limits = None if caps is None else torch.tensor(caps)
        num_accepted, tokens = rule.decide(TARGET[context], draft_ids, limits)
        for at, (count, new) in enumerate(zip(num_accepted.tolist(), tokens.tolist(), strict=True)):
            if ended[at] or len(outputs[at]) >= length:
                continue
            new = new[: count + 1]
            ended[at] = END in new
            outputs[at] += new[: new.index(END) + 1] if ended[at] else new
            grammar = rows[at].grammar
            if grammar is not None and not ended[at]:
                grammar.append(new)
    return [tuple((output + [END] * length)[:length]) for output in outputs]


@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize("k", [0, 1, 3])
def test_sampled_outputs_follow_the_restricted_target(k: int, seeded: bool) -> None:
    """Chi-square over all outputs of three tokens that are expected five times; wrong once in 1,000 seeds."""
    n = 6000
    rows = [
        RowSampling(
            temperature=0.8,
            key=make_key(row, 0) if seeded else None,
            grammar=Grammar(TableMatcher(TABLE), VOCAB, [END]).start(),
        )
        for row in range(n)
    ]
    counts: dict[tuple[int, ...], int] = {}
    for output in draw(rows, k, 3, None, seed=k):
        counts[output] = counts.get(output, 0) + 1
    law = chain(TARGET, 0.8, 3)
    assert set(counts) <= set(law), "an output that the grammar forbids"
    expected = {output: n * share for output, share in law.items() if n * share >= 5}
    statistic = sum((counts.get(output, 0) - mean) ** 2 / mean for output, mean in expected.items())
    degrees = len(expected) - 1
    assert degrees > 12
    assert statistic < degrees + 3.3 * (2 * degrees) ** 0.5 + 6


def test_exactly_the_restricted_target_whatever_is_drafted() -> None:
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
    law = chain(TARGET, 1.0, 1)
    assert total.tolist() == pytest.approx([law.get((token,), 0.0) for token in range(VOCAB)], abs=1e-6)


def test_what_is_held_back_comes_where_nothing_else_may() -> None:
    """min_tokens and ignore_eos keep an end away, but never against the grammar."""
    table = {-1: [0], 0: [0, END], 1: [END]}
    state = Grammar(TableMatcher(table), VOCAB, [END]).start([END], min_tokens=3)
    allowed = [np.flatnonzero(mask).tolist() for mask in state.masks([0, 0, 0], 0, 4) if mask is not None]
    assert allowed == [[0], [0], [0], [0, END]]
    for go_on in (False, True):
        state = Grammar(TableMatcher({-1: [1], 1: [END]}), VOCAB, [END]).start([END], 9, go_on)
        mask = state.masks([1], 0, 2)[1]
        assert mask is not None
        assert np.flatnonzero(mask).tolist() == [END]
    state = Grammar(TableMatcher(table), VOCAB, [END]).start(go_on=True)
    assert [np.flatnonzero(mask).tolist() for mask in state.masks([0], 0, 2) if mask is not None] == [[0], [0]]


@pytest.mark.parametrize("unreadable", [False, True])
def test_a_matcher_that_fails_beyond_the_output_is_no_failure(unreadable: bool) -> None:
    """Story: a draft that the target would not take led a matcher over its limit, and the request ended with an error."""
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


def test_an_end_where_the_grammar_has_none_is_a_failure() -> None:
    state = Grammar(TableMatcher(TABLE), VOCAB, [END]).start()
    assert state.append([0, 1]) == 2
    assert state.append([END]) == 1
    assert not state.failure
    state = Grammar(TableMatcher(TABLE), VOCAB, [END]).start()
    assert state.append([0, END]) == 1
    assert state.failure == f"it does not allow token {END}"


# With an engine.


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


@pytest.mark.parametrize("sampling", [{}, {"seed": 5, "temperature": 1.0}, {"seed": 5, "temperature": 0.7, "top_k": 9}])
def test_the_same_as_without_speculation(prepared: Any, sampling: dict[str, Any]) -> None:
    """Greedy and seeded rows, beside length 0; with penalties, bias and log probabilities, which stay the target's own."""
    generator = random.Random(7)
    asked = [(prepared(*generator.choice(WANTED)), engines.random_prompt(generator, 20)) for _ in range(12)]
    extra = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "logit_bias": {40: 2.0}, "logprobs": 1, "n": 2}
    found = []
    for chooser in (0, RandomLengths(4, longest=5)):
        requests = [
            structured(str(at), grammar, prompt, max_tokens=50, **(sampling | extra))
            for at, (grammar, prompt) in enumerate(asked)
        ]
        collected = engines.generate(engines.make_engine(chooser=chooser, max_batch_size=3), *requests)
        found.append(collected)
    for at in range(len(asked)):
        for index in range(2):
            one, other = (each.ids(str(at), index) for each in found)
            assert one == other
            assert len(one) > 1
    told = [one for each in found[1].outputs.values() for output in each for one in output.logprobs]
    assert any(one.top_ids and one.logprob < one.top_logprobs[0] - 2 for one in told), "unmodified ones"


def test_ends_stops_and_limits(prepared: Any) -> None:
    """ignore_eos goes on while the grammar does; a stop string cuts; max_tokens may end it in the middle."""
    choice, letters = prepared("choice", ["the target"]), prepared("regex", "[ab]*")
    requests = [
        structured("whole", choice, [5, 6], max_tokens=50, ignore_eos=True, min_tokens=40),
        structured("stop", choice, [5, 6], max_tokens=50, stop=("tar",)),
        structured("cut", choice, [5, 6], max_tokens=3),
        structured("on", letters, [5, 6], max_tokens=30, ignore_eos=True),
    ]
    collected = engines.generate(engines.make_engine(chooser=3), *requests)
    assert [collected.text(one.request_id) for one in requests[:2]] == ["the target", "the "]
    assert [collected.reason(one.request_id) for one in requests] == [
        FinishReason.STOP,
        FinishReason.STOP,
        FinishReason.LENGTH,
        FinishReason.LENGTH,
    ]
    assert "the target".startswith(collected.text("cut"))
    assert collected.last("on").num_completion_tokens == 30


class FailingMatcher(TableMatcher):
    """Fails after two tokens."""

    def compute_bitmask(self) -> bytes:
        return np.packbits(np.ones(tiny_models.VOCAB_SIZE, dtype=np.uint8)).tobytes()

    def consume_token(self, sampled_token: int) -> bool:
        self.read.append(sampled_token)
        return True

    def is_accepting(self) -> bool:
        return True

    def deep_copy(self) -> FailingMatcher:
        return FailingMatcher({}, failed_at=3)


@pytest.mark.parametrize("penalty", [0.0, 0.5])
@pytest.mark.parametrize("length", [0, 4])
def test_a_grammar_that_fails_ends_its_own_request(length: int, penalty: float) -> None:
    """Story: with a penalty, which counts the new tokens, of which there were none, it was an error of the server."""
    grammar = Grammar(FailingMatcher({}), tiny_models.VOCAB_SIZE, [tiny_models.EOS_ID])
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


def test_a_grammar_of_which_a_mask_takes_long_is_ended(prepared: Any) -> None:
    """Story: 33 characters, and steps of all rows took seconds: what is looked at grows with the square of the output."""
    text = (BUNDLED / "tokenizer.json").read_text()
    matching = trial.make_tokenizer(text, None, [tiny_models.EOS_ID])
    grammar = source.source(StructuredOutput("grammar", 'start: start start | "a" | ""', ""))
    matcher = trial.make_matcher(matching, grammar)
    letter, num_read = matching.tokenize_str("a")[0], 0
    while not matcher.is_error() and num_read < 1000:
        matcher.compute_bitmask()
        num_read += matcher.consume_token(letter)
    assert 100 < num_read < 500
    assert "Too many items (limit 2000" in matcher.get_error()
    properties = {f"property {number}": {"type": "string"} for number in range(150)}
    usual = prepared("json_schema", {"type": "object", "properties": properties, "additionalProperties": False})
    assert (
        engines.generate(engines.make_engine(chooser=2), structured("b", usual, [3], max_tokens=60)).last("b").error
        is None
    )


class SlowMatcher(FailingMatcher):
    """Allows everything, slowly."""

    def compute_bitmask(self) -> bytes:
        time.sleep(SLOW_S)
        return super().compute_bitmask()

    def deep_copy(self) -> SlowMatcher:
        return SlowMatcher({})


SLOW_S = 0.05


def test_what_a_slow_grammar_takes_teaches_no_step_time() -> None:
    chooser = RandomLengths(longest=0)
    grammar = Grammar(SlowMatcher({}), tiny_models.VOCAB_SIZE, [tiny_models.EOS_ID])
    asked = structured("a", grammar, [3, 4], max_tokens=8, ignore_eos=True)
    engines.generate(engines.make_engine(chooser=chooser), asked)
    taken = [result.latency_s for result in chooser.records]
    assert len(taken) == 7
    assert min(taken) < SLOW_S / 2, "a step of the tiny models takes some 2 ms"


def test_the_text_of_an_end_token_ends_nothing(prepared: Any) -> None:
    """Story: where a grammar asks for it, the token itself was allowed, and the output had ended as if that were all."""
    end = tiny_models.tokenizer().decode([tiny_models.EOS_ID])
    for kind, wanted in (("choice", [f"{end}x"]), ("json_schema", {"const": end})):
        asked = structured("a", prepared(kind, wanted), [5, 6], max_tokens=60)
        last = engines.generate(engines.make_engine(chooser=2), asked).last("a")
        assert last.finish_reason is FinishReason.ABORT
        assert last.error is not None
        assert last.error.endswith("it wants the text of an end token, which would end the output")
