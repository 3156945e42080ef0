"""Rows that copy, in the engine: who does, what the passes are fed, what is reported, and what stays as it was."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence

import engines
import pytest
import torch
from engines import Collected, RandomPlans, finish, generate, make_engine, make_pair, request
from test_engine import PROMPT, Script, check_counts
from test_lossless import check_greedy

from speclen.worker.backends.passes import PassPart, RaggedPart
from speclen.worker.drafting.plan import Plan
from speclen.worker.engine import copies
from speclen.worker.engine import engine as engine_module
from speclen.worker.engine.length_chooser import FixedPlan, LengthChoice, StepFlag, StepResult

LOOP = [5, 6, 7, 8] * 5


class Plans(Script):
    """One plan after the other, the last one for good; keeps what was reported."""

    def __init__(self, *plans: Plan) -> None:
        super().__init__(0)
        self.plans = list(plans)

    def choice_for(
        self, batch_size: int, with_prompts: bool = False, rows_by_class: tuple[int, ...] = ()
    ) -> LengthChoice:
        return LengthChoice.of(self.plans.pop(0) if len(self.plans) > 1 else self.plans[0])


class Reader(Plans):
    """As it is told, and learns from texts."""

    reads_texts = True


def test_texts_are_read_also_where_nothing_is_copied_and_outputs_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "READ_TOGETHER", 1)
    outputs = {}
    for reads in (False, True):
        plans = (Reader if reads else Plans)(Plan(2))
        requests = [request(str(at), LOOP + [at], max_tokens=25, ignore_eos=True) for at in range(3)]
        engine = copy_engine(plans)
        collected = generate(engine, *requests)
        outputs[reads] = [collected.ids(str(at)) for at in range(3)]
        counts = [each for result in plans.results for each in result.read]
        assert bool(counts) == reads
        if reads:
            for one in requests:
                check_greedy(engine.pair.target, one, collected.ids(one.request_id))
            # Those of the last step, too, in which rows end; they are told with the next one's report.
            assert sum(tokens for _, tokens, _ in counts) + engine._reading.num_tokens == 3 * 25
            assert 0 < engine._reading.num_tokens <= 3 * 3
            assert all(0 <= right <= tokens for _, tokens, right in counts)
            assert any(right for _, _, right in counts)
    assert outputs[True] == outputs[False]


def test_few_rows_are_read_while_nothing_is_copied() -> None:
    plans = Reader(Plan(2))
    engine, collected = copy_engine(plans, max_batch_size=copies.READ_ROWS + 3), Collected()
    for at in range(copies.READ_ROWS + 3):
        engine.submit(request(str(at), LOOP + [at], max_tokens=40, ignore_eos=True), collected)
    for _ in range(6):
        engine.step()
    indexed = [row.copy_index is not None for row in engine.scheduler.decoding]
    assert len(indexed) == copies.READ_ROWS + 3
    assert sum(indexed) == copies.READ_ROWS
    plans.plans = [Plan(2, 3, 8)]
    for _ in range(3):
        engine.step()
    assert all(row.copy_index is not None for row in engine.scheduler.decoding)


def test_what_was_read_is_saved_up_over_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "READ_TOGETHER", 20)
    plans = Reader(Plan(0))
    generate(copy_engine(plans), request("x", LOOP, max_tokens=50, ignore_eos=True))
    told = [sum(tokens for _, tokens, _ in result.read) for result in plans.results]
    assert [number for number in told if number] == [20, 20]


def test_nothing_that_was_read_is_lost_where_requests_come_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: what the last step's tokens made enough was taken for a step without rows, which nobody is told of."""
    for together in range(2, 12):
        monkeypatch.setattr(engine_module, "READ_TOGETHER", together)
        plans = Reader(Plan(0))
        engine = copy_engine(plans)
        for at in range(4):
            generate(engine, request(str(at), LOOP + [at], max_tokens=5, ignore_eos=True))
        told = sum(tokens for result in plans.results for _, tokens, _ in result.read)
        assert told + engine._reading.num_tokens == 4 * 5


def test_requests_with_a_length_of_their_own_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "READ_TOGETHER", 1)
    plans = Reader(Plan(2))
    generate(copy_engine(plans), request("x", LOOP, fixed_length=1, max_tokens=10, ignore_eos=True))
    assert not any(result.read for result in plans.results)


def copying(results: Sequence[StepResult]) -> list[StepResult]:
    return [result for result in results if result.copying is not None and result.copying.runs]


