"""Overlapped steps: callers get their outputs while the device computes the next step, the same ones as without."""

import math
import random
from dataclasses import replace
from typing import Any, NoReturn

import pytest

from speclen.worker.backends.torch.captured_model import Recorder, RerunRecorder
from speclen.worker.requests.detokenize import Detokenizer
from speclen.worker.requests.request import FinishReason, GenerationRequest, SequenceOutput
from speclen.worker.sampling import grammar as grammar_module
from speclen.worker.sampling.grammar import Grammar
from tests.support import engines
from tests.support.engines import PROMPT, Collected, RandomArms, RandomLengths, finish, generate, make_engine, request
from tests.support.grammars import prepare

KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 3, "n": 3},
    {"temperature": 1.2},
    {"temperature": 0.8, "seed": 4, "top_k": 9, "logprobs": 3},
    {"stop": ("e", "ab"), "min_tokens": 2},
    {"stop_token_ids": tuple(range(40, 80)), "logprobs": 0},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "logit_bias": {5: 2.0}},
    {"n": 2, "max_tokens": 1},
]


def requests_of_all_kinds(grammar: Grammar | None) -> list[GenerationRequest]:
    """Some with n-gram matches, some with lengths of their own; those with a grammar one after the other."""
    rng, made = random.Random(5), []
    for at in range(24):
        prompt = engines.repeating_prompt(rng) if at % 2 else engines.random_prompt(rng)
        sampling = {"max_tokens": rng.randint(1, 25), "ignore_eos": at % 3 > 0} | KINDS[at % len(KINDS)]
        one = request(f"{at}", prompt, rng.choice([None, None, 0, 2]), **sampling)
        made.append(replace(one, grammar=grammar) if at in (7, 8, 17) else one)
    return made


def told_by(
    overlapped: bool, chooser: Any, recorder: Recorder | None, grammar: Grammar | None
) -> dict[tuple[str, int], list[SequenceOutput]]:
    """Outputs without their times. Requests join and are aborted while others run."""
    engine = make_engine(chooser=chooser, recorder=recorder, ngram=True, prefill_chunk=24, overlapped=overlapped)
    collected, rng = Collected(), random.Random(1)
    for one in requests_of_all_kinds(grammar):
        engine.submit(one, collected)
        for _ in range(rng.randint(0, 5)):
            engine.step()
            if rng.random() < 0.1:
                engine.abort(one.request_id)
    finish(engine)
    return {
        name: [replace(output, made_at=0.0, admitted_at=None) for output in outputs]
        for name, outputs in collected.outputs.items()
    }


@pytest.mark.parametrize(
    ("choose", "recorder", "with_grammars"),
    [
        (RandomLengths, None, True),
        (RandomLengths, RerunRecorder(), False),
        (RandomArms, None, False),
        (RandomArms, RerunRecorder(), True),
    ],
)
def test_overlapped_steps_give_callers_the_same_outputs(choose, recorder, with_grammars, monkeypatch):
    """Every output by itself: its tokens, text, log probabilities, reason and counts."""
    monkeypatch.setattr(grammar_module, "SLOW_MASK_S", math.inf)  # a grammar that is slow by chance proposes nothing
    grammar = prepare("regex", "[a-c]{2,8}(x|yz)*") if with_grammars else None
    overlapped, plain = (told_by(kind, choose(2, longest=4), recorder, grammar) for kind in (True, False))
    assert overlapped == plain
    reasons = {outputs[-1].finish_reason for outputs in plain.values()}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT}


def fail(*args: object) -> NoReturn:
    raise MemoryError("no room")


BAD = 9  # a token whose text cannot be made


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_sequence_whose_text_fails_ends_alone_with_one_error(overlapped, monkeypatch):
    """Story: the whole batch was aborted. With overlapped steps the next tokens are already computed; they are dropped."""
    engine, collected = make_engine(chooser=2, overlapped=overlapped), Collected()
    for name, bias in (("a", {}), ("bad", {BAD: 100.0}), ("b", {})):  # which writes BAD and nothing else
        engine.submit(request(name, PROMPT, max_tokens=30, ignore_eos=True, logit_bias=bias), collected)
    for _ in range(3):
        engine.step()
    bad = next(row for row in engine.scheduler.rows if row.request.request_id == "bad")
    told, honest = len(collected.ids("bad")), Detokenizer.push
    monkeypatch.setattr(Detokenizer, "push", lambda text, ids: fail() if BAD in ids else honest(text, ids))
    engine.step()
    assert (collected.reason("bad"), collected.last("bad").error) == (FinishReason.ABORT, "MemoryError: no room")
    assert len(collected.ids("bad")) == told
    assert bad not in engine.scheduler.rows
    finish(engine)
    alone = generate(make_engine(), request("x", PROMPT, max_tokens=30, ignore_eos=True)).ids("x")
    assert collected.ids("a") == collected.ids("b") == alone


@pytest.mark.parametrize("moment", ["aborted", "step failed", "engine failed"])
def test_held_back_outputs_come_before_the_end(moment, monkeypatch):
    engine, collected = make_engine(chooser=0, overlapped=True), Collected()
    for name, num_tokens in (("short", 4), ("long", 50)):
        engine.submit(request(name, PROMPT, max_tokens=num_tokens, ignore_eos=True), collected)
    for _ in range(4):
        engine.step()
    assert collected.reason("short") is None, "its end is held back"
    if moment == "aborted":
        assert engine.abort("short")
        assert engine.abort("long")
        engine.step()
    elif moment == "step failed":
        engine.target.forward = fail
        engine.step()
    else:
        monkeypatch.setattr(engine.scheduler, "admit", lambda: engine.stop() or fail())
        engine.run()
    assert (collected.reason("short"), len(collected.ids("short"))) == (FinishReason.LENGTH, 4)
    assert (collected.reason("long"), len(collected.ids("long"))) == (FinishReason.ABORT, 4)
    assert not engine.abort("short")
    assert not engine.abort("long")
