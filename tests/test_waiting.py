"""Requests wait for their first token behind steps of any length: workers tell how many do, and lengths bear it."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_models
from engines import generate, make_engine, request
from steps_of import KEY, Steps, controller_for, plans_at_four_rows, restarted

from speclen.bench.simulation import waiting
from speclen.controller.estimator.choice import PromptShare
from speclen.controller.estimator.contexts.prompts import (
    LEAST_TOKENS,
    NEW_ROWS,
    PRIOR_TOKENS,
    TOKENS,
    WAITED_STEPS,
    Prompts,
)
from speclen.controller.estimator.core import Limits, StepObservation
from speclen.controller.estimator.plans.plan import CopiedRun, Copies, Plan
from speclen.controller.wire.ingest import Group, Origin, read_reports
from speclen.controller.wire.stored import observation_of
from speclen.store.records import ReportRow
from speclen.worker.engine.length_chooser import FixedLength, LengthChoice, StepResult
from speclen.worker.reporting.messages import to_report
from speclen.worker.reporting.window import to_sum

PROMPT = tiny_models.tokenizer().encode("The target verifies what")


class Reported(FixedLength):
    """Plain decoding; keeps how many rows were new."""

    def __init__(self) -> None:
        super().__init__(0)
        self.new: list[int] = []

    def report(self, choice: LengthChoice, result: StepResult) -> None:
        self.new.append(result.num_new_rows)


def test_a_worker_tells_of_rows_that_wait_behind_a_step() -> None:
    chooser = Reported()
    engine = make_engine(chooser=chooser, max_batch_size=3)
    for name in ("a", "b", "c", "d"):
        engine.submit(request(name, PROMPT, max_tokens=5, ignore_eos=True), lambda output: None)
        for _ in range(2):
            engine.step()
    # Nobody decoded before the first one's prompt was fed. The last has no row until the first one's is free.
    assert chooser.new[:5] == [0, 1, 0, 1, 0]
    generate(engine)
    assert sum(chooser.new) == 3


def test_who_comes_to_an_idle_worker_waits_for_nobody() -> None:
    chooser = Reported()
    engine = make_engine(chooser=chooser, max_batch_size=2)
    for at in range(2):
        generate(engine, *(request(f"{at}{name}", PROMPT, max_tokens=3, ignore_eos=True) for name in "ab"))
    assert not any(chooser.new)


def test_who_shares_a_prompt_that_was_fed_waits_for_nothing() -> None:
    """The third sequence gets its row late, and its first token before the step, by a copy."""
    chooser = Reported()
    engine = make_engine(chooser=chooser, max_batch_size=3)
    generate(
        engine,
        request("other", PROMPT, max_tokens=3, ignore_eos=True),
        request("many", PROMPT[::-1], max_tokens=20, ignore_eos=True, n=3),
    )
    assert len(chooser.new) > 20
    assert sum(chooser.new) == 0


def test_reports_sums_and_the_database_tell_it() -> None:
    results = [StepResult(2, 1, 0.01, (1, 1), 9.0, num_new_rows=number) for number in (1, 3)]
    records = [(at, LengthChoice(1), result) for at, result in enumerate(results, 1)]
    reports = [to_report(*record) for record in records]
    assert [report.num_new_rows for report in reports] == [1, 3]
    assert to_sum(records).num_new_rows == 4
    group = Group()
    assert read_reports(reports, Limits(4, 2), Origin(1, 1, 1, 0.0), group) == []
    assert [each.num_new_rows for each in group.observations] == [1, 3]
    kept = [observation_of(ReportRow(1, *row)) for row in group.rows]
    assert kept == group.observations


def beside(steps: Steps, batch: int, length: int, num_new_rows: int) -> StepObservation:
    return steps.step(batch, length)._replace(num_new_rows=num_new_rows)


def test_what_is_chosen_is_the_least_time_per_token_with_its_share_of_the_wait() -> None:
    """Against the choice by hand, and where nobody waits the one that makes the most tokens."""
    chosen = []
    for num_new in (0, 1, 2):
        controller, steps = controller_for(Steps(1)), Steps(1)
        for _ in range(400):
            length = controller.length_for(KEY, 4)
            controller.observe(KEY, [beside(steps, 4, length, num_new)], "w")
        context, bucket = controller.context(KEY), controller.bucket_index(KEY, 4)
        choice, waits = context.main.choice, context.prompts.share.steps
        assert (waits > 0.0) == (num_new > 0)
        step_s, tokens = context.main.times.seconds()[bucket], choice.tokens[bucket]
        assert choice.seconds[bucket] == pytest.approx(step_s * (1.0 + waits * tokens))
        cost = step_s * (1.0 / tokens + waits)
        length = controller.length_for(KEY, 4)
        assert cost[length] < 1.02 * cost.min(), num_new
        chosen.append(length)
    assert chosen[0] > chosen[2]
    assert chosen[0] >= chosen[1] >= chosen[2]


def test_what_is_shown_holds_it_within_its_bounds() -> None:
    controller, steps = controller_for(Steps(1)), Steps(1)
    for _ in range(300):
        controller.observe(KEY, [beside(steps, 4, 2, 2) for _ in range(8)], "w")
    context = controller.context(KEY)
    assert context.prompts.share.steps > 0.1
    for row in controller.learned_rows(KEY):
        shown = row.estimate
        assert shown.ms_per_token_low <= shown.ms_per_token <= shown.ms_per_token_high
        assert shown.ms_per_token == pytest.approx(1e3 * shown.step_s / shown.expected_tokens)
    bucket = controller.bucket_index(KEY, 4)
    assert context.main.choice.step_s[bucket] == pytest.approx(context.main.times.seconds()[bucket])


def test_plans_bear_it_alike() -> None:
    plans, bucket, tokens = plans_at_four_rows()
    known = plans.assess(bucket, tokens)
    plans.prompts = PromptShare(steps=0.05)
    more = plans.assess(bucket, tokens)
    assert more.seconds == pytest.approx(known.seconds * (1.0 + 0.05 * known.tokens))


def test_it_is_counted_over_all_tokens_whatever_was_drafted_or_copied() -> None:
    prompts = Prompts()
    copying = Copies(Plan(0, 3, 8), 4, 0, 12, (CopiedRun(3, 4, 2, 2),))
    step = StepObservation(4, 0, 0.01, (4,), num_new_rows=2)
    prompts.learn([step, step._replace(copying=copying), StepObservation(4, 2, 0.01, (2, 1, 1), num_new_rows=1)])
    tokens = prompts.sums[""][TOKENS]
    assert tokens == 4 + (4 + 4) + (4 + 3)
    assert prompts.share.steps == pytest.approx(WAITED_STEPS * 5 / (tokens + PRIOR_TOKENS))


def test_a_worker_cannot_make_rows_up_without_end() -> None:
    """One of four claims 32 new rows in every step; the others have one in 20 steps of 12 tokens."""
    prompts = Prompts()
    step = StepObservation(4, 2, 0.01, (1, 2, 1))
    for at in range(2000):
        prompts.learn([step._replace(num_new_rows=32)], "liar")
        for worker in "abc":
            prompts.learn([step._replace(num_new_rows=at % 20 == 0)], worker)
    honest = 1 / 20 / 8
    assert prompts.share.steps == pytest.approx(WAITED_STEPS * honest, rel=0.1)
    claimed = prompts.sums["liar"]
    assert claimed[NEW_ROWS] < 1.1 / LEAST_TOKENS * claimed[TOKENS]
    crowd = Prompts()
    crowd.learn([StepObservation(1, 0, 0.01, (1,), num_new_rows=31)], "w")  # a burst is believed
    assert crowd.sums["w"][NEW_ROWS] == 31


def test_it_is_kept() -> None:
    first, steps = controller_for(Steps(4)), Steps(4)
    first.observe(KEY, [beside(steps, 4, 2, 1) for _ in range(100)], "w")
    second = restarted(first)
    assert second.context(KEY).prompts.share == first.context(KEY).prompts.share
    assert first.context(KEY).prompts.share.steps > 0.0
    bucket = first.bucket_index(KEY, 4)
    here, there = first.context(KEY).main.choice, second.context(KEY).main.choice
    assert there.seconds[bucket] == pytest.approx(here.seconds[bucket])


def test_of_two_plans_with_equal_tokens_per_second_the_shorter_steps_answer_sooner(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(waiting, "NUM_REQUESTS", 600)
    monkeypatch.setattr(waiting, "NUM_SEEDS", 1)
    monkeypatch.setattr(waiting, "LOADS", (0.6,))
    profile = Path(__file__).parent.parent / "docs/results/profile.json"
    waiting.main(profile, "0,1.25", "0.99,0.8", 55e-6)
    near, far = (line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:])
    assert near[2] == far[2] == "1.000"
    assert 0.9 < float(near[3].rstrip(" |")) < 0.99
    assert far[3].rstrip(" |") == "1.000"  # a fifth fewer tokens are no price for it