def copy_engine(chooser: object, **settings: object) -> engines.Engine:
    return make_engine(chooser=chooser, **{"max_copied_tokens": 8, **settings})


def test_requests_with_a_length_of_their_own_do_not_copy() -> None:
    plans = Plans(Plan(2, 1, 8))
    requests = [request(str(k), LOOP, fixed_length=k, max_tokens=12, ignore_eos=True) for k in (0, 3)]
    collected = generate(copy_engine(plans), *requests)
    assert collected.last("0").num_draft_tokens == 0
    assert {result.copying.num_searched_rows for result in plans.results if result.copying} == {0}
    assert {result.speculation_length for result in plans.results[:2]} == {3}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_copy_from_past_outputs_where_they_may(temperature: float) -> None:
    """The same request again: nothing of its prompt repeats, so only what the first one was given can be copied."""
    outputs, num_steps = {}, {}
    for shared in (0, 1000):
        plans = Plans(Plan(0, 2, 8))
        engine = copy_engine(plans, max_shared_tokens=shared)
        for name in ("first", "again"):
            plans.results.clear()
            one = request(name, list(range(5, 25)), temperature=temperature, seed=1, max_tokens=40, ignore_eos=True)
            outputs[shared, name] = generate(engine, one).ids(name)
            num_steps[shared, name] = len(plans.results)
    assert len(set(map(tuple, outputs.values()))) == 1
    assert num_steps[0, "again"] == num_steps[0, "first"] == num_steps[1000, "first"]
    assert num_steps[1000, "again"] < num_steps[1000, "first"] / 2


def test_without_a_draft_model_a_worker_copies() -> None:
    plans, pair = Plans(Plan(3, 1, 8)), make_pair(draft=None)
    pair.draft = None
    engine = make_engine(pair, plans, max_copied_tokens=8, max_speculation_length=0)
    one = request("x", LOOP, max_tokens=30, ignore_eos=True)
    collected = generate(engine, one)
    check_greedy(pair.target, one, collected.ids("x"))
    assert copying(plans.results)
    assert {result.speculation_length for result in plans.results} == {0}
    assert collected.last("x").num_draft_tokens == engine.load().num_copied_tokens > 0


def test_a_plan_beyond_the_limits_is_cut_to_them() -> None:
    plans = Plans(Plan(60, 1, 60, True))
    engine = make_engine(chooser=plans, max_copied_tokens=3, max_speculation_length=2)
    one = request("x", LOOP, max_tokens=40, ignore_eos=True)
    collected = generate(engine, one)
    check_greedy(engine.pair.target, one, collected.ids("x"))
    assert max(run.num_proposed for result in copying(plans.results) for run in result.copying.runs) == 3
    assert max(result.speculation_length for result in plans.results) == 2


def test_plans_that_do_not_copy_cost_nothing() -> None:
    """No row has an index, and a worker that never copies has no longer rows than before."""
    plain, other = copy_engine(Plans(Plan(2))), make_engine(chooser=2)
    collected = Collected()
    plain.submit(request("x", LOOP, max_tokens=12, ignore_eos=True), collected)
    for _ in range(3):
        plain.step()
    assert [row.copy_index for row in plain.scheduler.rows] == [None]
    assert other.config.max_proposed_tokens == other.config.max_speculation_length


def test_an_index_ends_with_its_row() -> None:
    engine, collected = copy_engine(FixedPlan(Plan(0, 2, 8))), Collected()
    engine.submit(request("x", LOOP, max_tokens=6, ignore_eos=True), collected)
    engine.step()
    engine.step()
    (sequence,) = engine.scheduler.rows
    assert sequence.copy_index is not None
    finish(engine)
    assert sequence.copy_index is None


def test_a_long_prompt_is_read_a_bounded_number_of_tokens_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "INDEXED_PER_STEP", 20)
    monkeypatch.setattr(copies, "MOST_NEW", 10)
    plans, collected = Plans(Plan(0, 2, 4)), Collected()
    engine = copy_engine(plans, prefill_chunk=256)
    engine.submit(request("long", LOOP * 8, max_tokens=40, ignore_eos=True), collected)
    engine.step()
    (sequence,) = engine.scheduler.rows
    indexed = [0]
    while sequence.row >= 0:
        engine.step()
        if sequence.copy_index is None:
            break
        indexed.append(sequence.copy_index.num_indexed)
    assert max(after - before for before, after in itertools.pairwise(indexed)) <= 20
    searched = [result.copying.num_searched_rows for result in plans.results if result.copying]
    assert searched == sorted(searched), "a row copies from the step on in which its text has been read"
    assert (searched[0], searched[-1]) == (0, 1)


