"""The evaluated steps of an arm are those that the engine takes to generate the output.

Outputs of greedy requests, and of those with a seed, do not depend on what is proposed for them. So one engine evaluates
outputs that it generated under some arm, and others generate them again under every other arm.
"""

import random

import pytest

from speclen.records import PLAIN, Arm, Limits, OutputEvaluation
from speclen.worker.engine import evaluation as evaluating
from speclen.worker.engine.engine import Engine
from tests.support.engines import Arms, RandomArms, check_greedy, generate, make_engine, request

MAX_LENGTH = 4
LIMITS = Limits(4, MAX_LENGTH, ngram=True)


@pytest.fixture
def always(monkeypatch):
    """Every output is evaluated as a whole."""
    for name in ("SHARE", "LATER_SHARE", "MAX_CREDIT_S", "MAX_S"):
        monkeypatch.setattr(evaluating, name, 1e6)
    monkeypatch.setattr(evaluating, "FIRST_TOKENS", 10**6)


def engine_of(chooser: object, **settings: object) -> Engine:
    return make_engine(chooser=chooser, ngram=True, max_speculation_length=MAX_LENGTH, **settings)


def told_by(chooser: Arms) -> list[OutputEvaluation]:
    return [evaluation for record in chooser.records for evaluation in record.evaluations]


def requests_of(generator: random.Random) -> list:
    """Prompts that repeat themselves, of greedy and of seeded requests."""
    made = []
    for number in range(3):
        loop = [generator.randrange(3, 40) for _ in range(generator.randrange(3, 9))]
        sampling = {"temperature": (0.0, 0.4, 1.0)[number % 3], "seed": number, "top_k": (0, 12)[number % 2]}
        made.append(request(str(number), loop * 5, max_tokens=generator.randrange(12, 50), ignore_eos=True, **sampling))
    return made


def test_an_evaluation_says_how_many_steps_every_arm_takes(always):
    for one in requests_of(random.Random(1)):
        chooser = Arms(Arm(2), wants_evaluations=True)
        first = generate(engine_of(chooser), one).ids(one.request_id)
        (told,) = told_by(chooser)
        assert told.num_tokens == told.num_output_tokens == len(first) - 1
        for at, arm in enumerate(LIMITS.arms()):
            played = Arms(arm)
            assert generate(engine_of(played), one).ids(one.request_id) == first
            assert told.num_steps[at] == len(played.records), (one.sampling, arm)
            drafted = sum(record.num_drafted_sequences for record in played.records)
            verified = sum(record.num_verified_tokens for record in played.records)
            # The last steps of an output draft less, since nothing may follow its end.
            assert 0 <= told.num_drafted_steps[at] - drafted <= 1
            assert 0 <= told.num_verified_tokens[at] - verified <= sum(range(arm.max_tokens + 1))


@pytest.mark.parametrize("seeded", [False, True])
def test_evaluations_change_nothing_of_what_is_generated(always, seeded):
    """Sequences continue next to one that is evaluated; prompts of ended ones are cached with their outputs."""
    generator = random.Random(5)

    def sampling(seed: int) -> dict[str, object]:
        return {"temperature": 0.8 * seeded, "seed": seed, "ignore_eos": True}

    prompts = [[generator.randrange(3, 20) for _ in range(30)] for _ in range(8)]
    requests = [
        request(str(at), prompt, max_tokens=generator.randrange(10, 40), **sampling(at))
        for at, prompt in enumerate(prompts)
    ]
    chooser = RandomArms(6, MAX_LENGTH, wants_evaluations=True)
    engine = engine_of(chooser, max_batch_size=3, seed=1)
    collected = generate(engine, *requests)
    assert len(told_by(chooser)) > 2
    for one in requests:
        alone = generate(engine_of(Arms(PLAIN)), one)
        assert collected.ids(one.request_id) == alone.ids(one.request_id)
        if not seeded:
            check_greedy(engine.pair.target, one, collected.ids(one.request_id))


def test_few_outputs_are_evaluated_outside_of_step_times(monkeypatch):
    chooser, now = Arms(Arm(2), wants_evaluations=True), [0.0]
    engine = engine_of(chooser)

    def clock() -> float:
        now[0] += 1.0  # every look at the clock: a step takes some seconds, an evaluation several
        return now[0]

    monkeypatch.setattr(evaluating.time, "perf_counter", clock)
    monkeypatch.setattr(evaluating, "SHARE", 10 * evaluating.SHARE)
    for at in range(60):
        generate(engine, request(str(at), [5, 6, 7, 8] * 4, max_tokens=12, ignore_eos=True))
    step_s = sum(record.latency_s for record in chooser.records)
    whole = [one for one in told_by(chooser) if len(one.num_steps) > 2]
    assert 2 <= len(whole) <= 1 + evaluating.SHARE * step_s


def test_a_failing_evaluation_ends_no_request(always, monkeypatch):
    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(evaluating, "evaluate_ngrams", fail)
    chooser = Arms(Arm(2), wants_evaluations=True)
    engine = engine_of(chooser)
    for at in range(3):
        assert len(generate(engine, request(str(at), [5, 6, 7] * 4, max_tokens=20, ignore_eos=True)).ids(str(at))) == 20
    assert not told_by(chooser)
