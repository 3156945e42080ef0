"""The law: what a review of an output says that a plan takes is what the engine takes to write it, step for step.

Outputs of greedy requests, and of those with a seed, do not hang on what is proposed for them. So one engine reviews outputs
that it wrote under some plan, and others write them again under every other plan; the number of steps, and of copied
tokens that were proposed, must be the same as counted by the estimator.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engines import RandomPlans, generate, make_engine, make_pair, request
from test_copying_engine import Plans, Reader
from test_lossless import check_greedy

from speclen.controller.estimator.plans.plan import Plan as EstimatorPlan
from speclen.controller.estimator.plans.reviews import IN_COPYING, PROPOSES, STEPS, OutputReview, Reviews
from speclen.worker.drafting.plan import Plan
from speclen.worker.engine.engine import Engine
from speclen.worker.engine.length_chooser import StepResult
from speclen.worker.reviewing import reviewer as reviewing
from speclen.worker.reviewing.output import MOST_REVIEWED, review_copies
from speclen.worker.reviewing.output import OutputReview as WorkerReview

MAX_LENGTH = 4


def reviewed(review: WorkerReview) -> OutputReview:
    """As the estimator sees it."""
    return OutputReview(review.request_class, *review.copies, *review[2:])


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reviewing, "SHARE", 1e6)
    monkeypatch.setattr(reviewing, "MOST_CREDIT_S", 1e6)
    monkeypatch.setattr(reviewing, "MOST_S", 1e6)


def engine_of(chooser: object, **settings: object) -> Engine:
    return make_engine(chooser=chooser, max_copied_tokens=16, max_speculation_length=MAX_LENGTH, **settings)


def requests_of(rng: random.Random) -> list:
    """Prompts that repeat themselves, of greedy and of seeded requests."""
    made = []
    for number in range(6):
        loop = [rng.randrange(3, 40) for _ in range(rng.randrange(3, 9))]
        sampling = {"temperature": (0.0, 0.4, 1.0)[number % 3], "seed": number, "top_k": (0, 12)[number % 2]}
        made.append(request(str(number), loop * 5, max_tokens=rng.randrange(12, 50), ignore_eos=True, **sampling))
    return made


PLANS = [Plan(0), Plan(3), Plan(4), Plan(0, 2, 4), Plan(2, 3, 8), Plan(4, 5, 16), Plan(1, 8, 4)]


def test_a_review_says_how_many_steps_every_plan_takes(always: None) -> None:
    for one in requests_of(random.Random(1)):
        reader = Reader(Plan(2))
        first = generate(engine_of(reader), one).ids(one.request_id)
        (told,) = [review for result in reader.results for review in result.reviews]
        reviews = Reviews(MAX_LENGTH, 3)
        counted = reviews.count(reviewed(told)).sums
        assert len(told.drafted) == len(first) - 1
        for plan in PLANS:
            played = Plans(plan)
            assert generate(engine_of(played), one).ids(one.request_id) == first
            sums = counted[reviews.place[EstimatorPlan(*plan_values(plan))]]
            assert sums[STEPS] == len(played.results), (one.sampling, plan)
            runs = [run for result in played.results if result.copying for run in result.copying.runs]
            assert sums[PROPOSES:].sum() == sum(run.num_proposed for run in runs)
            assert sums[PROPOSES] == len(runs)
            assert sums[IN_COPYING] == sum(run.num_accepted + 1 for run in runs)


def plan_values(plan: Plan) -> tuple[int, int, int]:
    return plan.draft_length, plan.copy_min_match, plan.copy_max_tokens


def test_what_a_review_says_does_not_hang_on_what_was_played(always: None) -> None:
    for one in requests_of(random.Random(2)):
        told = []
        for plan in (Plan(0), Plan(4), Plan(0, 2, 16), Plan(2, 3, 8)):
            reader = Reader(plan)
            generate(engine_of(reader), one)
            told += [review for result in reader.results for review in result.reviews]
        assert len(told) == 4
        assert len(set(told)) == 1


@pytest.mark.parametrize("seeded", [False, True])
def test_reviews_change_nothing_of_what_is_written(always: None, seeded: bool) -> None:
    """Rows go on beside one that is reviewed; those that end have their prompts remembered with what was reviewed."""
    rng = random.Random(5)

    def sampling(seed: int) -> dict[str, object]:
        return {"temperature": 0.8 * seeded, "seed": seed, "ignore_eos": True}

    requests = [
        request(str(at), [rng.randrange(3, 20) for _ in range(30)], max_tokens=rng.randrange(10, 40), **sampling(at))
        for at in range(8)
    ]
    plans = RandomPlans(6, MAX_LENGTH)
    plans.reads_texts = True
    engine = engine_of(plans, max_batch_size=3, seed=1)
    collected = generate(engine, *requests)
    assert engine._reviewer is not None
    assert engine._reviewer._num_reviewed > 2
    for one in requests:
        alone = generate(engine_of(Plans(Plan(0))), one)
        assert collected.ids(one.request_id) == alone.ids(one.request_id)
        if not seeded:
            check_greedy(engine.pair.target, one, collected.ids(one.request_id))


def test_of_rows_without_a_seed_as_many_drafts_are_right_as_would_be_accepted(always: None) -> None:
    """Rejection sampling accepts with chance sum(min(target, draft)); reviews must foresee about as many tokens.

    Some 2,500 tokens: a difference of 0.05 in a share between 0.2 and 0.9 has odds below 1e-4 by chance.
    """
    torch.manual_seed(0)
    one = {"temperature": 1.0, "max_tokens": 60, "ignore_eos": True}
    reader, right, tokens = Reader(Plan(0)), 0, 0
    engine = engine_of(reader, seed=3)
    for at in range(42):
        generate(engine, request(f"r{at}", [3 + at % 7, 5, 6, 7] * 3, **one))
    for review in (review for result in reader.results for review in result.reviews):
        right, tokens = right + sum(review.drafted), tokens + len(review.drafted)
    played = Plans(Plan(1))
    engine = engine_of(played, seed=4)
    for at in range(60):
        generate(engine, request(f"p{at}", [3 + at % 7, 5, 6, 7] * 3, **one))
    # Steps of one drafted token each: rows whose draft was accepted, over those that had one.
    hits = np.sum([result.accepted_histogram for result in played.results if result.speculation_length], axis=0)
    assert tokens > 2000
    assert right / tokens == pytest.approx(hits[1] / hits.sum(), abs=0.05)


def test_few_outputs_are_reviewed_and_what_it_takes_is_no_part_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader(Plan(2))
    engine = engine_of(reader)
    slow = [0.0]

    def clock() -> float:
        slow[0] += 1.0  # every look at the clock: a step takes some seconds, a review one
        return slow[0]

    monkeypatch.setattr(reviewing.time, "perf_counter", clock)
    for at in range(300):
        generate(engine, request(str(at), [5, 6, 7, 8] * 4, max_tokens=12, ignore_eos=True))
    num_reviews = sum(len(result.reviews) for result in reader.results)
    step_s = sum(result.latency_s for result in reader.results)
    assert num_reviews <= 1 + reviewing.SHARE * step_s / 1.0
    assert num_reviews >= 2


def test_outputs_that_take_long_are_not_reviewed_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quick ones of 5 steps and slow ones of 30 take turns, one at a time; a review takes half a step."""
    clock, found = [0.0], []
    monkeypatch.setattr(reviewing.time, "perf_counter", lambda: clock[0])

    def review(reviewer: object, row: SimpleNamespace, first: int, stop: int) -> str:
        clock[0] += 0.005
        found.append(row.num_steps)
        return "a review"

    monkeypatch.setattr(reviewing.Reviewer, "_can_review", staticmethod(lambda row: True))
    monkeypatch.setattr(reviewing.Reviewer, "_window", lambda reviewer, row, most_s: (0, 1))
    monkeypatch.setattr(reviewing.Reviewer, "_review", review)
    device = SimpleNamespace(device=torch.device("cpu"))
    reviewer, step_s = reviewing.Reviewer(device, None, 256, 100), 0.0  # type: ignore[arg-type]
    for output in range(6000):
        num_steps = (5, 30)[output % 2]
        for at in range(num_steps):
            reviewer.review([SimpleNamespace(finished=at == num_steps - 1, num_steps=num_steps)], 0.01)  # type: ignore[list-item]
            step_s += 0.01
    assert 0.4 < found.count(5) / len(found) < 0.6
    late = reviewing.LATER_SHARE * step_s / 0.005
    assert 0.8 * late < len(found) < 1.2 * late + reviewing.MANY