@pytest.mark.parametrize("backend", engines.BACKENDS)
@pytest.mark.parametrize("after", [False, True])
def test_passes_are_fed_what_rows_have(backend: str, after: bool) -> None:
    """On a ragged backend the target gets one token more than each row proposes, and the draft model the rows that draft."""
    plans = Plans(Plan(2, 3, 6, after))
    engine = copy_engine(plans, backend=backend)
    fed: dict[str, list[list[tuple[int, int]]]] = {"target": [], "draft": []}

    def note(name: str, model: object) -> None:
        forward = model.forward

        def noting(parts: Sequence[PassPart | RaggedPart]) -> list[torch.Tensor]:
            if all(isinstance(part, RaggedPart) for part in parts):
                fed[name].append(
                    [
                        (int(row), int(count))
                        for part in parts
                        for row, count in zip(part.rows, part.counts, strict=True)
                    ]
                )
            return forward(parts)

        model.forward = noting

    note("target", engine.target)
    note("draft", engine.draft)
    random_rows = [engines.random_prompt(random.Random(seed), 40) for seed in range(2)]
    requests = [request(str(at), ids, max_tokens=20, ignore_eos=True) for at, ids in enumerate([LOOP, *random_rows])]
    generate(engine, *requests)
    ragged = [result for result in copying(plans.results) if result.copying.num_verified_tokens > 0]
    assert ragged
    if backend == "torch":
        assert fed == {"target": [], "draft": []}
        return
    expected = [result.copying.num_verified_tokens for result in ragged]
    assert [sum(count for _, count in rows) for rows in fed["target"]] == expected
    for result, rows in zip(ragged, fed["target"], strict=True):
        assert len(rows) == result.batch_size
    drafting = sum(result.copying.num_drafting_rows > 0 for result in ragged)
    assert drafting
    assert max(len(rows) for rows in fed["draft"]) == max(result.copying.num_drafting_rows for result in ragged)


@pytest.mark.parametrize("backend", engines.BACKENDS)
@pytest.mark.parametrize("prompt", ["one token", "random", "at the context"])
def test_odd_prompts(prompt: str, backend: str) -> None:
    generator = random.Random(0)
    prompts = {
        "one token": [[9] * length for length in (1, 2, 3, 200)],
        "random": [engines.random_prompt(generator, 120) for _ in range(4)],
        "at the context": [(LOOP * 13)[:length] for length in (255, 254, 250, 240)],
    }[prompt]
    requests = [request(str(at), ids, max_tokens=40, ignore_eos=True) for at, ids in enumerate(prompts)]
    engine = copy_engine(RandomPlans(3, longest=4), backend=backend)
    collected = generate(engine, *requests)
    for one in requests:
        ids = collected.ids(one.request_id)
        assert len(ids) == min(40, 256 - len(one.prompt_ids))
        check_greedy(engine.pair.target, one, ids)


@pytest.mark.parametrize("backend", engines.BACKENDS)
@pytest.mark.parametrize("seeded", [False, True])
def test_sampled_outputs_that_copy_follow_the_targets_distribution(seeded: bool, backend: str) -> None:
    """As test_engine's, of outputs whose second token is copied, drafted, or neither. 20.5: once in 1,000 seeds."""
    target, _ = engines.models("llama")
    first = int(engines.plain_logits(target, PROMPT)[-1].argmax())
    follower = int(engines.plain_logits(target, [*PROMPT, first])[-1].argmax())
    prompt = [first, follower, 3, *PROMPT]  # What may be copied after `first` is there to be found.
    settings = {"temperature": 1.1, "top_k": 6, "max_tokens": 3, "n": 50, "ignore_eos": True}
    requests = [request(str(at), prompt, **settings, seed=at if seeded else None) for at in range(30)]
    plans = Plans(Plan(2, 1, 4))
    engine = copy_engine(plans, max_batch_size=32, backend=backend)
    collected = generate(engine, *requests)
    pairs = [tuple(collected.ids(str(at), index)[:2]) for at in range(30) for index in range(50)]
    firsts = [pair[0] for pair in pairs]
    most = max(set(firsts), key=firsts.count)
    check_counts(Counter(firsts), prompt, target)
    check_counts(Counter(pair[1] for pair in pairs if pair[0] == most), [*prompt, most], target)
    assert copying(plans.results)


