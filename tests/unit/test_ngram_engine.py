"""Sequences that propose n-grams, in the engine: which do, what the passes are fed, and what stays as it was."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from speclen.records import PLAIN, Arm, StepFlag
from tests.support import engines, tiny_models
from tests.support.engines import (
    Arms,
    check_counts,
    check_greedy,
    generate,
    make_engine,
    make_pair,
    request,
)

PROMPT = tiny_models.tokenizer().encode("The target verifies what")
LOOP = [5, 6, 7, 8] * 5


LONG = {"max_tokens": 30, "ignore_eos": True}
NGRAM = Arm(0, ngram=True)


def ngram_engine(chooser: object, **settings: object) -> engines.Engine:
    return make_engine(chooser=chooser, **{"ngram": True, **settings})


def test_without_a_draft_model_n_grams_are_proposed() -> None:
    chooser, pair = Arms(Arm(3, ngram=True)), make_pair(draft=None)
    pair.draft = None
    engine = make_engine(pair, chooser, ngram=True, max_speculation_length=0)
    one = request("x", LOOP, **LONG)
    collected = generate(engine, one)
    check_greedy(pair.target, one, collected.ids("x"))
    assert {record.arm for record in chooser.records} <= {NGRAM, PLAIN}
    assert collected.last("x").num_draft_tokens == engine.load().num_ngram_tokens > 0


@pytest.mark.parametrize("backend", engines.BACKENDS)
@pytest.mark.parametrize("seeded", [False, True])
def test_sampled_outputs_with_n_grams_follow_the_targets_distribution(seeded: bool, backend: str) -> None:
    """Outputs whose second token is an n-gram's, drafted, or neither. 20.5: once in 1,000 seeds."""
    target, _ = engines.models("llama")
    first = int(engines.plain_logits(target, PROMPT)[-1].argmax())
    follower = int(engines.plain_logits(target, [*PROMPT, first])[-1].argmax())
    prompt = [*PROMPT[-2:], first, follower, 3, *PROMPT]  # what follows `first` is there to be found
    settings = {"temperature": 1.1, "top_k": 6, "max_tokens": 3, "n": 50, "ignore_eos": True}
    requests = [request(str(at), prompt, **settings, seed=at if seeded else None) for at in range(30)]
    engine = ngram_engine(Arms(Arm(2, ngram=True)), max_batch_size=32, backend=backend)
    collected = generate(engine, *requests)
    pairs = [tuple(collected.ids(str(at), index)[:2]) for at in range(30) for index in range(50)]
    firsts = [pair[0] for pair in pairs]
    most = max(set(firsts), key=firsts.count)
    check_counts(Counter(firsts), prompt, target)
    check_counts(Counter(pair[1] for pair in pairs if pair[0] == most), [*prompt, most], target)
    assert engine.load().num_ngram_tokens > 100


def test_catching_up_with_n_grams_is_a_part_of_arms_that_draft_beside_them() -> None:
    """Only where drafting was off before is such a step no usable sample of what the arm takes."""
    both, odd = Arm(3, ngram=True), random.Random(0).sample(range(3, 60), k=30)
    chooser = Arms(both)
    generate(ngram_engine(chooser), *(request(str(at), LOOP + odd[:at], **LONG) for at in range(3)))
    assert any(record.num_drafted_sequences for record in chooser.records)
    assert not any(StepFlag.CATCH_UP in record.flags for record in chooser.records)
    chooser = Arms(*[NGRAM] * 6, both)
    generate(ngram_engine(chooser), request("x", odd, **LONG))
    drafted = [record for record in chooser.records if record.num_drafted_sequences]
    assert [StepFlag.CATCH_UP in record.flags for record in drafted] == [True] + [False] * (len(drafted) - 1)