def test_a_review_that_fails_ends_nothing(always: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(reviewing, "review_copies", fail)
    reader = Reader(Plan(2))
    engine = engine_of(reader)
    for at in range(3):
        assert len(generate(engine, request(str(at), [5, 6, 7] * 4, max_tokens=20, ignore_eos=True)).ids(str(at))) == 20
    assert not any(result.reviews for result in reader.results)


def test_requests_that_look_back_or_have_their_own_length_are_not_reviewed(always: None) -> None:
    for settings in ({"fixed_length": 2}, {"frequency_penalty": 0.5}):
        reader = Reader(Plan(2))
        generate(engine_of(reader), request("x", [5, 6, 7] * 4, max_tokens=20, ignore_eos=True, **settings))
        assert not any(result.reviews for result in reader.results)


def test_where_nothing_drafts_copies_are_reviewed_alone(always: None) -> None:
    pair = make_pair(draft=None)
    pair.draft = None
    reader = Reader(Plan(0, 2, 8))
    engine = make_engine(pair, reader, max_copied_tokens=8, max_speculation_length=0)
    generate(engine, request("x", [5, 6, 7, 8] * 5, max_tokens=30, ignore_eos=True))
    (told,) = [review for result in reader.results for review in result.reviews]
    assert told.drafted == b""
    reviews = Reviews(0, 3)
    reviews.learn([(reviews.count(reviewed(told)), 1.0)])
    steps = [result for result in reader.results if isinstance(result, StepResult)]
    assert reviews.sums[0, reviews.place[EstimatorPlan(0, 2, 8)], STEPS] == pytest.approx(len(steps))


def test_of_long_outputs_the_end_is_reviewed() -> None:
    text = [random.Random(0).randrange(50) for _ in range(MOST_REVIEWED + 300)]
    first = len(text) - MOST_REVIEWED
    assert len(review_copies(text, first).matches) == MOST_REVIEWED
    whole = review_copies(text, 1)
    assert whole.matches[first - 1 :] == review_copies(text, first).matches


LONG = {"max_tokens": 90, "ignore_eos": True}


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "seed": 3}, {"temperature": 0.7}])
def test_of_an_output_that_is_too_long_for_the_time_a_part_is_reviewed(
    always: None, monkeypatch: pytest.MonkeyPatch, sampling: dict[str, object]
) -> None:
    """It says of these tokens what a review of the whole says, and takes no longer than it may."""
    reader, parts = Reader(Plan(0)), Reader(Plan(0))
    one = request("x", [5, 6, 7, 8, 9] * 7, **sampling, **LONG)
    whole, part = engine_of(reader, seed=5), engine_of(parts, seed=5)
    monkeypatch.setattr(reviewing, "FIRST_TOKENS", 1000)
    generate(whole, one)
    assert part._reviewer is not None
    determined = sampling.get("temperature", 0) == 0 or "seed" in sampling
    part._reviewer._token_s = {part.target: 0.006, part.draft: 0.001 if determined else 0.0001}
    monkeypatch.setattr(reviewing, "MOST_S", 0.08)
    generate(part, one)
    (told,) = [review for result in reader.results for review in result.reviews]
    (short,) = [review for result in parts.results for review in result.reviews]
    num_tokens = len(short.drafted)
    assert len(told.drafted) == told.num_output_tokens == short.num_output_tokens == 89
    assert num_tokens in (44, 22, 11)
    assert num_tokens * (0.001 if determined else 0.006) <= 0.08
    places = [
        at
        for at in range(89 - num_tokens + 1)
        if told.copies.matches[at : at + num_tokens] == short.copies.matches
        and (not determined or told.drafted[at : at + num_tokens] == short.drafted)
    ]
    assert places