def test_log_probabilities_and_penalties_are_the_same_with_copies() -> None:
    settings = {"max_tokens": 25, "ignore_eos": True, "logprobs": 2}
    for edits in ({}, {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "min_tokens": 10}):
        told = []
        for chooser in (FixedPlan(Plan()), FixedPlan(Plan(0, 1, 6)), FixedPlan(Plan(2, 1, 6, True))):
            collected = generate(copy_engine(chooser), request("x", LOOP, **settings, **edits))
            told.append([entry for output in collected.outputs["x", 0] for entry in output.logprobs])
        for other in told[1:]:
            assert [entry.top_ids for entry in other] == [entry.top_ids for entry in told[0]]
            assert [entry.logprob for entry in other] == pytest.approx([entry.logprob for entry in told[0]], abs=1e-3)


def test_a_step_of_rows_that_copy_may_fail_beside_a_prompt_and_is_run_again() -> None:
    plans = Plans(Plan(2, 2, 6))
    engine, collected = copy_engine(plans), Collected()
    one = request("x", LOOP, max_tokens=30, ignore_eos=True)
    engine.submit(one, collected)
    for _ in range(4):
        engine.step()
    forward, failed = engine.target.forward, []

    def failing(parts: Sequence[PassPart]) -> list[torch.Tensor]:
        if len(parts) > 1 and not failed:
            failed.append(True)
            raise RuntimeError("the prompt is bad")
        return forward(parts)

    engine.target.forward = failing
    other = request("y", LOOP[::-1], max_tokens=5, ignore_eos=True)
    engine.submit(other, collected)
    finish(engine)
    assert failed
    for sent in (one, other):
        check_greedy(engine.pair.target, sent, collected.ids(sent.request_id))
        assert len(collected.ids(sent.request_id)) == sent.sampling.max_tokens


def test_drafting_after_rows_have_copied_catches_up() -> None:
    """Story: what a row copied its draft model had never seen, and drafts made without it would be worth nothing."""
    target, _ = engines.models("llama")
    plans = Plans(Plan(0, 2, 6), Plan(0, 2, 6), Plan(0, 2, 6), Plan(4))
    engine = make_engine(make_pair(draft=target), plans, max_copied_tokens=8)
    generate(engine, request("x", LOOP, max_tokens=40, ignore_eos=True))
    drafted = [result for result in plans.results if result.copying is None and result.speculation_length == 4]
    assert drafted[0].flags >= {StepFlag.CATCH_UP}
    assert sum(result.accepted_histogram[4] for result in drafted[:-1]) == len(drafted) - 1


def test_catching_up_with_copies_is_a_part_of_plans_that_draft_beside_them() -> None:
    """Only where drafting was off before does such a step say nothing of what the plan takes."""
    both, odd = Plan(3, 2, 8), random.Random(0).choices(range(3, 60), k=30)
    plans = Plans(both)
    generate(
        copy_engine(plans), *(request(str(at), LOOP + odd[:at], max_tokens=60, ignore_eos=True) for at in range(3))
    )
    assert copying(plans.results)
    assert any(result.speculation_length for result in plans.results)
    assert not any(StepFlag.CATCH_UP in result.flags for result in plans.results)
    plans = Plans(*[Plan(0, 16, 8)] * 6, Plan(3, 16, 8))
    generate(copy_engine(plans), request("x", odd, max_tokens=30, ignore_eos=True))
    drafted = [result for result in plans.results if result.speculation_length]
    assert [StepFlag.CATCH_UP in result.flags for result in drafted] == [True] + [False] * (len(drafted) - 1)


def test_a_row_that_first_copies_under_a_plan_that_drafts_still_has_its_prompt_to_catch_up_with() -> None:
    """Story: such a plan copied, then drafted: its second step fed the draft a prompt, and was to show what steps take."""
    num_late, before, both = 0, Plan(0, 16, 8), Plan(3, 2, 8)
    for seed in range(12):
        prompt = random.Random(seed).choices(range(3, 12), k=100)
        plans = Plans(*[before] * 4, both)
        generate(copy_engine(plans), request("x", prompt, max_tokens=40, ignore_eos=True))
        steps = [result for result in plans.results if result.copying is not None and result.copying.plan == both]
        drafted = [at for at, result in enumerate(steps) if result.speculation_length]
        num_late += drafted[0] > 0
        assert [StepFlag.CATCH_UP in steps[at].flags for at in drafted] == [True] + [False] * (len(drafted) - 1)
        assert not any(StepFlag.CATCH_UP in result.flags for result in steps[: drafted[0]])
    assert num_late
