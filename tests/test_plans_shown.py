"""Plans as people read them: explain, tables, top and the views name them in words, and say what others would cost."""

from __future__ import annotations

import pytest
from store_rows import cell, context, store_now
from test_learned_plans import KEY, ORDINARY, REPEATING, Played
from test_store_views import store, view  # noqa: F401

from speclen.cli.top import table_cells
from speclen.console.learned.table import plan_lines
from speclen.controller.analysis.explain import explain, in_words
from speclen.controller.estimator.plans.reviews import OutputReview
from speclen.store.records import Commit, PlanEstimateRow
from speclen.v1 import control_pb2, generation_pb2
from speclen.worker.config import WorkerConfig
from speclen.worker.models.naming import draft_of


def test_explain_says_why_rows_copy_and_what_the_runner_up_would_cost():
    played = Played(REPEATING)
    played.serve(120)
    words = in_words(explain(played.estimator, KEY, 8))
    assert words[0] == f"A batch of 8 (bucket 8) plays '{played.plan(8)}'."
    assert "copied tokens are accepted in" in words[2]
    assert sum("would need" in sentence for sentence in words) == 2, "the best other plan, and the best length"
    assert "copy>=" in words[-1] or any("last changed" in sentence and "copy>=" in sentence for sentence in words)


def test_the_numbers_of_a_plan_that_copies_can_all_be_true():
    """What whole outputs tell moved the tokens of a step, and not the share of rows that copy, which said far too little."""
    played = Played(REPEATING)
    played.serve(120)
    taught = explain(played.estimator, KEY, 8)
    review = OutputReview(0, bytes([8] * 64), bytes([16] * 64), bytes([16] * 64), bytes([0] * 64))
    for _ in range(40):
        steps = [played.step(8, played.plan(8))._replace(reviews=(review,) * 4) for _ in range(8)]
        played.estimator.observe(KEY, steps, "w")
    told = explain(played.estimator, KEY, 8)
    for each in (taught, told):
        rows, plan = each.copying_rows, each.plan
        assert rows is not None
        assert plan is not None
        of_all = rows.share * rows.tokens + (1.0 - rows.share) * rows.tokens_of_others
        assert of_all == pytest.approx(plan.expected_tokens)
        assert rows.tokens <= 1 + plan.plan.copy_max_tokens
        assert 0.0 < rows.right <= 1.0
        assert f"{100 * rows.share:.0f}% of the rows find" in in_words(each)[2]
    plans = played.estimator.context(KEY).main.plans
    assert plans is not None
    assert not told.plan.plan.draft_length
    by_steps = float(plans.now().share[plans.place[told.plan.plan]])
    assert 1 + by_steps * told.plan.plan.copy_max_tokens < told.plan.expected_tokens, (
        "the share that single steps taught"
    )


def test_explain_says_what_copying_would_cost_where_it_is_not_done():
    played = Played(ORDINARY)
    played.serve(120)
    plans = played.estimator.context(KEY).main.plans
    assert plans is not None
    plans.chosen[7] = None  # a plan that hardly ever copies is as good as a length here: either may be in use
    words = in_words(explain(played.estimator, KEY, 8))
    assert any(sentence.startswith("Rows do not copy: the best plan that does, 'copy>=") for sentence in words)


def plan_row(**changes) -> PlanEstimateRow:
    fields = {
        "context_id": 1,
        "batch_min": 3,
        "batch_max": 4,
        "place": 0,
        "plan": "copy>=3 up to 8, else draft 2",
        "speculation_length": 2,
        "step_s": 0.012,
        "expected_tokens": 4.0,
        "ms_per_token_low": 2.8,
        "ms_per_token_high": 3.2,
        "is_best": True,
        "updated_at": 1.0,
    }
    return PlanEstimateRow(**{**fields, **changes})


def test_views_and_tables_show_the_plan_in_use_before_the_length(store):  # noqa: F811
    cells = [cell(0, step_s=0.01, expected_tokens=1.0), cell(2, step_s=0.016, expected_tokens=3.2, is_best=True)]
    rows = [plan_row(), plan_row(place=1, plan="copy>=2 up to 8", speculation_length=0, is_best=False)]
    store_now(store, Commit(contexts=[context()], latency_cells=cells, plan_estimates=rows))
    (choice,) = view(store, "choices")
    assert (choice["length"], choice["ms_per_token"]) == ("copy>=3 up to 8, else draft 2", 3.0)
    (current,) = view(store, "current_choice")
    assert (current["plan"], current["ms_per_token"]) == ("copy>=3 up to 8, else draft 2", 3.0)
    assert [row["is_best"] for row in view(store, "plan_table")] == [1, 0]
    (line,) = plan_lines(store.path, "")
    assert str(line).startswith("batch 3-4 plays 'copy>=3 up to 8, else draft 2' instead: 3 ms per token")


def test_a_plan_is_said_to_be_played_where_it_is_and_not_in_between(store):  # noqa: F811
    cells = [cell(0, batch_min=low, batch_max=high, is_best=True) for low, high in ((1, 1), (2, 2), (3, 4), (5, 6))]
    places = ((1, 1, 0.040), (3, 4, 0.038), (5, 6, 0.044))
    rows = [plan_row(batch_min=low, batch_max=high, step_s=step_s) for low, high, step_s in places]
    rows.append(plan_row(batch_min=2, batch_max=2, is_best=False))
    store_now(store, Commit(contexts=[context()], latency_cells=cells, plan_estimates=rows))
    lines = [str(line).partition(" (")[0] for line in plan_lines(store.path, "")]
    said = "plays 'copy>=3 up to 8, else draft 2' instead:"
    assert lines == [f"batch 1 {said} 10 ms per token", f"batch 3-6 {said} 9.5 to 11 ms per token"]


def test_top_shows_plans_in_words_and_lengths_as_numbers():
    plan = control_pb2.Plan(draft_length=2, copy_min_match=3, copy_max_tokens=8)
    choices = [
        control_pb2.BucketChoice(batch_min=1, batch_max=1, speculation_length=2, plan=plan),
        control_pb2.BucketChoice(batch_min=2, batch_max=2, speculation_length=2, plan=plan),
        control_pb2.BucketChoice(batch_min=3, batch_max=4, speculation_length=1),
    ]
    info = generation_pb2.GetServerInfoResponse(
        table_source="controller", table=control_pb2.LengthTable(choices=choices)
    )
    assert table_cells(info) == ["controller", "1-2:(copy>=3 up to 8, else draft 2) 3-4:1"]


@pytest.mark.parametrize(
    ("target", "draft", "used"),
    [
        ("bundled:target", "auto", "bundled:draft"),
        ("bundled:target-60m", "auto", "bundled:draft"),
        ("/models/mine", "auto", ""),
        ("/models/mine", "/models/small", "/models/small"),
        ("bundled:target", "none", "none"),
    ],
)
def test_a_target_of_ones_own_is_not_drafted_for_by_the_bundled_draft(target, draft, used):
    assert draft_of(target, draft) == used
    config = WorkerConfig(target=target, draft=draft)
    assert (config.draft, config.has_draft) == (used, used not in ("", "none"))
