"""What the draft model's prompts take is told by workers, learned, and borne by what drafts; by nothing else."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import tiny_models
from engines import generate, make_engine, make_pair, request
from steps_of import KEY, Steps, controller_for, plans_at_four_rows, restarted

from speclen.controller.estimator.choice import PromptShare
from speclen.controller.estimator.contexts.prompts import (
    DRAFTING_TOKENS,
    LARGEST_SHARE,
    MOST_STEPS,
    MOST_VOTES,
    PRIOR_TOKENS,
    SECONDS,
    Prompts,
)
from speclen.controller.estimator.core import StepObservation
from speclen.controller.estimator.plans.plan import CopiedRun, Copies, Plan
from speclen.v1 import control_pb2 as pb
from speclen.worker.engine.engine import Engine
from speclen.worker.engine.length_chooser import LengthChoice, StepFlag, StepResult
from speclen.worker.reporting.messages import to_report
from speclen.worker.reporting.window import to_sum

PROMPT = tiny_models.tokenizer().encode("The target verifies what")


class Lengths:
    """Always the same length; keeps what is reported."""

    def __init__(self, length: int) -> None:
        self.length, self.results = length, list[StepResult]()

    def choice_for(
        self, batch_size: int, with_prompts: bool = False, rows_by_class: tuple[int, ...] = ()
    ) -> LengthChoice:
        return LengthChoice(self.length)

    def report(self, choice: LengthChoice, result: StepResult) -> None:
        self.results.append(result)


def told_by(length: int) -> list[float]:
    chooser = Lengths(length)
    engine = make_engine(chooser=chooser, max_batch_size=2)
    generate(engine, *(request(str(at), PROMPT, max_tokens=12 + 6 * at, ignore_eos=True) for at in range(4)))
    return [result.draft_prompt_s for result in chooser.results]


def test_a_worker_tells_what_the_drafts_prompts_took_once() -> None:
    """Those of an iteration in which no row decodes, with the next step; nothing where nothing is drafted."""
    told = told_by(3)
    assert told[0] > 0.0  # two prompts came before it
    assert 2 <= sum(seconds > 0.0 for seconds in told) <= 4
    assert sum(told) < 60.0
    assert not any(told_by(0)[1:])  # before the first choice it is thought to draft


def test_a_last_step_with_nothing_to_draft_does_not_keep_the_next_prompt_from_the_draft() -> None:
    """Story: the draft was fed prompts where the step before had drafted, and a request's last step often does not."""
    chooser = Lengths(3)
    engine = make_engine(chooser=chooser, max_batch_size=1)
    generate(engine, request("a", PROMPT, max_tokens=2, ignore_eos=True))
    assert [result.speculation_length for result in chooser.results] == [0]
    chooser.results.clear()
    generate(engine, request("b", PROMPT[::-1], max_tokens=12, ignore_eos=True))
    assert not any(StepFlag.CATCH_UP in result.flags for result in chooser.results)
    assert chooser.results[0].draft_prompt_s > 0.0


def test_a_draft_that_is_behind_in_a_prompt_catches_up_with_its_next_part() -> None:
    """Not in a later step, in which everybody would wait for all of the prompt."""
    chooser = Lengths(0)
    engine = make_engine(chooser=chooser, max_batch_size=2, prefill_chunk=8)
    engine.submit(request("a", PROMPT, max_tokens=40, ignore_eos=True), lambda output: None)
    engine.step()
    engine.submit(request("b", PROMPT * 20, max_tokens=4, ignore_eos=True), lambda output: None)
    for _ in range(3):
        engine.step()
    (long,) = engine.scheduler.rows[1:]
    assert (long.draft_length, long.target_length) == (0, 24)
    chooser.length = 3
    engine.step()
    assert long.draft_length == long.target_length == 32