def test_reviews_that_would_take_too_long_are_left_out_until_that_may_have_changed(
    always: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Reader(Plan(2))
    engine = engine_of(reader)
    monkeypatch.setattr(reviewing, "MOST_S", 0.05)
    assert engine._reviewer is not None
    engine._reviewer._token_s = {engine.draft: 50.0}  # a bad moment: steps take milliseconds
    for at in range(140):  # each forgets a tenth of the bad moment: some ninety until that is little enough
        generate(engine, request(str(at), [5, 6, 7, 8] * 4, max_tokens=20, ignore_eos=True))
    reviewed_at = [at for at, result in enumerate(reader.results) if result.reviews]
    assert reviewed_at
    assert reviewed_at[0] > len(reader.results) / 4
    assert len(reviewed_at) > 10, "it is known again how long they take"


def test_the_first_review_is_a_short_one(always: None) -> None:
    reader = Reader(Plan(0))
    engine = engine_of(reader)
    for at in range(2):
        generate(engine, request(str(at), [5, 6, 7] * 4, **LONG))
    lengths = [len(review.drafted) for result in reader.results for review in result.reviews]
    assert lengths == [reviewing.FIRST_TOKENS, 89]


@pytest.mark.parametrize("chunk", [3, 7, 1000])
def test_a_long_output_is_reviewed_in_pieces(always: None, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However it is cut, and whatever of it the draft model holds already."""
    monkeypatch.setattr(reviewing, "SIZES", 1)
    told = []
    for plan in (Plan(0), Plan(3)):
        for size in (chunk, 1000):
            reader = Reader(plan)
            engine = engine_of(reader, prefill_chunk=16)
            assert engine._reviewer is not None
            engine._reviewer._chunk = size
            one = request("x", [5, 6, 7, 8, 9] * 7, temperature=0.7, seed=3, max_tokens=40, ignore_eos=True)
            generate(engine, one)
            told += [review for result in reader.results for review in result.reviews]
    assert len(told) == 4
    assert len(set(told)) == 1
    assert len(told[0].drafted) == 39