@pytest.mark.parametrize(
    ("own", "ragged", "goes"), [(None, True, False), (None, False, True), (2, True, True), (0, False, False)]
)
def test_beside_one_that_drafts_by_itself_prompts_are_fed_where_it_makes_all_draft(
    own: int | None, ragged: bool, goes: bool
) -> None:
    engine = make_engine(chooser=0)
    runner = engine.runner
    runner._feeds_draft, runner._speculating = False, True
    runner.target = SimpleNamespace(ragged=ragged)  # type: ignore[assignment]
    sequence = SimpleNamespace(fixed_length=own, finished=False, may_draft=True, draft_length=0)
    assert runner._draft_goes_along(SimpleNamespace(sequence=sequence, start=0, end=5)) is goes  # type: ignore[arg-type]


def test_a_pair_whose_draft_fails_on_a_prompt_still_tells_what_it_told() -> None:
    """Time that was counted for a plan that failed and was run in parts is told with one of them."""
    chooser = Lengths(2)
    engine: Engine = make_engine(make_pair(), chooser, max_batch_size=2)
    real, calls = engine.runner.target.forward, []

    def once(parts):  # type: ignore[no-untyped-def]
        calls.append(len(parts))
        if len(calls) == 1:
            raise RuntimeError("once")
        return real(parts)

    engine.runner.target.forward = once  # type: ignore[method-assign]
    generate(engine, *(request(str(at), PROMPT, max_tokens=8, ignore_eos=True) for at in range(2)))
    assert sum(result.draft_prompt_s for result in chooser.results) > 0.0


def test_nobody_s_tokens_wait_for_what_the_draft_is_fed() -> None:
    """First tokens are told before the draft gets their prompts, and requests that end with them cost it nothing."""
    engine, told = make_engine(chooser=Lengths(2), max_batch_size=2), list[str]()
    real = engine.draft.forward

    def forward(parts):  # type: ignore[no-untyped-def]
        told.append("draft")
        return real(parts)

    engine.draft.forward = forward  # type: ignore[method-assign]
    for name, num_tokens in (("long", 3), ("short", 1)):
        engine.submit(
            request(name, PROMPT, max_tokens=num_tokens, ignore_eos=True), lambda out: told.append(out.request_id)
        )
    engine.step()
    assert told == ["long", "short", "draft"]
    told.clear()
    engine.submit(request("alone", PROMPT, max_tokens=1, ignore_eos=True), lambda out: told.append(out.request_id))
    while not engine.scheduler.is_idle or "alone" not in told:
        engine.step()
    assert told.count("draft") <= 3  # drafts of `long`, and none for `alone`


def test_a_draft_that_fails_on_prompts_costs_nobody_a_token() -> None:
    chooser = Lengths(2)
    engine = make_engine(chooser=chooser, max_batch_size=2)
    real, calls = engine.draft.forward, []

    def once(parts):  # type: ignore[no-untyped-def]
        calls.append(len(parts))
        if len(calls) == 1:
            raise RuntimeError("once")
        return real(parts)

    engine.draft.forward = once  # type: ignore[method-assign]
    wanted = generate(make_engine(max_batch_size=2), request("a", PROMPT, max_tokens=8, ignore_eos=True))
    found = generate(engine, request("a", PROMPT, max_tokens=8, ignore_eos=True))
    assert found.ids("a") == wanted.ids("a")
    assert calls[0] == 1
    assert StepFlag.CATCH_UP in chooser.results[0].flags  # the draft is fed the prompt when it is asked


def test_reports_and_sums_of_them_tell_it() -> None:
    results = [StepResult(2, 1, 0.01, (1, 1), 9.0, draft_prompt_s=seconds) for seconds in (0.25, 0.5)]
    records = [(at + 1, LengthChoice(1), result) for at, result in enumerate(results)]
    assert [to_report(*record).draft_prompt_s for record in records] == [0.25, 0.5]
    assert to_sum(records).draft_prompt_s == 0.75
    assert pb.StepReport().draft_prompt_s == 0.0  # what workers of before tell


def fed(steps: Steps, batch: int, length: int, prompt_s: float) -> StepObservation:
    return steps.step(batch, length)._replace(draft_prompt_s=prompt_s if length else 0.0)


def test_lengths_that_draft_bear_it() -> None:
    """Where prompts take the draft as long as it saves, plain decoding is better although no step shows it."""
    for prompt_s, drafts in ((0.0, True), (0.2, False)):
        controller, steps = controller_for(Steps(1)), Steps(1)
        assert controller.length_for(KEY, 4) > 0
        for _ in range(400):
            controller.observe(KEY, [fed(steps, 4, controller.length_for(KEY, 4), prompt_s)], "w")
        assert bool(controller.length_for(KEY, 4)) == drafts


def test_what_they_cost_once_does_not_keep_drafting_off_for_ever() -> None:
    """Long prompts, then short ones: what was learned fades while nothing is drafted, and drafting is tried again."""
    controller, steps = controller_for(Steps(1)), Steps(1)
    for _ in range(400):
        controller.observe(KEY, [fed(steps, 4, controller.length_for(KEY, 4), 0.2)], "w")
    assert controller.length_for(KEY, 4) == 0
    for _ in range(3000):
        controller.observe(KEY, [fed(steps, 4, controller.length_for(KEY, 4), 0.0) for _ in range(10)], "w")
    assert controller.length_for(KEY, 4) > 0


def test_a_pause_in_a_step_that_feeds_one_is_no_cost_of_prompts() -> None:
    controller, steps = controller_for(Steps(1)), Steps(1)
    controller.observe(KEY, [fed(steps, 4, 3, 0.001) for _ in range(200)], "w")
    before = controller.context(KEY).prompts.share.draft_s
    paused = steps.step(4, 3)._replace(latency_s=10.0, draft_prompt_s=9.9, teaches_latency=False)
    controller.observe(KEY, [paused], "w")
    usual = controller.context(KEY).main.choice.step_s[controller.bucket_index(KEY, 4), 3]
    most = LARGEST_SHARE * usual / PRIOR_TOKENS
    assert controller.context(KEY).prompts.share.draft_s < before + most < before + 0.01


def test_prompts_of_one_worker_count_in_proportion_to_its_steps() -> None:
    step, long = StepObservation(4, 2, 0.01, (2, 1, 1)), Prompts()
    for _ in range(5000):
        long.learn([step._replace(draft_prompt_s=0.2)], "w")
    seconds, drafting_tokens, *_ = long.sums["w"]
    assert seconds / drafting_tokens == pytest.approx(MOST_STEPS * 0.01 / step.num_tokens, rel=0.1)


def test_one_worker_of_two_that_tells_of_long_prompts_does_not_keep_drafting_off():
    """A liar, or a worker with a wrong timer: 26 ms with every step of 13. Once, the other one left drafting for good."""
    steps = Steps(1, acceptance=0.6)
    steps.time = lambda batch, length: 0.010 + 0.001 * length
    controller = controller_for(steps)
    for _ in range(400):
        for worker, prompt_s in (("liar", 0.026), ("w", 0.0)):
            controller.observe(KEY, [fed(steps, 4, controller.length_for(KEY, 4, worker), prompt_s)], worker)
    assert controller.length_for(KEY, 4, "w") > 0


def test_most_workers_say_what_prompts_cost_and_who_has_gone_does_not():
    controller, steps = controller_for(Steps(1)), Steps(1)
    for _ in range(100):
        for worker, prompt_s in (("liar", 0.02), ("new", 0.001), ("w", 0.001)):
            controller.observe(KEY, [fed(steps, 4, 3, prompt_s)], worker)
    prompts = controller.context(KEY).prompts
    seconds, tokens, *_ = prompts.sums["w"]
    assert prompts.share.draft_s == pytest.approx(seconds / (tokens + PRIOR_TOKENS), rel=0.2)
    for _ in range(300):
        controller.observe(KEY, [fed(steps, 4, 3, 0.001)], "w")
    assert list(prompts.sums) == ["w"]


def test_a_large_fleet_has_so_many_votes_and_no_more():
    prompts, step = Prompts(), StepObservation(4, 2, 0.01, (2, 1, 1), draft_prompt_s=0.001)
    for at in range(3 * MOST_VOTES):
        prompts.learn([step], f"w{at}")
    assert len(prompts.sums) == MOST_VOTES + 1
    assert sum(sums[SECONDS] for sums in prompts.sums.values()) == pytest.approx(3 * MOST_VOTES * 0.001, rel=0.1)
    prompts.keep({"w5"})
    assert set(prompts.sums) == {"w5", ""}


def test_what_is_believed_of_lengths_is_their_time_and_their_share_of_prompts() -> None:
    controller, steps = controller_for(Steps(2)), Steps(2)
    controller.observe(KEY, [steps.step(4, 3) for _ in range(50)], "w")
    context = controller.context(KEY)
    bucket, choice = controller.bucket_index(KEY, 4), context.main.choice
    before, tokens = choice.seconds[bucket].copy(), choice.tokens[bucket].copy()
    controller.observe(KEY, [fed(steps, 4, 3, 0.01) for _ in range(400)], "w")
    choice.assess(choice.tokens, context.main.times)
    without = choice.seconds[bucket].copy()
    each = context.prompts.share.draft_s
    assert each == pytest.approx(0.01 / (4.0 * tokens[3]), rel=0.2)
    choice.assess(choice.tokens, context.main.times, PromptShare(each))
    drafts = np.arange(len(tokens)) > 0
    assert choice.seconds[bucket] - without == pytest.approx(each * 4 * choice.tokens[bucket] * drafts)
    assert without == pytest.approx(before, rel=0.2)


def test_plans_that_draft_bear_it_and_those_that_copy_alone_do_not() -> None:
    plans, bucket, tokens = plans_at_four_rows()
    known = plans.assess(bucket, tokens)
    plans.prompts = PromptShare(0.001)
    more = plans.assess(bucket, tokens).seconds[0] - known.seconds[0]
    drafts = np.array([plan.draft_length > 0 for plan in plans.grid])
    assert more == pytest.approx(0.001 * 4 * known.tokens[0] * drafts)


def test_only_steps_that_were_to_draft_tell_of_it() -> None:
    prompts = Prompts()
    copying = Copies(Plan(0, 3, 8), 4, 0, 12, (CopiedRun(3, 4, 2, 2),))
    step = StepObservation(4, 0, 0.01, (4,), draft_prompt_s=0.5)
    prompts.learn([step, step._replace(copying=copying)])
    assert prompts.share.draft_s == 0.0
    drafting = copying._replace(plan=Plan(2, 3, 8))
    prompts.learn([StepObservation(4, 2, 0.01, (2, 1, 1), copying=drafting, draft_prompt_s=0.02)])
    # Four pending tokens, three drafted ones, and two copied ones of two rows.
    assert prompts.sums[""][DRAFTING_TOKENS] == 4 + 3 + 4
    assert prompts.share.draft_s == pytest.approx(0.02 / (11 + PRIOR_TOKENS))


def test_one_report_cannot_say_that_prompts_take_for_ever() -> None:
    prompts = Prompts()
    prompts.learn([StepObservation(4, 2, 0.01, (2, 1, 1), draft_prompt_s=3600.0)])
    assert prompts.sums[""][SECONDS] == pytest.approx(LARGEST_SHARE * 0.01)
    prompts.learn([StepObservation(4, 2, 10.0, (2, 1, 1), draft_prompt_s=3600.0)], usual_s=lambda step: 0.01)
    assert prompts.sums[""][SECONDS] == pytest.approx(2 * LARGEST_SHARE * 0.01, rel=1e-3)


def test_it_is_kept() -> None:
    first, steps = controller_for(Steps(4)), Steps(4)
    first.observe(KEY, [fed(steps, 4, 2, 0.01) for _ in range(100)], "w")
    second = restarted(first)
    assert second.context(KEY).prompts.share == first.context(KEY).prompts.share
    assert first.context(KEY).prompts.share.draft_s > 0.0
    more = [fed(steps, 4, 2, 0.01) for _ in range(20)]
    for estimator in (first, second):
        estimator.observe(KEY, more, "w")
    assert first.export_state(KEY) == second.export_state(KEY)
